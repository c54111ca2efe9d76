"""What travels between tasks, and that nothing but the number of tensors depends on how."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import (
    cluster_of,
    dataset_of,
    model_of,
    session_config,
    shared_servers,
    target_of,
    train,
    variables_of,
)

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.optimizers.registry import OPTIMIZERS
from tfps.runtime.graph import builder, placement, plan
from tfps.runtime.graph.passes import wire_packing

pytestmark = pytest.mark.slow

STEPS = 6


def numbers(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of normal numbers, others for each worker."""
    if mode == "eval":
        return None
    rng = np.random.default_rng(context.input_pipeline_id)
    return dataset_of(rng.normal(size=(STEPS, 4, 5)).astype(np.float32)).repeat()


def deep(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a dozen variables of odd sizes, a table, and one that is no float."""
    net = features["x"]
    for layer, width in enumerate((7, 3, 11, 2)):
        with tf.variable_scope(f"layer{layer}"):
            weight = tf.get_variable("weight", [net.shape[1], width])
            bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
            net = tf.tanh(tf.matmul(net, weight) + bias) + bias
    table = tf.get_variable("table", [6, 2])
    rows = tf.nn.embedding_lookup(table, [1, 4, 1, 0])
    scale = tf.cast(tf.get_variable("scale", [], tf.int64, tf.ones_initializer(), trainable=False), tf.float32)
    loss = scale * tf.reduce_mean(tf.square(net - rows))
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=0.1))


DEEP = model_of(numbers, deep)


def trained(directory: Path, num_ps: int, num_workers: int, **flags: Any) -> dict[str, bytes]:
    """Return the bytes of a job's variables, by name."""
    train(DEEP, num_ps, num_workers, max_steps=STEPS, model_dir=str(directory), **flags)
    return {name: np.asarray(value).tobytes() for name, value in variables_of(directory).items()}


@pytest.mark.parametrize(("num_ps", "optimizer"), [*((2, name) for name in OPTIMIZERS), (1, "adagrad")])
def test_a_packed_run_is_a_plain_one(tmp_path: Path, num_ps: int, optimizer: str) -> None:
    """``--wire`` changes no bit of weights, slots and steps, nor a name in the checkpoint: with one worker in async."""
    made = [trained(tmp_path / each, num_ps, 1, optimizer=optimizer, wire=each) for each in ("plain", "packed")]
    assert made[0] == made[1]
    assert len(made[0]) > 9


def test_a_packed_run_in_step_is_a_plain_one(tmp_path: Path) -> None:
    """The same with two workers in sync, whose sums do not depend on the order."""
    made = [
        trained(tmp_path / each, 2, 2, mode="sync", optimizer="momentum", wire=each) for each in ("plain", "packed")
    ]
    assert made[0] == made[1]


def test_ids_of_both_types_travel_with_their_rows(tmp_path: Path) -> None:
    """Rows of tables that are looked up with int32 and with int64 go as one tensor, and nothing differs."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        looked_up = []
        for index, dtype in enumerate((tf.int32, tf.int64, tf.int32)):
            ids = tf.cast(tf.abs(features["x"][:, index]) * 2, dtype)
            looked_up.append(tf.nn.embedding_lookup(tf.get_variable(f"table{index}", [9, 2]), ids))
        loss = tf.reduce_mean(tf.square(tf.concat(looked_up, 1) - 1))
        return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "adagrad", learning_rate=0.1))

    made, tensors = [], []
    for each in ("plain", "packed"):
        flags = {"wire": each, "max_steps": STEPS}
        train(model_of(numbers, model_fn), num_workers=1, model_dir=str(tmp_path / each), **flags)
        made.append({name: np.asarray(value).tobytes() for name, value in variables_of(tmp_path / each).items()})
        planned = plan.make(JobConfig(wire=each), Cluster(("p:1",), ("w:1",)), model_of(numbers, model_fn))
        tensors.append(len(planned.pulled) + len(planned.pushed))
    assert made[0] == made[1]
    assert tensors[1] < tensors[0]


@pytest.mark.parametrize(("mode", "num_ps"), [("async", 1), ("async", 3), ("sync", 2)])
def test_one_tensor_each_way_for_each_ps(mode: str, num_ps: int) -> None:
    """Dense variables of one type cost a pull and a push a PS, whatever their number; before, one each."""
    cluster = Cluster(tuple(f"p{i}:1" for i in range(num_ps)), ("w:1", "w:2"))
    planned = plan.make(JobConfig(mode=mode, optimizer="adam"), cluster, DEEP)
    assert planned.plain
    pulls, pushes = ([c for c in way if c.num_bytes and c.num_bytes > 16] for way in (planned.pulled, planned.pushed))
    assert len(pulls) == len(pushes) == num_ps
    assert sum(c.num_bytes or 0 for c in pushes) <= sum(c.num_bytes or 0 for c in planned.plain.pushed)
    assert len(planned.plain.pulled) > len(planned.pulled) + 6


def test_bfloat16_halves_the_bytes_and_the_variables_stay_float32(tmp_path: Path) -> None:
    """A gradient of 0.123456 arrives as 0.123535, the nearest there is; the PS keeps the weight itself."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [2], initializer=tf.constant_initializer(1 + 2**-20))
        seen = tf.get_variable("seen", [2], initializer=tf.zeros_initializer())
        loss = tf.reduce_sum(weight * 0.123456) + tf.reduce_sum(seen * tf.stop_gradient(weight))
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(numbers, model_fn), num_workers=1, max_steps=1, wire="bfloat16", model_dir=str(tmp_path))
    saved = variables_of(tmp_path)
    np.testing.assert_array_equal(saved["weight"], np.float32(1 + 2**-20) - np.float32([0.12353515625] * 2))
    np.testing.assert_array_equal(saved["seen"], np.float32([-1, -1]))


