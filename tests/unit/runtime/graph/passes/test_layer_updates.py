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


def run_by_step(make: Any, is_used: bool = False) -> set[str]:
    """Return the names of the operations with which a step changes the variable of a dense layer, before its update.

    Args:
        make: A function of the layer.
        is_used: Whether the loss uses what it returns.
    """

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        layer, y = dense(features["x"])
        with tf.name_scope("mine"):
            more = make(layer)
        return sgd(tf.reduce_sum(y) + (tf.reduce_sum(more) if is_used else 0.0))

    built = builder.training(JobConfig(), cluster_of(2, 1), Task("worker", 0), model_of(ones, model_fn))
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
    assert run_by_step(lambda layer: listed(tf.identity(layer.kernel.assign(layer.kernel * 0.5)))) == clipped
    assert run_by_step(lambda layer: listed(tf.identity(layer.kernel.assign(value)))) == clipped


def test_a_group_over_several_devices_in_update_ops_runs_all_of_its_assignments() -> None:
    """TensorFlow makes a group of each device, and a group of these."""

    def make(layer: Any) -> None:
        with tf.device("/job:ps/task:0"):
            other = tf.get_variable("other", [], initializer=tf.zeros_initializer(), trainable=False)
            added = other.assign_add(1.0, read_value=False)
        with tf.device("/job:ps/task:1"):
            halved = layer.kernel.assign(layer.kernel * 0.5)
        both = tf.group(halved, added)
        assert any(op.type == "NoOp" for op in both.control_inputs)
        listed(both)

    assert run_by_step(make) == {"mine/AssignVariableOp", "mine/AssignAddVariableOp"}


def test_a_step_runs_an_assignment_whose_result_its_loss_uses() -> None:
    """But not one of a constant: that is a first value."""
    halve = lambda layer: layer.kernel.assign(layer.kernel * 0.5)  # noqa: E731
    assert run_by_step(halve) == set()
    assert run_by_step(halve, is_used=True) == {"mine/AssignVariableOp"}
    assert run_by_step(lambda layer: layer.kernel.assign(np.ones([1, 1], np.float32)), is_used=True) == set()


def test_what_a_loss_or_a_log_uses_of_an_assignment_is_kept(tmp_path: Path) -> None:
    """Each step counts, and sees what it has counted; a chain of assignments runs for the last of them."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        seen, shown, inner = (
            tf2.keras.Variable(0.0, trainable=False, name=name) for name in ("seen", "shown", "inner")
        )
        inside = inner.assign_add(2.0)
        log = {"shown": shown.assign(shown.value + inside)}
        return sgd(weight * seen.assign_add(features["x"][..., 0]), **log)

    def pairs(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones([4 * STEPS, 1], np.float32))

    train(model_of(pairs, model_fn), 1, 1, model_dir=str(tmp_path), max_steps=STEPS)
    values = variables_of(tmp_path)
    total = STEPS * (STEPS + 1) // 2
    found = {name: float(values[name]) for name in ("weight", "seen", "inner", "shown")}
    assert found == {"weight": -total, "seen": STEPS, "inner": 2 * STEPS, "shown": 2 * total}


class Sum(tf2.keras.metrics.Metric):  # type: ignore[misc]
    """Sums up what it is given."""

    def __init__(self) -> None:
        super().__init__(name="sum")
        self.total = self.add_variable((), initializer="zeros", name="total")

    def update_state(self, x: Any) -> None:
        """Add to the sum."""
        self.total.assign_add(x)

    def result(self) -> Any:
        """Return the sum."""
        return self.total.value


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_metric_of_a_model_is_updated(tmp_path: Path, mode: str) -> None:
    """Its own subclass of Keras's, whose method it calls itself: no file of Keras is among the callers."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        metric = Sum()
        metric.update_state(features["x"])
        return sgd(weight * features["x"], sum=metric.result())

    train(model_of(ones, model_fn), 1, 1, mode=mode, model_dir=str(tmp_path), max_steps=STEPS)
    assert [value for name, value in variables_of(tmp_path).items() if "total" in name] == [STEPS]


def test_an_assignment_that_no_step_runs_is_reported(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Once per variable, and not for what a layer or ``init_from_checkpoint`` does, or what a step runs."""

    def reports(make: Any) -> list[Any]:
        caplog.clear()
        run_by_step(make)
        return [record.args for record in caplog.records if "no step runs" in record.msg]

    def from_file(layer: Any) -> None:
        tf.train.init_from_checkpoint(path, {"k": tf.trainable_variables()[0]})
        tf2.keras.layers.BatchNormalization()(tf.ones([2, 2]), training=True)
        listed(layer.kernel.assign(layer.kernel * 0.5))

    with tf.Graph().as_default(), tf.Session() as session:
        saved = tf.Variable([[64.0]], name="k", use_resource=True)
        session.run(saved.initializer)
        path = tf.train.Saver([saved]).save(session, str(tmp_path / "before"))
    value = np.ones([1, 1], np.float32)
    assert reports(from_file) == []
    assert reports(lambda layer: layer.set_weights([value])) == [("dense/kernel",)]
    assert reports(lambda layer: [layer.kernel.assign(value) for _ in range(2)]) == [("dense/kernel",)]
    assert reports(lambda layer: Late(name="late")(layer.kernel + 0.0)) == [("mine/late/count",)]


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
