"""Several devices in a worker, on real servers: N logical devices are equal to one with N times the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import assert_done, model_of, run_job, train, variables_of

import tfps
from tfps.errors import ConfigError

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
