"""Where variables go, and that the plan of a step's traffic is what TensorFlow really sends."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import (
    cluster_of,
    dataset_of,
    linear,
    model_of,
    session_config,
    shared_servers,
    target_of,
    train,
    variables_of,
)

import tfps
from tfps.cluster.spec import STATE_OF_CHIEF, Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models.model import Model
from tfps.modes.registry import MODES
from tfps.optimizers.registry import OPTIMIZERS
from tfps.runtime.graph import builder, placement, plan
from tfps.runtime.graph.background_updates import UpdateRunner
from tfps.runtime.graph.evaluation import evaluation_graph

SHAPES = ([3, 5], [100], [], [7, 4], [50, 2], [1])


def handles(shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Return the operations of some variables."""
    with tf.Graph().as_default():
        return [tf.get_variable(f"v{i}", shape, use_resource=True).op for i, shape in enumerate(shapes)]


def test_round_robin_deals_out_in_turn() -> None:
    """``round_robin`` gives variables to the PS in turn."""
    deal = placement.RoundRobin(3)
    assert [deal(op) for op in handles(SHAPES)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("num_ps", [1, 2, 3, 5])
def test_greedy_balances_bytes(num_ps: int) -> None:
    """``greedy`` gives a variable to the PS with the fewest bytes, the first of equals.

    So no two PS are further apart than the largest variable.
    """
    greedy, held = placement.GreedyByBytes(num_ps), [0] * num_ps
    for op in handles(SHAPES * 3):
        index = greedy(op)
        assert index == held.index(min(held))
        held[index] += placement.variable_bytes(op)
    assert sum(held) == 3 * 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    assert max(held) - min(held) <= 4 * 100


@pytest.mark.parametrize(("dtype", "size"), [(tf.float32, 4), (tf.float64, 8), (tf.bfloat16, 2), (tf.int64, 8)])
def test_bytes_count_the_type(dtype: Any, size: int) -> None:
    """A variable's bytes are its elements times its type's size."""
    with tf.Graph().as_default():
        assert placement.variable_bytes(tf.get_variable("v", [3, 5], dtype, use_resource=True).op) == 15 * size


def wide(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` with variables of all sorts, an embedding among them."""
    ids = tf.cast(features["x"], tf.int64)
    table = tf.get_variable("table", [1000, 4], initializer=tf.ones_initializer())
    rows = tf.nn.embedding_lookup(table, tf.reshape(ids, [-1]))
    with tf.variable_scope("dense"):
        kernel = tf.get_variable("kernel", [4, 8])
        bias = tf.get_variable("bias", [8], initializer=tf.zeros_initializer())
    scale = tf.get_variable("scale", [], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(rows @ kernel + bias)) * scale
    seen = tf.metrics.mean(loss)
    optimizer = tfps.make_optimizer(params, "sgd", learning_rate=0.01)
    return tfps.ModelSpec(loss=loss, eval_metric_ops={"seen": seen}, optimizer=optimizer)


def numbers(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of a few numbers."""
    numbers = dataset_of(np.float32([[1, 2], [3, 999]]))
    return numbers if mode == "eval" else numbers.repeat()


WIDE = model_of(numbers, wide)
SPLIT = {"min_slice_mb": 4000 / 2**20}  # bytes; the table has 16,000


def addresses(num_ps: int, num_workers: int) -> Cluster:
    """Return a cluster of that size, for graphs that are built but not run."""
    return Cluster(tuple(f"ps{i}:1" for i in range(num_ps)), tuple(f"w{i}:1" for i in range(num_workers)))


def built(cluster: Cluster, index: int = 0, model: Model = WIDE, **flags: Any) -> builder.TrainGraph:
    """Build one worker's training graph."""
    return builder.training(JobConfig(**flags), cluster, Task("worker", index), model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", placement.STRATEGIES)
def test_all_workers_compute_the_same_placement(mode: str, strategy: str) -> None:
    """Without a word between them, every worker puts every variable and slot on the same PS."""
    flags = {"mode": mode, "ps_strategy": strategy, "optimizer": "adam", **SPLIT}
    placements = [placement.variables(built(addresses(3, 3), index, **flags).graph) for index in range(3)]
    assert placements[0] == placements[1] == placements[2]
    assert {variable.ps for variable in placements[0]} == {0, 1, 2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_slots_are_with_their_variables(mode: str, optimizer: str) -> None:
    """A variable's slots are on its own PS, for every optimizer, of slices too."""
    training = built(addresses(3, 2), mode=mode, optimizer=optimizer, **SPLIT)
    ps_of = {variable.name: variable.ps for variable in placement.variables(training.graph)}
    trained = [variable.op.name for variable in training.graph.get_collection("trainable_variables")]
    slots = {name: max((v for v in trained if name.startswith(f"{v}/")), key=len, default="") for name in ps_of}
    pairs = [(slot, variable) for slot, variable in slots.items() if variable]
    # One table in three slices, a kernel, a bias, a scalar: six variables.
    assert len(pairs) == 6 * {"sgd": 0, "momentum": 1, "adagrad": 1, "ftrl": 2, "adam": 2, "rmsprop": 2}[optimizer]
    assert [ps_of[slot] for slot, _ in pairs] == [ps_of[variable] for _, variable in pairs]


def test_slots_do_not_tip_the_balance() -> None:
    """The placement of variables is the same with an optimizer that has slots and one that has none."""
    with_slots, without = (built(addresses(3, 2), optimizer=name) for name in ("adam", "sgd"))
    slotless = placement.variables(without.graph)
    assert [v for v in placement.variables(with_slots.graph) if v.name in {w.name for w in slotless}] == slotless


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_finds_variables_where_training_has_them(mode: str) -> None:
    """The evaluation graph has every variable of the model on the PS where the training graph has it."""
    config, cluster = JobConfig(mode=mode, optimizer="adam", **SPLIT), addresses(3, 2)
    training = builder.training(config, cluster, Task("worker", 0), WIDE)
    evaluated = evaluation_graph(config, cluster, Task("worker", 0), WIDE, like=training.graph)
    assert evaluated is not None
    there = {v.name: v for v in placement.variables(training.graph)}
    here = placement.variables(evaluated.graph)
    assert len(here) == 7
    assert here == [there[v.name] for v in here]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_local_stays_on_the_worker(mode: str) -> None:
    """Local variables (metrics), the input and the computation are on the worker's own task."""
    training = built(addresses(2, 2), 1, mode=mode)
    local = training.graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)
    assert len(local) == 2
    assert {variable.device for variable in local} == {"/job:worker/task:1"}
    where = {op.type: placement.task_of(op) for op in training.graph.get_operations()}
    assert {where[kind] for kind in ("MultiDeviceIterator", "MatMul")} == {"worker/1"}


def test_reads_are_where_the_variable_is() -> None:
    """Reading and gathering happen on the PS that holds the resource: only what was read travels, not a table."""
    training = built(addresses(2, 1))
    for op in training.graph.get_operations():
        if op.type in ("ReadVariableOp", "ResourceGather"):
            assert placement.task_of(op) == placement.task_of(op.inputs[0].op)
    table = next(v for v in placement.variables(training.graph) if v.name == "table")
    pulled = [c for c in placement.transfers([training.spec.loss]) if c.source == f"ps/{table.ps}"]
    assert pulled
    assert all((transfer.num_bytes or 0) < 1000 for transfer in pulled)


def test_only_large_variables_are_split() -> None:
    """A variable of several ``min_slice_mb`` becomes one slice a PS; smaller ones, and a scalar, stay whole."""
    placed = placement.variables(built(addresses(2, 1), **SPLIT).graph)
    slices = [v for v in placed if v.name.startswith("table/")]
    assert [v.shape for v in slices] == [(500, 4), (500, 4)]
    assert {v.ps for v in slices} == {0, 1}
    assert [v.name for v in placed if v not in slices] == ["global_step", "dense/kernel", "dense/bias", "scale"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.get_variable("v", initializer=0.5),
        lambda: tf.get_variable("v", initializer=tf.constant([1.0, 2.0])),
        lambda: tf.get_variable("v", initializer=np.ones([600, 2], np.float32)),
        lambda: tf.get_variable("v", tf.TensorShape([])),
        lambda: tf.get_variable("v", tf.TensorShape([600, 2])),
        lambda: tf.get_variable("v", 600),
        lambda: tf.Variable([0.5] * 2000, name="v"),
        lambda: tf.get_variable("v", [600, 2], partitioner=tf.fixed_size_partitioner(3)),
    ],
)
@pytest.mark.parametrize("num_ps", [1, 2])
def test_any_way_to_make_a_variable_works(make: Callable[[], Any], num_ps: int) -> None:
    """However a model makes a variable, with splitting in force it can be made, and trained."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        loss = tf.reduce_sum(tf.convert_to_tensor(make()))
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.AdamOptimizer(0.1))

    training = built(addresses(num_ps, 1), model=model_of(numbers, model_fn), min_slice_mb=1000 / 2**20)
    assert len(placement.variables(training.graph)) > 1


def test_a_split_variable_is_one_in_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint made with two PS has a split table, and its slots, under one plain name with the full shape.

    One PS goes on from it, and so does a machine without a cluster: the metrics are those of the live parameters.
    """
    flags = {"model_dir": str(tmp_path), "optimizer": "adagrad", **SPLIT}
    train(WIDE, num_ps=2, max_steps=5, **flags)
    saved = variables_of(tmp_path)
    assert {name: value.shape for name, value in saved.items() if "table" in name} == {
        "table": (1000, 4),
        "table/Adagrad": (1000, 4),
    }
    assert not [name for name in saved if "part_" in name or ":" in name or "tfps" in name]
    train(WIDE, num_ps=1, max_steps=9, **flags)
    after = variables_of(tmp_path)
    assert after["global_step"] == 9
    moved = np.flatnonzero((after["table"] != saved["table"]).any(axis=1))
    assert set(moved) <= {1, 2, 3, 999}
    assert {int(row) for row in np.flatnonzero((saved["table"] != 1).any(axis=1))} == {1, 2, 3, 999}


def task_of(device: bytes) -> str:
    """Return ``job/task`` of a device."""
    spec = tf.DeviceSpec.from_string(device.decode())
    return f"{spec.job}/{spec.task}"


def sends(metadata: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what a run sent between tasks, as the partitioned graphs tell it: what, from where, to where."""
    for partition in metadata.partition_graphs:
        inputs = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op in ("_Send", "_HostSend") and not node.attr["client_terminated"].b:
                sent = node.input[0]
                # A control edge is sent as an empty constant that waits for the operation.
                tensor = next(iter(inputs[sent].input), sent) if "/ctrl_" in sent else sent
                tensor = tensor if ":" in tensor or tensor.startswith("^") else f"{tensor}:0"
                ends = (task_of(node.attr[end].s) for end in ("send_device", "recv_device"))
                yield (tensor, *ends)


def one_step(training: builder.TrainGraph, rewriting: bool) -> list[tuple[str, str, str]]:
    """Return what one step of worker 0 sends."""
    step = training.step
    config = session_config("/job:ps", "/job:worker/task:0")
    config.graph_options.rewrite_options.disable_meta_optimizer = not rewriting
    options, metadata = tf.RunOptions(output_partition_graphs=True), tf.RunMetadata()
    with shared_servers(), training.graph.as_default():
        session = tf.Session(target_of(Task("worker", 0)), config=config)
        local = tf.group(tf.local_variables_initializer(), tf.tables_initializer(), training.iterator.initializer)
        now = {step.recovery.generation: 0} if step.recovery else {}
        for op in (tf.global_variables_initializer(), training.load, local, step.chief_init, step.worker_init):
            session.run(op, now)
        if training.updates is not None:
            UpdateRunner(session, training.updates, now)
        session.run(training.fetches, options=options, run_metadata=metadata)
    return sorted(sends(metadata))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "num_ps", "optimizer"),
    [
        (model_of(numbers, linear), 1, "sgd"),
        pytest.param(WIDE, 1, "sgd", marks=pytest.mark.slow),
        pytest.param(WIDE, 2, "momentum", marks=pytest.mark.slow),
        (WIDE, 2, "adam"),
    ],
    ids=["linear-1-sgd", "wide-1-sgd", "wide-2-momentum", "wide-2-adam"],
)
def test_the_plan_is_what_tensorflow_sends(mode: str, model: Model, num_ps: int, optimizer: str) -> None:
    """The transfers are the very tensors that a step sends between tasks, each of them one RecvTensor call.

    Compared with TensorFlow's own partition of the graph, its rewriting by grappler off. With grappler on, names differ
    as it looks through identities and no-ops, and control edges come and go, but no more data is sent than reported.
    """
    config = JobConfig(mode=mode, optimizer=optimizer, max_steps=10, **SPLIT)
    cluster = cluster_of(num_ps, 1)
    training = builder.training(config, cluster, Task("worker", 0), model)
    transfers = placement.transfers(training.fetches)
    home = [placement.fetched(tensor, "worker/0") for tensor in (training.next_ticket, training.spec.loss)]
    transfers += [transfer for transfer in home if transfer is not None and transfer not in transfers]
    reported = sorted((transfer.tensor, transfer.source, transfer.target) for transfer in transfers)
    assert reported == one_step(training, False)
    data_sent, data_reported = (
        [name for name, *_ in way if name[0] != "^"] for way in (one_step(training, True), reported)
    )
    assert len(data_sent) <= len(data_reported)
    planned = plan.make(config, cluster, model)
    touching = [transfer for transfer in transfers if "worker/0" in (transfer.source, transfer.target)]
    assert sorted(map(str, [*planned.pulled, *planned.pushed])) == sorted(map(str, touching))


@pytest.mark.parametrize("task", [0, 1])
def test_without_ps_the_graph_of_each_worker_has_the_variables_on_the_chief(task: int) -> None:
    """They are where Cluster.state_devices says, apart from the chief's own work; transfers are those of one PS."""
    members = Cluster((), ("w:1", "w:2"))
    alone, usual = (
        builder.training(JobConfig(), cluster, Task("worker", task), WIDE) for cluster in (members, addresses(1, 2))
    )
    saved = alone.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    assert {variable.device for variable in saved} == set(members.state_devices)
    local = alone.graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)
    assert {variable.device for variable in local} <= {f"/job:worker/task:{task}"}
    sent = [placement.transfers(built.fetches) for built in (alone, usual)]
    there = {"ps/0": STATE_OF_CHIEF}
    moved = [(t.tensor, there.get(t.source, t.source), there.get(t.target, t.target), t.num_bytes) for t in sent[1]]
    assert [(t.tensor, t.source, t.target, t.num_bytes) for t in sent[0]] == moved
    assert moved