def test_bfloat16_takes_no_bits_of_what_a_model_changes_itself(tmp_path: Path) -> None:
    """An average to which a 2^-10th of it is added each step grows; a table that nothing trains is read as it is."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [2], initializer=tf.zeros_initializer())
        made = {"initializer": tf.ones_initializer(), "trainable": False}
        mean, frozen = tf.get_variable("mean", [2], **made), tf.get_variable("frozen", [2], **made)
        for variable in (mean, frozen):
            tf.add_to_collection("kept", variable.assign(variable.read_value() + 2.0**-10, read_value=False))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.get_collection("kept")[0])
        if mode == "train":
            seen = tf.get_variable("seen", [2], trainable=False, initializer=tf.zeros_initializer())
            offset = tf.identity(frozen.read_value() + 2.0**-12)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, seen.assign(offset, read_value=False))
        return tfps.ModelSpec(loss=tf.reduce_sum(weight), optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(numbers, model_fn), num_workers=1, max_steps=8, wire="bfloat16", model_dir=str(tmp_path))
    saved = variables_of(tmp_path)
    np.testing.assert_array_equal(saved["mean"], np.float32([1 + 8 * 2.0**-10] * 2))
    np.testing.assert_array_equal(saved["seen"], np.float32([1 + 2.0**-12] * 2))


def _crossing(fetches: Sequence[Any]) -> list[tuple[str, str, int | None]]:
    return sorted((c.source, c.target, c.num_bytes) for c in placement.transfers(fetches))


def test_what_depends_on_an_answer_does_not_wait_for_itself() -> None:
    """A tensor that a PS's answer to another one goes into is not packed with it, which could never be sent."""
    cluster = cluster_of(1, 1)
    with tf.Graph().as_default() as made:
        with tf.device("/job:worker/task:0"):
            first = tf.random.normal([3])
        with tf.device("/job:ps/task:0"):
            answer = first * 2
        with tf.device("/job:worker/task:0"):
            second, third = answer + 1, tf.random.normal([3])
        with tf.device("/job:ps/task:0"):
            end = second + third
        wire_packing.pack(made, [end])
    assert cluster.num_ps == 1
    ways = _crossing([end])
    assert ways == [("ps/0", "worker/0", 12), ("worker/0", "ps/0", 12), ("worker/0", "ps/0", 24)]


def test_large_tensors_go_alone() -> None:
    """A variable of more than half a bucket is sent as it is, uncopied; small ones fill buckets up to their bound."""
    half = wire_packing.BUCKET_BYTES // 8  # in float32, half a bucket
    cluster = Cluster(("p:1",), ("w:1",))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        sizes = [half + 1, 2, half, half, 3]
        variables = [tf.get_variable(f"v{i}", [size]) for i, size in enumerate(sizes)]
        loss = tf.add_n([tf.reduce_sum(variable) for variable in variables])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    built = builder.training(JobConfig(), cluster, Task("worker", 0), model_of(numbers, model_fn))
    pulls = [c.num_bytes for c in placement.transfers(built.fetches) if c.source == "ps/0" and c.num_bytes != 8]
    assert sorted(pulls) == sorted([4 * (half + 1), 4 * (2 + half), 4 * (half + 3)])


def _first_steps(fetches: Callable[[], Sequence[Any]]) -> list[Any]:
    """Return what the fetches of a graph on a worker and a PS return, packed, after all variables are initialized."""
    with shared_servers(), tf.Graph().as_default() as graph, tf.device("/job:worker/task:0"):
        made = list(fetches())
        wire_packing.pack(graph, made)
        tasks = {(near, placement.task_of(op)) for op in placement.ancestors(made) for near in op.colocation_groups()}
        assert len(tasks) == len(dict(tasks)), "what is to be in one place is on one task"
        init = tf.global_variables_initializer()
        config = session_config("/job:ps", "/job:worker/task:0")
        with tf.Session(target_of(Task("worker", 0)), graph=graph, config=config) as session:
            session.run(init)
            found: list[Any] = session.run(made)
            return found


def _on_ps(name: str) -> Any:
    with tf.device("/job:ps/task:0"):
        return tf.get_variable(name, [], initializer=tf.ones_initializer())


@pytest.mark.parametrize("near", ["variable", "constant"])
def test_a_constant_may_be_colocated(near: str) -> None:
    """One that was to be with a variable goes to its only user; one that another operation is to be with stays."""

    def fetches() -> Sequence[Any]:
        weight = _on_ps("weight")
        if near == "constant":
            with tf.device("/job:ps/task:0"):
                half = tf.constant([0.5])
            with tf.colocate_with(half.op):
                other = tf.random.uniform([], 2.0, 2.0 + 1e-9)
            return [half[0] + other]
        with tf.colocate_with(weight):
            half = tf.constant(0.5)
        return [tf.identity(half) * weight]

    assert _first_steps(fetches) == [0.5 if near == "variable" else 2.5]


def test_a_change_after_a_read_comes_after_the_read_that_takes_its_place() -> None:
    """A variable is read twice, and changed after the second read, whose users get the value of the first."""
    waits = {}

    def fetches() -> Sequence[Any]:
        weight = _on_ps("weight")
        reads = [tf.convert_to_tensor(weight) for _ in range(2)]
        with tf.control_dependencies([reads[1]]):
            changed = weight.assign_add(1.0, read_value=False)
        waits["changed"] = changed
        waits["first"] = reads[0].op
        return [reads[0] + 0, reads[1] + 0, changed]

    assert _first_steps(fetches) == [1.0, 1.0, None]
    assert waits["first"] in placement.ancestors([waits["changed"]])
