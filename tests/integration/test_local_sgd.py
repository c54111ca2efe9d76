"""``--mode=local`` on real servers: rounds computed by hand from each worker's gradients."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import (
    by_worker,
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
from support.processes import summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.runtime.graph import builder, placement

pytestmark = pytest.mark.slow

STEPS, WORKERS, ROWS = 12, 3, 5
X = np.random.default_rng(3).integers(-80, 80, [WORKERS, STEPS, 4]).astype(np.float32) / 64
PICKS = np.random.default_rng(4).integers(0, ROWS, [WORKERS, STEPS, 2])
input_fn = by_worker(x=X, rows=PICKS)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """Be a model whose gradients depend on its weights, with a table and a moving average of its own."""
    weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
    table = tf.get_variable("table", [ROWS, 2], initializer=tf.zeros_initializer())
    average = tf.get_variable("average", [], initializer=tf.zeros_initializer(), trainable=False)
    seen = tf.get_variable("seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.assign(0.5 * average + 0.5 * tf.reduce_sum(features["x"])))
    lowest = tf.get_variable("lowest", [], initializer=tf.constant_initializer(np.inf), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, seen.assign_add(1))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, lowest.assign(tf.minimum(lowest, tf.reduce_sum(features["x"]))))
    looked_up = tf.nn.embedding_lookup(table, features["rows"])
    loss = 0.5 * tf.reduce_sum((weight - features["x"]) ** 2) + tf.reduce_sum(looked_up * features["x"][:2])
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.MomentumOptimizer(0.25, 0.5))


def by_hand(every: int) -> Any:
    """Return the weights, the table, and the average of the workers after all steps."""
    state = {"weight": np.zeros(4), "table": np.zeros([ROWS, 2]), "average": np.zeros([]), "lowest": np.float64(np.inf)}
    slots = [{name: np.zeros_like(state[name]) for name in ("weight", "table")} for _ in range(WORKERS)]
    for first in range(0, STEPS, every):
        copies = [{name: value.copy() for name, value in state.items()} for _ in range(WORKERS)]
        for worker, (copy, slot) in enumerate(zip(copies, slots, strict=True)):
            for step in range(first, min(first + every, STEPS)):
                x = X[worker, step]
                gradient = np.zeros([ROWS, 2])
                np.add.at(gradient, PICKS[worker, step], x[:2])
                rows = np.unique(PICKS[worker, step])
                slot["weight"] = 0.5 * slot["weight"] + (copy["weight"] - x)
                copy["weight"] = copy["weight"] - 0.25 * slot["weight"]
                slot["table"][rows] = 0.5 * slot["table"][rows] + gradient[rows]
                copy["table"][rows] = copy["table"][rows] - 0.25 * slot["table"][rows]
                copy["average"] = 0.5 * copy["average"] + 0.5 * x.sum()
                copy["lowest"] = np.minimum(copy["lowest"], x.sum())
        state = {name: np.mean([copy[name] for copy in copies], axis=0) for name in state}
    return {**state, "weight/Momentum": slots[0]["weight"]}


@pytest.mark.parametrize(("every", "num_ps"), [(1, 1), (4, 2), (5, 1)])
def test_the_rounds_are_those_by_hand(every: int, num_ps: int, tmp_path: Path) -> None:
    """Also with a shorter last round, and state that the model and its optimizer keep."""
    flags = {"mode": "local", "sync_every": every, "max_steps": STEPS}
    train(model_of(input_fn, model_fn), num_ps, WORKERS, model_dir=str(tmp_path), **flags)
    saved = variables_of(tmp_path)
    assert saved["global_step"] == STEPS
    assert saved["seen"] == STEPS
    assert summary(tmp_path)["rounds"] == {"made": -(-STEPS // every), "fewest_steps": every, "most_steps": every}
    for name, value in by_hand(every).items():
        np.testing.assert_allclose(saved[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_round_of_one_step_is_an_update_of_sync(tmp_path: Path) -> None:
    """With plain gradient descent, whose steps are the gradients."""

    def plain(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
        loss = 0.5 * tf.reduce_sum((weight - features["x"]) ** 2)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.25))

    found = []
    for flags in ({"mode": "sync"}, {"mode": "local", "sync_every": 1}):
        directory = tmp_path / str(flags["mode"])
        train(model_of(input_fn, plain), 1, WORKERS, model_dir=str(directory), max_steps=STEPS, **flags)
        found.append(variables_of(directory)["weight"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def of_constant(mode: str, params: Any, context: Any) -> Any:
    """Give worker i batches of 2 ** i, one example each."""
    return None if mode == "eval" else dataset_of(np.float32([2**context.input_pipeline_id])).repeat()


def test_the_server_optimizer_gets_the_mean_change(tmp_path: Path) -> None:
    """A momentum that is exact: a change of -4.5 in each of three rounds of two workers, three steps each."""
    flags = {"mode": "local", "sync_every": 3, "server_optimizer": "momentum", "server_momentum": 0.5}
    train(model_of(of_constant, linear), 1, 2, model_dir=str(tmp_path), max_steps=9, server_learning_rate=2.0, **flags)
    saved, momentum, weight = variables_of(tmp_path), 0.0, 0.0
    for _ in range(3):
        momentum = 0.5 * momentum + 4.5
        weight -= 2 * momentum
    assert saved["weight"] == weight
    assert saved["weight/ServerMomentum"] == momentum


def test_a_round_has_a_sample_of_the_workers(tmp_path: Path) -> None:
    """One of three in each round: which one is a matter of the seed, and the same each time."""
    found = []
    for name in ("a", "b"):
        flags = {"mode": "local", "sync_every": 2, "worker_fraction": 0.33, "max_steps": 20, "seed": 7}
        train(model_of(of_constant, linear), 1, 3, model_dir=str(tmp_path / name), **flags)
        saved = variables_of(tmp_path / name)
        assert saved["global_step"] == 20
        found.append(-float(saved["weight"]) / 2)
    assert found[0] == found[1]
    counts = [(first, second, 10 - first - second) for first in range(11) for second in range(11 - first)]
    assert any(first + 2 * second + 4 * third == found[0] for first, second, third in counts)
    assert found[0] not in (10, 20, 40)  # always the same one
    steps = [summary(tmp_path / "a")["tasks"][f"worker/{index}"]["steps"] for index in range(3)]
    assert sum(steps) == 20
    assert summary(tmp_path / "a")["rounds"]["made"] == 10
    assert sum(taken * 2**index for index, taken in enumerate(steps)) == 2 * found[0]


def test_the_input_of_one_worker_ends_in_a_round(tmp_path: Path) -> None:
    """Its part of the round counts by its examples, and the round is the last."""

    def uneven(mode: str, params: Any, context: Any) -> Any:
        count = (5, 50)[context.input_pipeline_id]
        return None if mode == "eval" else dataset_of(np.full([count], 2**context.input_pipeline_id, np.float32))

    train(model_of(uneven, linear), 1, 2, model_dir=str(tmp_path), mode="local", sync_every=4, max_steps=40)
    saved = variables_of(tmp_path)
    assert saved["global_step"] == 8
    first, second = -(4 + 8) / 2, -(1 * 1 + 4 * 8) / 5
    np.testing.assert_allclose(saved["weight"], first + second, rtol=1e-6)


def test_what_ends_a_round_changes_nothing_before_it_has_ended() -> None:
    """A worker pushes what its copies hold, and its number of examples, before it changes any of these."""
    cluster = Cluster(("p:1", "p:2"), ("w:1", "w:2"))
    built = builder.training(JobConfig(mode="local"), cluster, Task("worker", 0), model_of(input_fn, model_fn))
    ops = placement.ancestors([built.step.limit.renew])
    changes = [op for op in ops if op.type.startswith("Assign") and placement.task_of(op) == "worker/0"]
    assert len(changes) >= 2 * 3 + 3  # two copies of each exchanged variable, and the state of the round
    for op in changes:
        assert any(one.type == "QueueDequeueV2" for one in placement.ancestors([op])), op.name


@pytest.mark.parametrize("flags", [{"collections": []}, {"use_resource": False}])
def test_state_of_which_a_worker_has_no_copy_is_refused(flags: dict[str, Any]) -> None:
    """All workers would change the one on the PS, each as if it were its own."""

    def with_state(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
        rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False, **flags)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign(0.5 * rate))
        loss = 0.5 * tf.reduce_sum((weight - features["x"]) ** 2)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))

    with pytest.raises(ModelError, match=r"rate.* .*(GLOBAL_VARIABLES|use_resource)"):
        builder.training(
            *(JobConfig(mode="local"), Cluster(("p:1",), ("w:1",)), Task("worker", 0)), model_of(input_fn, with_state)
        )


@pytest.mark.parametrize(
    "flags",
    [{"mode": "local"}, {"mode": "local", "async_rounds": True}, {"mode": "allreduce"}, {"mode": "gossip"}],
    ids=lambda flags: "-".join(flags.values() if len(flags) == 1 else flags),
)
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_function_that_draws_and_changes_something_else_is_refused(flags: dict[str, Any], is_apart: bool) -> None:
    """The generator is one for all, and what the model changes is each worker's own."""

    def drawing(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer(), use_resource=True)
        seen = tf.get_variable("seen", [], trainable=False, initializer=tf.zeros_initializer(), use_resource=True)
        state = tf.get_variable("state", initializer=np.array([1, 2, 3]), trainable=False, use_resource=True)
        generator = tf.random.Generator.from_state(state, alg=1)

        @tf.function
        def draw() -> Any:
            return generator.uniform([])

        @tf.function
        def change(noise: Any) -> Any:
            seen.assign_add(noise if is_apart else generator.uniform([]))
            return noise

        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, change(draw() if is_apart else 1.0).op)
        loss = tf.reduce_sum(weight * features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    config, workers = JobConfig(**flags), ("w:1", "w:2")
    cluster = Cluster(("p:1",) if flags["mode"] == "local" else (), workers)
    found = pytest.raises(ModelError, match="draws from a random generator and changes seen: with workers that")
    with contextlib.nullcontext() if is_apart else found:
        builder.training(config, cluster, Task("worker", 0), model_of(input_fn, drawing))


def test_inputs_that_all_end_in_a_round_raise_the_step_by_what_was_taken(tmp_path: Path) -> None:
    """The last round is as long as the longest of the workers' parts."""

    def short(mode: str, params: Any, context: Any) -> Any:
        count = (5, 6)[context.input_pipeline_id]
        return None if mode == "eval" else dataset_of(np.full([count], 2**context.input_pipeline_id, np.float32))

    train(model_of(short, linear), 1, 2, model_dir=str(tmp_path), mode="local", sync_every=4, max_steps=40)
    saved = variables_of(tmp_path)
    assert saved["global_step"] == 6
    np.testing.assert_allclose(saved["weight"], -(4 + 8) / 2 - (1 * 1 + 2 * 4) / 3, rtol=1e-6)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_worker_that_is_interrupted_when_its_round_has_ended_keeps_its_slots(is_late: bool) -> None:
    """And its counters: the PS have the round. One that is interrupted earlier goes back to those before the round."""
    with shared_servers():
        flags = {"mode": "local", "sync_every": 2, "max_steps": 8, "batch_size": 1}
        task = Task("worker", 0)
        built = builder.training(JobConfig(**flags), cluster_of(1, 1), task, model_of(input_fn, model_fn))
        step, session = built.step, tf.Session(target_of(task), graph=built.graph, config=session_config())
        with built.graph.as_default():
            slot = next(one for one in tf.global_variables() if one.op.name == "weight/Momentum")
            seen = next(one for one in tf.global_variables() if one.op.name == "seen")
            copies = [step.copies.read(one) for one in (slot, seen)]
            session.run(tf.global_variables_initializer())
        generation = step.recovery.generation
        session.run([built.iterator.initializer, step.chief_init], {generation: 0})
        session.run(step.worker_init)
        for _ in range(2):
            session.run(step.train_op)
        ended = session.run(copies)
        if is_late:
            token = [op for op in placement.ancestors([step.limit.renew]) if op.type == "AssignVariableOp"]
            [taken] = [op for op in token if op.inputs[0].op.name == "tfps/stamp_0"]
            updating = threading.Thread(target=lambda: session.run(step.update, {generation: 0}), daemon=True)
            updating.start()
            session.run(taken)
            updating.join(100)
        session.run(step.chief_init, {generation: 1})
        session.run(step.worker_init)
        found, on_ps = session.run([copies, seen])
        np.testing.assert_array_equal(found[0], ended[0] if is_late else np.zeros(4))
        assert found[1] == on_ps == (2 if is_late else 0)
        assert session.run(step.steps_taken).tolist() == [2 if is_late else 0]
