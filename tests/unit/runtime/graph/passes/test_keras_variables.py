"""Claims about Keras layers that are frozen or constrained: what is frozen is not trained, no constraint is ignored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import cluster_of, dataset_of, model_of, train, variables_of

import tfps
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.runtime.graph import builder

pytestmark = pytest.mark.slow

STEPS = 4


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones."""
    return None if mode == "eval" else dataset_of(np.ones(4 * STEPS, np.float32))


def dense(name: str, **kwargs: Any) -> Any:
    """Return a layer with one number, which is 0."""
    return tf2.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name, **kwargs)


@pytest.mark.parametrize("wire", ["packed", "plain"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_frozen_layers_are_not_trained(tmp_path: Path, mode: str, wire: str) -> None:
    """Whether frozen as they are made, after they are built, or within a model; all others are."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        x = tf.reshape(features["x"], [1, 1])
        made, built, free = dense("made", trainable=False, kernel_constraint="non_neg"), dense("built"), dense("free")
        inner = tf2.keras.Sequential([dense("inner")], name="outer")
        late = tf2.keras.Sequential([dense("late")], name="later")
        inner.trainable = False
        loss = tf.reduce_sum(tf.add_n([layer(x) for layer in (made, built, free, inner, late)]))
        built.trainable = late.trainable = False
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(ones, model_fn), 1, 1, mode=mode, wire=wire, model_dir=str(tmp_path), max_steps=STEPS)
    found = {n: float(v.reshape([])) for n, v in variables_of(tmp_path).items() if "kernel" in n}
    assert sorted(found.values()) == [-STEPS, 0, 0, 0, 0]
    assert found["free/kernel"] == -STEPS


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_a_frozen_layer_makes_later_is_frozen(is_frozen: bool) -> None:
    """Keras does not freeze layers that a frozen layer makes as it is built, but counts none of their variables."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        x = tf.reshape(features["x"], [1, 1, 1])
        attention = tf2.keras.layers.MultiHeadAttention(1, 1, name="attention", trainable=not is_frozen)
        y = dense("free")(attention(x, x))
        assert len(attention.trainable_variables) == (0 if is_frozen else 8)
        return tfps.ModelSpec(loss=tf.reduce_sum(y), optimizer=tf.train.GradientDescentOptimizer(1.0))

    built = builder.training(JobConfig(), cluster_of(1, 1), Task("worker", 0), model_of(ones, model_fn))
    trained = [variable.op.name for variable in built.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)]
    assert "free/kernel" in trained
    assert len(trained) == (1 if is_frozen else 9)


class Calls(tf2.keras.Model):  # type: ignore[misc]
    """Calls its parts one after another; has no ``build``, so Keras creates their variables when all are called."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = list(parts)

    def call(self, x: Any) -> Any:
        """Return what the last part returns."""
        for part in self.parts:
            x = part(x)
        return x


class Teacher(tf2.keras.layers.Layer):  # type: ignore[misc]
    """Frozen, and calls a layer that it does not own."""

    def __init__(self) -> None:
        super().__init__(trainable=False)

    def call(self, x: Any, decode: Any) -> Any:
        """Return what the other layer returns."""
        return decode(x)


def unfrozen_in_frozen(outer: Any) -> Any:
    """Fine-tune the last layer of a frozen encoder."""
    encoder = tf2.keras.Sequential([dense("first"), dense("last")])
    encoder.trainable = False
    encoder.layers[-1].trainable = True
    return outer(encoder, dense("head"))


def built_before_frozen() -> Any:
    """Build a layer, and then put it into a frozen container."""
    inner = dense("inner")
    inner.build((None, 1))
    return tf2.keras.Sequential([inner], trainable=False)


def frozen_and_built() -> Any:
    """Build a frozen container, which Keras does by calling its layers with symbols."""
    net = tf2.keras.Sequential([dense("inner")], trainable=False)
    net.build((None, 1))
    return net


def unfrozen_and_built() -> Any:
    """Build an encoder, freeze it, and call it alone: Keras trains nothing of it."""
    encoder = tf2.keras.Sequential([tf2.keras.Input((1,)), dense("first"), dense("last")])
    encoder.trainable = False
    encoder.layers[-1].trainable = True
    return encoder


def frozen_before_built() -> Any:
    """Freeze a layer, and create what it holds only afterward."""
    return Calls(tf2.keras.Sequential([dense("inner")], trainable=False), dense("head"))


@pytest.mark.parametrize(
    ("made", "trained"),
    [
        (lambda: unfrozen_in_frozen(lambda *parts: tf2.keras.Sequential(parts)), 2),
        (lambda: unfrozen_in_frozen(Calls), 2),
        (built_before_frozen, 0),
        (frozen_and_built, 0),
        (unfrozen_and_built, 0),
        (frozen_before_built, 2),
    ],
)
def test_what_keras_would_train_is_trained(made: Any, trained: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is what the layer that the model calls lists. A frozen layer in it that Keras trains is named."""
    listed: list[int] = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        net = made()
        x = tf.reshape(features["x"], [1, 1])
        y = dense("free")(net(x))
        listed.append(len(net.trainable_variables))
        return tfps.ModelSpec(loss=tf.reduce_sum(y), optimizer=tf.train.GradientDescentOptimizer(1.0))

    built = builder.training(JobConfig(), cluster_of(1, 1), Task("worker", 0), model_of(ones, model_fn))
    names = [variable.op.name for variable in built.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)]
    assert listed == [trained]
    assert len(names) == trained + 1
    assert "free/kernel" in names
    assert ("is frozen, but Keras trains this in it" in caplog.text) == bool(trained)


