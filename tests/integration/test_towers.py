"""Several devices in a worker, on real servers: N logical devices are equal to one with N times the batch."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import model_of, train, variables_of
from support.processes import summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError, ModelError
from tfps.runtime.graph import builder, placement
from tfps.runtime.graph.towers import devices

pytestmark = pytest.mark.slow

ROWS = np.random.default_rng(3).integers(-8, 8, [96, 4]).astype(np.float32) / 8


def rows(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of batches of rows, and of labels, which ends."""
    if mode == "eval":
        return None
    data = tf.data.Dataset.from_tensor_slices(({"x": ROWS, "id": np.arange(96) % 7}, ROWS.sum(1)))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(params["batch_size"])


def network(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with dense weights, a table of rows, a condition, a loop and a function."""
    first = tf.get_variable("first", [4, 5], initializer=tf.constant_initializer(np.arange(20).reshape(4, 5) / 16))
    last = tf.get_variable("last", [5, 1], initializer=tf.ones_initializer())
    table = tf.get_variable("table", [7, 5], initializer=tf.constant_initializer(np.arange(35).reshape(7, 5) / 32))
    hidden = features["x"] @ first + tf.nn.embedding_lookup(table, features["id"])
    hidden = tf.cond(tf.reduce_sum(hidden) > 0, lambda: hidden * 2, lambda: hidden * 2)
    hidden = tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), (0, hidden))[1]
    square = tf.custom_gradient(lambda x: (x * x, lambda dy: 2 * x * dy))
    loss = tf.reduce_mean(square((hidden @ last)[:, 0] - labels)) + 0.01 * tf.nn.l2_loss(first)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    return tfps.ModelSpec(loss=loss, optimizer=optimizer, log_tensors={"mean": tf.reduce_mean(labels)})


@pytest.fixture(params=["v2", "v1"])
def control_flow(request: pytest.FixtureRequest) -> Any:
    """Build conditions and loops in both ways."""
    (tf.enable_control_flow_v2 if request.param == "v2" else tf.disable_control_flow_v2)()
    yield
    tf.disable_control_flow_v2()


def trained(tmp_path: Path, name: str, model: Any = network, num_workers: int = 1, **flags: Any) -> Any:
    """Return the variables after a job."""
    train(
        model_of(rows, model),
        num_ps=2,
        num_workers=num_workers,
        model_dir=str(tmp_path / name),
        **{"max_steps": 4, **flags},
    )
    return variables_of(tmp_path / name)


@pytest.mark.parametrize("wire", ["packed", "plain"])
@pytest.mark.parametrize(("mode", "steps_per_run"), [("async", 1), ("async", 4), ("sync", 1), ("ssp", 1)])
@pytest.mark.usefixtures("control_flow")
def test_devices_are_equal_to_a_larger_batch(tmp_path: Path, mode: str, steps_per_run: int, wire: str) -> None:
    """Four devices with six rows each take the same steps as one with 24."""
    flags = {"mode": mode, "wire": wire, "steps_per_run": steps_per_run}
    one = trained(tmp_path, "one", batch_size=24, **flags)
    four = trained(tmp_path, "four", batch_size=6, devices_per_worker="cpu:4", **flags)
    assert one.keys() == four.keys()
    for name, value in one.items():
        np.testing.assert_allclose(four[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    assert np.abs(four["table"] - np.arange(35).reshape(7, 5) / 32).max() > 0.001


def product(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose gradient is the mean of its features."""
    weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(features["x"] @ weight[:, None])
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


def test_the_end_of_an_input_loses_no_example(tmp_path: Path) -> None:
    """Six batches of 16 on four devices are two steps: the mean of four, and then that of two."""
    found = trained(tmp_path, "a", product, batch_size=16, devices_per_worker="cpu:4", max_steps=50)
    assert found["global_step"] == 2
    np.testing.assert_allclose(found["weight"], -ROWS[:64].mean(0) - ROWS[64:].mean(0), rtol=1e-5)
    assert summary(tmp_path / "a")["batch_size"] == 48


def noted(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that counts its examples and its steps, and draws random numbers."""
    spec = product(features, labels, mode, params)
    seen = tf.get_variable("seen", [], trainable=False, initializer=tf.zeros_initializer())
    average = tf.get_variable("average", [], trainable=False, initializer=tf.zeros_initializer())
    moved = average.assign(average * 0.5 + tf.reduce_sum(features["x"]))
    tf.add_to_collection(
        tf.GraphKeys.UPDATE_OPS, tf.group(seen.assign_add(tf.cast(tf.size(labels), tf.float32)), moved)
    )
    return spec


@pytest.mark.parametrize(("updates", "examples"), [("first", 24.0), ("all", 96.0)])
def test_updates_are_of_the_first_batch_or_of_all_in_turn(tmp_path: Path, updates: str, examples: float) -> None:
    """As so many steps would make them, one after the other."""
    flags = {"devices_per_worker": "cpu:4", "tower_updates": updates}
    found = trained(tmp_path, "a", noted, batch_size=6, steps_per_run=2, **flags)
    assert found["seen"] == examples
    average = 0.0
    for batch in ROWS.reshape(16, -1)[:: 4 if updates == "first" else 1]:
        average = average * 0.5 + batch.sum()
    np.testing.assert_allclose(found["average"], average, rtol=1e-5)


def keyed(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose loss uses what its batch has changed."""
    spec = product(features, labels, mode, params)
    total = tf.get_variable("total", [], trainable=False, initializer=tf.zeros_initializer())
    return spec.__class__(loss=spec.loss * total.assign_add(tf.reduce_sum(labels)), optimizer=spec.optimizer)


def noisy(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose gradient is a random sign and whose square tells whether all towers drew the same."""
    weight = tf.get_variable("weight", [64], initializer=tf.zeros_initializer())
    state = tf.get_variable("state", [2], tf.int64, trainable=False, initializer=tf.ones_initializer())
    first = tf.sign(tf.random.uniform([32]) - 0.5)
    second = tf.sign(tf.random.stateless_uniform([32], tf.identity(state)) - 0.5)
    return tfps.ModelSpec(
        loss=tf.reduce_sum(weight * tf.concat([first, second], 0)), optimizer=tf.train.GradientDescentOptimizer(1.0)
    )


def test_random_numbers_differ_between_devices(tmp_path: Path) -> None:
    """The mean of four random signs is a sign only where all drew the same."""
    found = trained(tmp_path, "a", noisy, batch_size=6, devices_per_worker="cpu:4", max_steps=1)["weight"]
    assert set(np.abs(found)) == {0.0, 0.5, 1.0}
    assert (np.abs(found[:32]) < 1).any()
    assert (np.abs(found[32:]) < 1).any()


def built(model: Any, **flags: Any) -> builder.TrainGraph:
    """Return the graph of a worker with four devices."""
    config = JobConfig(**{"devices_per_worker": "cpu:4", "batch_size": 6, **flags})
    return builder.training(config, Cluster(("p:1",), ("w:1",)), Task("worker", 0), model_of(rows, model))


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_parameters_cross_the_wire_once(wire: str) -> None:
    """What a step receives and sends does not depend on the number of devices."""
    found = {}
    for given in ("1", "cpu:4"):
        graph = built(product, devices_per_worker=given, wire=wire)
        on = {op.device.rpartition(":")[2] for op in placement.ancestors(graph.fetches) if "CPU" in op.device}
        found[given] = sorted((one.source, one.target, one.num_bytes) for one in placement.transfers(graph.fetches))
        users = [op for op in placement.ancestors(graph.fetches) for t in op.inputs if t.op.type == "ReadVariableOp"
                 and placement.task_of(t.op) == "ps/0" and placement.task_of(op) == "worker/0"]  # fmt: skip
        assert len({op.device for op in users}) <= 1
    assert found["1"] == found["cpu:4"]
    assert on >= {"1", "2", "3"}


def test_a_loss_that_uses_what_its_batch_changes_is_refused() -> None:
    """With the fix, each device's batch makes the change in turn."""
    with pytest.raises(ModelError, match=r"changes 'total' with its batch.*--tower_updates=all"):
        built(keyed)
    built(keyed, tower_updates="all")


def test_too_many_gpus_are_refused_on_the_worker() -> None:
    """The error lists what the worker has."""
    with pytest.raises(ConfigError, match=r"--devices_per_worker=9.*fewer GPUs on this worker \(none\)"):
        devices.check(JobConfig(devices_per_worker="9"))


def with_python(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a gradient through Python."""
    weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
    doubled = tf.ensure_shape(tf.py_function(lambda x: x * 2, [features["x"] @ weight[:, None]], tf.float32), [None, 1])
    return tfps.ModelSpec(loss=tf.reduce_mean(doubled), optimizer=tf.train.GradientDescentOptimizer(1.0))


def test_a_gradient_through_python_is_refused() -> None:
    """The gradients of two devices would be taken for one another."""
    with pytest.raises(ModelError, match=r"gradient of a tf\.py_function"):
        built(with_python)


class Clipping(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Clips each gradient, as ``compute_gradients`` of the base class returns it."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return clipped gradients."""
        return [(tf.clip_by_norm(gradient, 0.01), one) for gradient, one in super().compute_gradients(*args, **kwargs)]


def layers(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model of Keras's layers, some in a function, with an optimizer of its own."""
    keras = importlib.import_module("keras")  # slow
    first, norm, drop = keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    hidden = drop(norm(first(features["x"]), training=True), training=True)
    weight = tf.get_variable("weight", [3], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf2.function(lambda x, w: tf.tanh(x) * w)(hidden, weight))
    return tfps.ModelSpec(loss=loss, optimizer=Clipping(1.0))


@pytest.mark.parametrize("updates", ["first", "all"])
def test_layers_train_with_one_set_of_variables(tmp_path: Path, updates: str) -> None:
    """The averages of batch norm move once a step, or once a device."""
    found = trained(
        tmp_path, "a", layers, num_workers=2, batch_size=6, devices_per_worker="cpu:4", tower_updates=updates
    )
    one = trained(tmp_path, "b", layers, num_workers=2, batch_size=6)
    assert found.keys() == one.keys()
    [moved] = [value for name, value in found.items() if "moving_variance" in name]
    assert np.isfinite(moved).all()
    assert (moved != 1).all()


def clipped(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose optimizer clips the gradient."""
    spec = product(features, labels, mode, params)
    return tfps.ModelSpec(loss=spec.loss, optimizer=Clipping(1.0))


def test_an_optimizer_gets_the_mean_of_the_devices(tmp_path: Path) -> None:
    """It clips the mean, and not each of them."""
    found = trained(tmp_path, "a", clipped, batch_size=6, devices_per_worker="cpu:4", max_steps=1)["weight"]
    mean = ROWS[:24].mean(0)
    np.testing.assert_allclose(found, -0.01 * mean / np.linalg.norm(mean), rtol=1e-5)


class Polyak(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Gradient descent whose rate is the loss, divided by the square of the gradient's norm."""

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the loss."""
        self.loss = loss
        return super().compute_gradients(loss, *args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        """Use it for the rate."""
        pairs = list(grads_and_vars)
        rate = 0.1 * self.loss / (1 + tf.add_n([tf.reduce_sum(gradient**2) for gradient, _ in pairs]))
        return super().apply_gradients([(rate * gradient, one) for gradient, one in pairs], global_step, name)


def seeded(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with noise whose seeds come with the examples, and an optimizer that uses the loss."""
    weight = tf.get_variable("weight", [4], initializer=tf.ones_initializer())
    draw = lambda seed: tf.random.stateless_normal([4], tf.stack([seed, seed]))  # noqa: E731
    noise = tf.map_fn(draw, features["id"], dtype=tf.float32)
    loss = tf.reduce_mean((tf.reduce_sum((features["x"] + noise) * weight, 1) - labels) ** 2)
    return tfps.ModelSpec(loss=loss, optimizer=Polyak(0.1))


def test_seeds_of_examples_and_the_loss_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    """A tower draws what the seeds of its examples say, and the optimizer gets the mean loss."""
    one = trained(tmp_path, "one", seeded, batch_size=8, max_steps=10)
    two = trained(tmp_path, "two", seeded, batch_size=4, max_steps=10, devices_per_worker="cpu:2")
    np.testing.assert_allclose(one["weight"], two["weight"], rtol=1e-5)
