"""Models with ``tf.while_loop``: what they read of the PS, and that neither the wire nor long runs change a bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train, variables_of

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.runtime.graph import builder, placement
from tfps.runtime.graph.passes import variable_packing

pytestmark = pytest.mark.slow

TURNS = 3


def numbers(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of sequences of normal numbers, others for each worker."""
    if mode == "eval":
        return None
    rng = np.random.default_rng(context.input_pipeline_id)
    return dataset_of(rng.normal(size=(8, TURNS, 4, 5)).astype(np.float32)).repeat()


def recurrent(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a net with a loop over a sequence, in it one of turns, a condition and a table, and one result unused."""
    kernel, scale = tf.get_variable("kernel", [5, 5]), tf.get_variable("scale", [])
    bias, table = tf.get_variable("bias", [5]), tf.get_variable("table", [7, 5])

    def inner(turn: Any, net: Any) -> Any:
        return turn + 1, tf.tanh(tf.matmul(net, kernel) + bias)

    def outer(count: Any, inputs: Any) -> Any:
        turn, net = count
        _, net = tf.while_loop(lambda turn, _: turn < 2, inner, (0, net + inputs))
        net = tf.cond(tf.equal(turn % 2, 0), lambda: net * scale, lambda: net + bias)
        return turn + 1, net + tf.gather(table, tf.stack([turn, turn, turn + 1]))[0]

    counts, nets = tf.scan(outer, features["x"], (0, tf.zeros([4, 5])))
    del counts
    loss = tf.reduce_mean(tf.square(nets[-1])) + tf.reduce_sum(bias)
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "momentum", learning_rate=0.1))


RECURRENT = model_of(numbers, recurrent)


def trained(directory: Path, **flags: Any) -> dict[str, bytes]:
    """Return the bytes of a job's variables, by name."""
    train(RECURRENT, 2, max_steps=20, model_dir=str(directory), **flags)
    return {name: np.asarray(value).tobytes() for name, value in variables_of(directory).items()}


def test_a_packed_run_is_a_plain_one(tmp_path: Path) -> None:
    """Two workers in sync end with the same bits; their loops have arrays, which TensorFlow gives no device."""
    made = [trained(tmp_path / wire, num_workers=2, mode="sync", wire=wire) for wire in ("plain", "packed")]
    assert made[0] == made[1]


def test_a_run_of_many_steps_is_as_many_runs(tmp_path: Path) -> None:
    """A loop whose results are not all used is copied like any other."""
    made = [trained(tmp_path / str(n), num_workers=1, steps_per_run=n) for n in (1, 5)]
    assert made[0] == made[1]


@pytest.mark.parametrize("wire", ["plain", "packed"])
def test_a_loop_reads_before_it(wire: str) -> None:
    """What a step only reads is read once, outside; in the loop the PS does nothing but what needs a turn's numbers."""
    built = builder.training(JobConfig(wire=wire), Cluster(("p:1",), ("w:1", "w:2")), Task("worker", 1), RECURRENT)
    ops = [op for op in placement.ancestors(built.fetches) if op._get_control_flow_context()]
    on_ps = {op.type for op in ops if placement.task_of(op) == "ps/0" and op.type not in ("Enter", "Switch")}
    assert on_ps == {"ReadVariableOp", "ResourceGather"}
    reads = {op._get_control_flow_context().name for op in ops if op.type == "ReadVariableOp"}
    assert all("cond" in name for name in reads)
    assert {placement.task_of(op) for op in ops} == {"ps/0", "worker/1"}


def test_what_only_loops_read_lives_packed() -> None:
    """Two variables of 25 and 5 numbers are one, which a step reads as one tensor."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        kernel, bias = tf.get_variable("kernel", [5, 5]), tf.get_variable("bias", [5])
        net = tf.scan(
            lambda net, inputs: tf.tanh(tf.matmul(net + inputs, kernel) + bias), features["x"], tf.zeros([4, 5])
        )
        return tfps.ModelSpec(loss=tf.reduce_mean(net), optimizer=tf.train.GradientDescentOptimizer(1.0))

    built = builder.training(JobConfig(), Cluster(("p:1",), ("w:1",)), Task("worker", 0), model_of(numbers, model_fn))
    assert variable_packing.sizes(built.graph) == {0: 4 * 30}


def test_a_loop_that_writes_reads_anew(tmp_path: Path) -> None:
    """The count is 1, 2, 3 in the first step's turns and 4, 5, 6 in the second's."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        count = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)

        def turn(index: Any, total: Any) -> Any:
            with tf.control_dependencies([count.assign_add(1.0, read_value=False)]):
                return index + 1, total + count.read_value()

        _, total = tf.while_loop(lambda index, _: index < TURNS, turn, (0, 0.0))
        loss = weight * tf.stop_gradient(total)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(numbers, model_fn), num_workers=1, max_steps=2, model_dir=str(tmp_path))
    assert variables_of(tmp_path) == {"weight": -21, "seen": 6, "global_step": 2}
