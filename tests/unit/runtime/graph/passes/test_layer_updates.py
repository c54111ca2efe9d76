"""Claims about what Keras's layers change: each step runs their changes, and none that gives or takes a first value."""

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
from tfps.runtime.graph import builder
from tfps.runtime.graph.placement import ancestors

pytestmark = pytest.mark.slow

STEPS = 6


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones."""
    return None if mode == "eval" else dataset_of(np.ones(4 * STEPS, np.float32))


def kernels(model_dir: Path) -> list[float]:
    """Return the numbers of the dense layer in a checkpoint."""
    kernel: list[float] = variables_of(model_dir)["dense/kernel"].reshape([-1]).tolist()
    return kernel


def dense(x: Any) -> Any:
    """Return a dense layer that was called, and what it returned."""
    layer = tf2.keras.layers.Dense(1, use_bias=False, name="dense")
    return layer, layer(tf.reshape(x, [1, 1]))


def sgd(loss: Any, **shown: Any) -> tfps.ModelSpec:
    """Return a model that takes steps of 1."""
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0), log_tensors=shown)


def from_checkpoint(path: str) -> Any:
    """Return a model whose layer starts from the value ``k`` of a checkpoint."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        _, y = dense(features["x"])
        tf.train.init_from_checkpoint(path, {"k": tf.trainable_variables()[0]})
        return sgd(tf.reduce_sum(y))

    return model_fn


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_layer_learns_from_the_value_of_a_checkpoint(tmp_path: Path, mode: str) -> None:
    """``init_from_checkpoint`` replaces the first value; no step takes the layer back to the one that it replaced."""
    with tf.Graph().as_default(), tf.Session() as session:
        saved = tf.Variable([[64.0]], name="k", use_resource=True)
        session.run(saved.initializer)
        path = tf.train.Saver([saved]).save(session, str(tmp_path / "before"))
    model = model_of(ones, from_checkpoint(path))
    train(model, 1, 1, mode=mode, model_dir=str(tmp_path / "job"), max_steps=STEPS)
    assert kernels(tmp_path / "job") == [64.0 - STEPS]


def run_by_step(make: Any) -> set[str]:
    """Return the types of the operations with which a step changes the variable of a dense layer, before its update."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        layer, y = dense(features["x"])
        with tf.name_scope("mine"):
            make(layer)
        return sgd(tf.reduce_sum(y))

    built = builder.training(JobConfig(), cluster_of(1, 1), Task("worker", 0), model_of(ones, model_fn))
    run = {op.name for op in ancestors([built.step.train_op])}
    return {name for name in run if "Assign" in name and name.startswith(("mine/", "dense/"))}


def listed(*updates: Any) -> None:
    """Add something to ``UPDATE_OPS``."""
    for update in updates:
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)


def test_only_update_ops_run_what_a_model_assigns_to_a_layer() -> None:
    """An assignment outside a layer runs in no step unless it is in ``UPDATE_OPS``, where Keras gives its value."""
    value = np.ones([1, 1], np.float32)
    assert run_by_step(lambda layer: layer.kernel.assign(value)) == set()
    assert run_by_step(lambda layer: layer.kernel.assign_add(value)) == set()
    assert run_by_step(lambda layer: layer.set_weights([value])) == set()
    clipped = {"mine/AssignVariableOp"}
    assert run_by_step(lambda layer: listed(layer.kernel.assign(tf.minimum(layer.kernel.value, 1.0)))) == clipped
    assert run_by_step(lambda layer: listed(tf.group(layer.kernel.assign(layer.kernel * 0.5)))) == clipped


class Late(tf2.keras.layers.Layer):  # type: ignore[misc]
    """Gives its variable a value in ``build``, makes another one when it is called, and counts its calls."""

    def build(self, _: Any) -> None:
        """Create the count."""
        self.count = self.add_weight(shape=(), name="count", initializer="zeros", trainable=False)
        self.count.assign(50.0)

    def call(self, x: Any) -> Any:
        """Count, and return ``x``."""
        self.late = tf2.Variable(0.0, trainable=False, name="late")
        self.late.assign_add(1.0)
        self.count.assign_add(1.0)
        return x + 0.0


def test_a_layer_is_built_once(tmp_path: Path) -> None:
    """What ``build`` assigns and the first value of a variable of ``call`` are no part of a step; the counts are."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        late = Late(name="late")
        loss = weight * late(features["x"])
        late.late._initializer_op = late.late.assign(0.0).op  # as ``init_from_checkpoint`` does it
        return sgd(loss)

    train(model_of(ones, model_fn), 1, 1, model_dir=str(tmp_path), max_steps=STEPS)
    counts = [value for name, value in variables_of(tmp_path).items() if name.startswith("late")]
    assert counts == [STEPS, STEPS]


class Watching(tf2.keras.layers.Layer):  # type: ignore[misc]
    """Counts its calls, and reads a weight for it."""

    def build(self, _: Any) -> None:
        """Create the count."""
        self.count = self.add_weight(shape=(), name="count", initializer="zeros", trainable=False)

    def watch(self, x: Any, weight: Any) -> Any:
        """Return ``x`` by way of a call."""
        self.weight = tf.identity(weight)
        return self(x)

    def call(self, x: Any) -> Any:
        """Count, and return ``x``."""
        self.count.assign(self.count + 1.0 + 0.0 * self.weight)
        return x + 0.0


@pytest.mark.parametrize(("mode", "wire"), [("async", "packed"), ("sync", "plain")])
def test_a_layer_in_a_branch_that_is_not_taken_does_not_stop_the_step(tmp_path: Path, mode: str, wire: str) -> None:
    """The layer counts the steps in which it is called, and the optimizer makes every step."""

    def threes(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([1, 2, 3] * 2 * STEPS))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        layer = Watching(name="watching")
        layer.build(None)
        x = features["x"]
        taken = tf.cond(x > 2.0, lambda: layer.watch(x, weight), lambda: x)
        return sgd(weight * taken)

    train(model_of(threes, model_fn), 1, 1, 60, mode=mode, wire=wire, model_dir=str(tmp_path), max_steps=3 * STEPS)
    values = variables_of(tmp_path)
    assert (values["weight"], values["watching/count"]) == (-6 * STEPS, STEPS)