def test_a_layer_that_a_frozen_one_calls_is_trained() -> None:
    """The model calls it, too, and the frozen one does not own it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        shared, x = dense("shared"), tf.reshape(features["x"], [1, 1])
        loss = tf.reduce_sum(Teacher()(x, decode=shared) + shared(x))
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    built = builder.training(JobConfig(), cluster_of(1, 1), Task("worker", 0), model_of(ones, model_fn))
    [variable] = built.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    assert variable.op.name.endswith("shared/kernel")


class Listed(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Trains the variables of a function, whatever the collection has."""

    def __init__(self, variables: Any) -> None:
        super().__init__(1.0)
        self._variables = variables

    def compute_gradients(self, loss: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Return the gradients of those alone."""
        return super().compute_gradients(loss, self._variables())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_frozen_variable_in_the_optimizers_own_list_is_refused(mode: str) -> None:
    """It would be trained. The line is that of the variable; both ways that the message names train what is free."""

    def model_of_list(listed: Any) -> Any:
        def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
            frozen, free = dense("frozen", trainable=False), dense("free")
            loss = tf.reduce_sum(free(1.0 + frozen(tf.reshape(features["x"], [1, 1]))))
            return tfps.ModelSpec(loss=loss, optimizer=Listed(listed(free)))

        return model_of(ones, model_fn)

    def built(listed: Any) -> Any:
        return builder.training(JobConfig(mode=mode), cluster_of(1, 1), Task("worker", 0), model_of_list(listed))

    def all_now(_layer: Any) -> Any:
        variables = tf.trainable_variables()
        return lambda: variables

    text = rf"^--model=test: {__file__}, line \d+: the optimizer trains variable 'frozen/kernel', which is frozen"
    with pytest.raises(ModelError, match=text):
        built(all_now)
    for listed in (lambda _: tf.trainable_variables, lambda layer: lambda: [layer.kernel.value]):
        untrained = {"frozen/kernel", "free/kernel"}.intersection(built(listed).may_be_inf)
        assert untrained == {"frozen/kernel"}


def constrained(is_kept: bool) -> Any:
    """Return a model with a constraint, which Keras would keep or the model keeps itself."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        constraint = tf2.keras.constraints.NonNeg()
        layer = dense("dense", kernel_constraint=constraint if is_kept else None)
        loss = tf.reduce_sum(layer(tf.reshape(features["x"], [1, 1])))
        if not is_kept:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, layer.kernel.assign(constraint(layer.kernel.value)))
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    return model_fn


def test_a_constraint_is_refused_and_can_be_an_update(tmp_path: Path) -> None:
    """The message names the variable and its line, and what it says to do works: each step starts from 0."""
    with pytest.raises(ModelError, match=rf"{__file__}, line \d+: the Keras variable 'dense/kernel' has a constraint"):
        builder.training(JobConfig(), cluster_of(1, 1), Task("worker", 0), model_of(ones, constrained(True)))
    train(model_of(ones, constrained(False)), 1, 1, model_dir=str(tmp_path), max_steps=STEPS)
    assert variables_of(tmp_path)["dense/kernel"] == -1
