"""Claims about the reads of a step: which they are in the final graph, and that the count of updates comes first."""

from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from support.cluster import model_of, ones
from support.held_steps import Held

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.runtime.graph import builder, graph_editor
from tfps.runtime.graph.placement import ancestors, task_of

CLUSTER = Cluster(("p:1", "p:2"), ("w:1",))


def _built(model: Any, wire: str) -> builder.TrainGraph:
    config = JobConfig(staleness_lr=True, wire=wire, batch_size=1)
    return builder.training(config, CLUSTER, Task("worker", 0), model)


def _in_loop_and_function(*_args: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` that reads one variable in a branch, one in a function, and one in a loop."""
    one = tf.ones_initializer()
    weights = [tf.get_variable(name, [2], initializer=one) for name in ("branch", "function", "loop")]
    first = tf.cond(tf.random.uniform([]) > 2.0, lambda: 2.0 * weights[0].read_value(), weights[0].read_value)
    second = tf.function(lambda: 2.0 * weights[1].read_value())()
    turn = lambda at, total: (at + 1, total * weights[2].read_value())  # noqa: E731
    _, third = tf.while_loop(lambda at, _: at < 2, turn, [tf.constant(0), tf.ones([2])])
    return tfps.ModelSpec(loss=tf.reduce_sum(first + second + third), optimizer=tf.train.GradientDescentOptimizer(1.0))


@pytest.mark.parametrize("wire", ["packed", "bfloat16", "plain"])
@pytest.mark.parametrize(
    "model", [Held(lambda: tf.train.GradientDescentOptimizer(1.0)).model(), model_of(ones, _in_loop_and_function)]
)
def test_a_step_reads_the_count_of_a_ps_before_its_parameters(model: Any, wire: str) -> None:
    """Also packed, gathered, and in branches, loops and functions; nothing else crosses the wire for it."""
    built = _built(model, wire)
    ops = ancestors(built.fetches)
    counts = {op.inputs[0].op.name: op for op in ops if op.type == "ReadVariableOp" and not op.control_inputs}
    counts = {task_of(op): op for name, op in counts.items() if name.startswith("tfps/updates_")}
    assert set(counts) == {"ps/0", "ps/1"}
    checks = [op for op in ops if op.type == "CheckNumerics"]
    used = [op for op in ancestors(checks) if any(map(graph_editor.is_handle, op.inputs))]
    reads = [op for op in used if op.type in ("ReadVariableOp", "ResourceGather") or graph_editor.is_call(op)]
    reads = [op for op in reads if any(task_of(tensor.op).startswith("ps/") for tensor in op.inputs)]
    assert reads
    for op in reads:
        places = {task_of(tensor.op) for tensor in op.inputs if graph_editor.is_handle(tensor)}
        assert {counts[place] for place in places} <= set(ancestors([op])), (op.name, op.type)
        if graph_editor.is_call(op):  # TensorFlow replaces it by its body: each handle waits
            handles = [tensor for tensor in op.inputs if graph_editor.is_handle(tensor)]
            assert all(counts[task_of(tensor.op)] in ancestors([tensor.op]) for tensor in handles)
    for place, count in counts.items():
        assert {task_of(user) for user in graph_editor.users(count)} == {place}
