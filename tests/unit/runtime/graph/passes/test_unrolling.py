"""Several steps in one run, and several runs under way, are the same steps."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, linear, model_of, run_job, train, variables_of
from support.processes import summary
from tensorflow.python.framework import function

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import DataError
from tfps.runtime.graph import builder
from tfps.runtime.graph.cancel_safe_iterator import INPUTS
from tfps.runtime.graph.passes.unrolling import UnrolledStep
from tfps.runtime.graph.placement import ancestors
from tfps.runtime.training.steps.step_runner import Pace, StepRunner

pytestmark = pytest.mark.slow


def counted(length: int | None) -> Any:
    """Return an ``input_fn`` that gives worker i the gradient 2^i, so many times, or for ever."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        power = dataset_of(np.float32([2.0**context.input_pipeline_id]))
        return None if mode == "eval" else power.repeat(length).map(lambda x, y: (x, y))

    return input_fn


@pytest.mark.parametrize(
    ("mode", "steps_per_run", "max_steps"),
    [("async", 1, 50), ("async", 8, 49), ("async", 16, 3), ("sync", 3, 50), ("sync", 8, 50), ("sync", 16, 3)],
)
def test_every_step_is_taken_once(tmp_path: Path, mode: str, steps_per_run: int, max_steps: int) -> None:
    """However many steps a run takes, the job ends at ``max_steps``, and each worker's steps are in the weight."""
    flags = {"mode": mode, "steps_per_run": steps_per_run, "runs_in_flight": 2, "model_dir": str(tmp_path)}
    train(model_of(counted(None), linear), num_ps=2, max_steps=max_steps, **flags)
    reported, saved = summary(tmp_path), variables_of(tmp_path)
    steps = [reported["tasks"][f"worker/{i}"]["steps"] for i in (0, 1)]
    assert saved["global_step"] == reported["global_step"] == max_steps
    if mode == "sync":
        assert steps == [max_steps, max_steps]
        assert saved["weight"] == -max_steps * 1.5
    else:
        assert sum(steps) == max_steps
        assert saved["weight"] == -(steps[0] + 2 * steps[1])


@pytest.mark.parametrize("updates", [0, 1, 5])
def test_an_interrupted_run_has_read_two_batches_that_no_update_has(updates: int) -> None:
    """A run of 8 steps breaks off after so many updates: the next batch that is read is the third after theirs."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        source = tf.data.make_initializable_iterator(tf.data.Dataset.range(100))
        batch = source.get_next()
        tokens = tf.FIFOQueue(99, tf.int64, shapes=[], shared_name="tokens")
        with tf.control_dependencies([batch]):
            token = tokens.dequeue()
        steps = UnrolledStep(graph, [token, batch], [token.op])
        run = [steps.copy(index)(token) for index in range(8)]
        session.run([source.initializer, tokens.enqueue_many([np.arange(updates)])])
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(run, options=tf.RunOptions(timeout_in_ms=3000))
        assert session.run(batch) == updates + 2


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_in_sync_a_batch_waits_for_the_update_before_the_last(wire: str) -> None:
    """Step k of a run reads its batch after the token of step k - 2, and not after that of step k - 1."""
    cluster = Cluster(("p:1", "q:1"), ("v:1", "w:1"))
    built = builder.training(
        JobConfig(mode="sync", wire=wire), cluster, Task("worker", 1), model_of(counted(None), linear)
    )
    steps = StepRunner(mock.Mock(), built)._steps
    [read] = [op for op in ancestors(built.fetches) if op.type in INPUTS]
    tokens = [op for op in ancestors([built.step.train_op]) if op.type == "QueueDequeueV2"]
    for index in range(4):
        waits = set(ancestors([steps.copy(index)(read)]))
        before = [number for number in range(4) if not waits.isdisjoint(map(steps.copy(number), tokens))]
        assert (len(tokens), before) == (1, list(range(index - 1)))


@pytest.mark.parametrize("steps_per_run", [1, 4])
def test_as_many_runs_are_under_way_as_are_asked_for(steps_per_run: int, tmp_path: Path) -> None:
    """The first two runs wait for each other: with both flags given, they are under way at once."""
    both, take = threading.Barrier(2, timeout=20), StepRunner.take
    waits = iter([both.wait] * 2)

    def meeting(*args: Any) -> Any:
        next(waits, lambda: 0)()
        return take(*args)

    with mock.patch.object(StepRunner, "take", meeting):
        flags = {"steps_per_run": steps_per_run, "runs_in_flight": 2, "max_steps": 30, "model_dir": str(tmp_path)}
        train(model_of(counted(None), linear), num_workers=1, **flags)
    assert variables_of(tmp_path)["global_step"] == 30


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_few_graphs_are_prepared(mode: str, tmp_path: Path) -> None:
    """To prepare a run takes a second of a large graph: there is one of one step and one of many, for all of a job.

    Neither a report, where the model logs nothing, nor the change of pace nor the end needs another one.
    """
    built, build = [], StepRunner._build

    def noting(self: Any, *what: Any) -> Any:
        built.append((self, *what))
        return build(self, *what)

    with (
        mock.patch("tfps.runtime.training.steps.step_runner._RUN_SECS", 10.0),
        mock.patch.object(StepRunner, "_build", noting),
    ):
        max_steps = 4003 if mode == "async" else 1003  # so many that both workers measure while most are left
        train(model_of(counted(None), linear), mode=mode, max_steps=max_steps, model_dir=str(tmp_path))
    steps = summary(tmp_path)["pace"]["steps_per_run"]
    assert steps > 1
    assert sorted(what for _, *what in built) == [[1, 1, False]] * 2 + [[steps, steps, False]] * 2
    assert len({runs for runs, *_ in built}) == 2


def test_an_input_that_ends_is_used_to_its_end(tmp_path: Path) -> None:
    """With 23 batches a worker and 8 steps a run, every batch is a step; what is missing to ``max_steps`` is left."""
    flags = {"steps_per_run": 8, "runs_in_flight": 2, "max_steps": 1000, "model_dir": str(tmp_path)}
    train(model_of(counted(23), linear), **flags)
    assert variables_of(tmp_path) == {"weight": -23 * 3, "global_step": 46}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_input_without_a_batch_is_a_data_error(tmp_path: Path, mode: str) -> None:
    """A job that had nothing to train on has not done its work; one whose steps are all taken has."""
    model, flags = model_of(counted(0), linear), {"mode": mode, "model_dir": str(tmp_path)}
    error = run_job(model, max_steps=9, **flags)["worker/0"]
    assert isinstance(error, DataError)
    assert "is empty: input_fn(mode='train') gave no batch" in str(error)
    train(model_of(counted(None), linear), max_steps=9, **flags)
    train(model, max_steps=9, **flags)


def _chosen() -> Any:
    """Return 23 batches, and as many others as chance has it, of an input that says it has no end."""
    mine = tf.data.Dataset.range(23).map(lambda _: tf.ones([]))
    others = tf.data.Dataset.range(7).map(lambda _: tf.ones([])).repeat()
    return tf.data.Dataset.sample_from_datasets([mine, others], [0.5, 0.5], seed=4, stop_on_empty_dataset=True)


def _run_dry() -> Any:
    """Return 23 batches of a generator that is not begun anew, though it is repeated."""
    left = iter([1.0] * 23)
    return tf.data.Dataset.from_generator(lambda: left, tf.float32, []).repeat()


def _length(make: Callable[[], Any]) -> int:
    """Return how many batches there are, by taking them one by one."""
    steps = 0
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        iterator = tf.data.make_initializable_iterator(make())
        batch = iterator.get_next()
        session.run(iterator.initializer)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                steps += int(session.run(batch))
    return steps


@pytest.mark.parametrize("make", [_chosen, _run_dry])
def test_an_input_that_says_it_has_no_end_and_has_one_is_used_to_it(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Every batch is a step, and each change of the model's own is made once a step: none for the batch that is not."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else make().map(lambda x: ({"x": x}, 0.0))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        for name, keep in (("listed", tf.GraphKeys.UPDATE_OPS), ("before", "mine")):
            number = tf.get_variable(name, [], initializer=tf.zeros_initializer(), trainable=False)
            tf.add_to_collection(keep, number.assign_add(1.0, read_value=False))
        with tf.control_dependencies(tf.get_collection("mine")):
            return linear(features, labels, mode, params)

    steps = _length(make)
    for number, flags in enumerate([{"steps_per_run": 8}, {"steps_per_run": 1}]):
        directory = tmp_path / str(number)
        train(model_of(input_fn, model_fn), 1, 1, max_steps=1000, seed=1, model_dir=str(directory), **flags)
        assert variables_of(directory) == {"weight": -steps, "global_step": steps, "listed": steps, "before": steps}


def test_in_step_the_shortest_input_ends_it(tmp_path: Path) -> None:
    """In sync the other worker is in the middle of a run then: its steps are counted all the same."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return counted(11 if context.input_pipeline_id else None)(mode, params, context)

    train(model_of(input_fn, linear), mode="sync", steps_per_run=8, max_steps=1000, model_dir=str(tmp_path))
    assert variables_of(tmp_path) == {"weight": -11 * 1.5, "global_step": 11}
    assert [task["steps"] for task in summary(tmp_path)["tasks"].values()] == [11, 11]


def chain(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a loop, a condition, dropout and a moving average, whose gradients depend on the weights."""
    weight = tf.get_variable("weight", [3], initializer=tf.ones_initializer())
    seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)
    _, looped = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 0.5 + weight), (0, weight * features["x"]))
    chosen = tf.cond(tf.reduce_sum(weight) > 1, lambda: looped * 2, lambda: looped)
    with tf.control_dependencies([seen.assign_add(1.0)]):
        loss = tf.reduce_sum(tf.square(tf.nn.dropout(chosen, rate=0.0)))
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.MomentumOptimizer(0.001, 0.9))


def test_a_run_of_many_steps_is_as_many_runs(tmp_path: Path) -> None:
    """Weights and slots are the same to the bit, also of a model with a loop, a condition and a moving average."""
    made = []
    for steps_per_run in (1, 5):
        directory = tmp_path / str(steps_per_run)
        flags = {"steps_per_run": steps_per_run, "max_steps": 20, "model_dir": str(directory)}
        train(model_of(counted(None), chain), num_workers=1, **flags)
        made.append({name: value.tobytes() for name, value in variables_of(directory).items()})
    assert made[0] == made[1]
    assert variables_of(tmp_path / "5")["seen"] == 20


def test_a_loop_that_takes_elements_has_no_end_that_is_known() -> None:
    """Nothing need leave the loop of an element that it takes, and which the next step must not take before it."""
    with tf.Graph().as_default() as graph:
        elements = tf.data.make_one_shot_iterator(tf.data.Dataset.range(9))

        def turn(index: Any) -> Any:
            with tf.control_dependencies([elements.get_next()]):
                return index + 1 + 0 * tf.cast(elements.get_next(), tf.int32)

        assert not UnrolledStep(graph, [tf.while_loop(lambda index: index < 3, turn, [0])]).in_order


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_a_loop_that_writes_has_no_end_that_is_known(reads: bool, writes: bool) -> None:
    """Nothing that leaves the loop waits for a write: copies of such a step have no order, so none are made."""
    with tf.Graph().as_default() as graph:
        seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), use_resource=True)

        def turn(index: Any) -> Any:
            with tf.control_dependencies([seen.assign_add(1.0, read_value=False)] if writes else []):
                return index + (tf.cast(seen.read_value(), tf.int32) if reads else 1)

        assert UnrolledStep(graph, [tf.while_loop(lambda index: index < 3, turn, [0])]).in_order is not writes


def table() -> Any:
    """Return a new handle of one table."""
    return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name="counts")


def test_handles_of_one_resource_are_used_in_order(tmp_path: Path) -> None:
    """A step looks up, through another handle of the table, what it has itself inserted, and nothing later."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        slow = 0.0 * tf.reduce_sum(tf.matmul(tf.fill([300, 300], features["x"]), tf.ones([300, 300])))
        key, value = tf.constant([1], tf.int64), features["x"][tf.newaxis]
        insert = tf.raw_ops.LookupTableInsertV2(table_handle=table(), keys=key, values=value)
        with tf.control_dependencies([insert]):
            late = key + tf.cast(slow, tf.int64)
        found = tf.raw_ops.LookupTableFindV2(table_handle=table(), keys=late, default_value=-1.0)
        loss = -weight * tf.stop_gradient(found[0])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.arange(64, dtype=np.float32))

    model = model_of(input_fn, model_fn)
    train(model, num_workers=1, max_steps=64, steps_per_run=8, runs_in_flight=1, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["weight"] == sum(range(64))


@pytest.mark.parametrize(("kind", "steps_per_run"), [("dense", 4), ("mutable", 4), ("in order", 4), ("dense", 1)])
def test_a_table_is_one_table_in_all_steps_of_a_run(tmp_path: Path, kind: str, steps_per_run: int) -> None:
    """What a step has put in, the next one finds: also in a table whose handle is made of others, or after them."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        after = [tf.debugging.assert_all_finite(features["x"], "x")] if kind == "in order" else []
        with tf.control_dependencies(after):
            if kind == "dense":
                table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, empty_key=-1, deleted_key=-2)
            else:
                table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        key = tf.constant([3], tf.int64)
        seen = table.lookup(key)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, table.insert(key, seen + 1))
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        return tfps.ModelSpec(loss=weight * features["x"] * (seen[0] + 1), optimizer=optimizer)

    train(model_of(counted(None), model_fn), 1, 1, max_steps=12, steps_per_run=steps_per_run, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["weight"] == -sum(range(1, 13))


def test_copies_draw_other_random_numbers() -> None:
    """Each copy of a random operation has a seed of its own, and the same ones in every process."""

    def drawn() -> Any:
        with tf.Graph().as_default() as graph, tf.Session() as session:
            tf.set_random_seed(7)
            number = tf.random.uniform([])
            steps = UnrolledStep(graph, [number])
            return session.run([steps.copy(index)(number) for index in range(4)])

    first = drawn()
    assert len(set(first)) == 4
    assert first == drawn()


def test_copies_draw_other_random_numbers_in_a_defun() -> None:
    """So does the call of a ``Defun``, whose type is the function's name, in a function that it calls itself."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        tf.set_random_seed(7)

        @function.Defun()
        def inner() -> Any:
            return tf.random.uniform([], seed=3)

        @function.Defun()
        def outer() -> Any:
            return inner() + 1.0

        number = outer()
        steps = UnrolledStep(graph, [number])
        assert len(set(session.run([steps.copy(index)(number) for index in range(4)]))) == 4


def test_a_step_reads_what_others_have_written_meanwhile() -> None:
    """A copy reads a variable after its own last update, not as the run began: async stays async."""
    written, go_on = threading.Event(), threading.Event()

    def pause() -> np.float32:
        written.set()
        assert go_on.wait(100)
        return np.float32(1)

    server = tf.train.Server.create_local_server()
    with tf.Graph().as_default() as graph:
        shared = tf.get_variable("shared", [], initializer=tf.zeros_initializer())
        read = shared.read_value()
        with tf.control_dependencies([read]):
            done = shared.assign_add(tf.numpy_function(pause, [], tf.float32), read_value=False)
        steps = UnrolledStep(graph, [read, done])
        with graph.as_default(), tf.Session(server.target) as session:
            session.run(tf.global_variables_initializer())
            other = shared.assign_add(10.0, read_value=False)
            found: list[Any] = []
            both = [steps.copy(0)(read), steps.copy(1)(read), steps.copy(1)(done)]
            run = threading.Thread(target=lambda: found.extend(session.run(both)[:2]), daemon=True)
            run.start()
            assert written.wait(100)
            session.run(other)
            go_on.set()
            run.join(100)
    assert found == [0, 11]


@pytest.mark.parametrize(
    ("secs", "left", "workers", "many_steps", "many_runs", "max_steps", "expected"),
    [
        (0.001, 10**6, 2, True, True, 16, (16, 2)),
        (0.02, 10**6, 2, True, True, 16, (8, 2)),
        (0.3, 10**6, 2, True, True, 16, (1, 1)),
        (0.001, 10**6, 1, True, True, 16, (16, 1)),
        (0.001, 10**6, 2, True, False, 16, (16, 1)),
        (0.001, 10**6, 2, False, True, 16, (1, 2)),
        (0.001, 200, 2, True, True, 16, (4, 2)),
        (0.001, 10**6, 2, True, True, 6, (4, 2)),
        (0.001, 10**6, 2, True, True, 1, (1, 2)),
    ],
)
def test_the_pace_suits_the_steps(
    secs: float,
    left: int,
    workers: int,
    many_steps: bool,
    many_runs: bool,
    max_steps: int,
    expected: tuple[int, int],
) -> None:
    """Short steps are taken many at a time, long ones, and those of a short job, are not; slow first ones do not count.

    A single worker has no gradient that is stale, an input that could end in a run is taken step by step, and a large
    graph few steps at a time.
    """
    pace = Pace(JobConfig(), workers, many_steps, many_runs, max_steps)
    changed = [pace.measure(each, left) for each in [5.0] * 3 + [secs] * 12]
    assert (pace.steps, pace.runs) == expected
    assert sum(changed) == (expected != (1, 1))


@pytest.mark.parametrize(("max_ops", "expected"), [(10**6, 16), (1, 1)])
def test_a_run_is_not_too_much_to_prepare(max_ops: int, expected: int, tmp_path: Path) -> None:
    """Of a graph of many operations, a run takes few steps."""
    with (
        mock.patch("tfps.runtime.training.steps.step_runner._MAX_OPS", max_ops),
        mock.patch("tfps.runtime.training.steps.step_runner._RUN_SECS", 10.0),
    ):
        train(model_of(counted(None), linear), num_workers=1, max_steps=400, model_dir=str(tmp_path))
    assert summary(tmp_path)["pace"]["steps_per_run"] == expected


def test_the_pace_that_is_asked_for_stays() -> None:
    """With both flags given nothing is measured; mode and input still bound them."""
    config = JobConfig(steps_per_run=7, runs_in_flight=3)
    assert not any(Pace(config, 1, True, True).measure(0.001, 10**6) for _ in range(50))
    found = [Pace(config, 1, steps, runs) for steps, runs in ((True, True), (False, True), (True, False))]
    assert [(pace.steps, pace.runs) for pace in found] == [(7, 3), (1, 3), (7, 1)]


@pytest.mark.parametrize("in_branch", [False, True])
def test_a_variable_in_a_branch_is_not_put_in_order(in_branch: bool) -> None:
    """Where a variable is used in a branch of ``tf.cond``, copies of a step cannot be asked to wait for one another."""
    with tf.Graph().as_default() as graph:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        value = tf.cond(tf.constant(True), lambda: weight + 1.0, lambda: 0.0) if in_branch else weight + 1.0
        assert UnrolledStep(graph, [value]).in_order is not in_branch


@pytest.mark.parametrize("how", ["assign_add", "scatter_add", "identity"])
def test_what_an_operation_passes_on_is_used_in_order(tmp_path: Path, how: str) -> None:
    """The new value of a variable that is no resource, or one by a handle passed on, is that of its own step."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        own = how == "identity"
        count = tf.get_variable("n", [1], initializer=tf.zeros_initializer(), trainable=False, use_resource=own)
        if how == "assign_add":
            value = tf.assign_add(count, [1.0])
        elif how == "scatter_add":
            value = tf.scatter_add(count, [0], [1.0])
        else:
            handle = tf.identity(count.handle)
            with tf.control_dependencies([tf.raw_ops.AssignAddVariableOp(resource=handle, value=[1.0])]):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        slow = tf.reduce_sum(tf.matmul(tf.ones([200, 200]) * features["x"], tf.ones([200, 200]))) * 0.0
        with tf.control_dependencies([slow]):
            loss = -weight * (value[0] + slow)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else tf.data.Dataset.from_tensors(({"x": np.float32(1)}, 0.0)).repeat()

    train(model_of(input_fn, model_fn), 1, 1, max_steps=32, steps_per_run=8, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["weight"] == 32 * 33 / 2


@pytest.mark.parametrize("loss_calls", [False, True])
def test_what_is_called_to_be_shown_is_not_called_otherwise(tmp_path: Path, loss_calls: bool) -> None:
    """Python that only a logged tensor calls runs in the steps that are shown, and in no other step of their runs.

    Python that the loss calls runs in each step, in order, and does not wait for the other.
    """
    calls: list[float] = []
    each_step: list[float] = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        if loss_calls:
            counted_x = tf.numpy_function(lambda x: each_step.append(float(x)) or x, [features["x"]], tf.float32)
            features = {"x": tf.ensure_shape(counted_x, features["x"].shape)}
        made = linear(features, labels, mode, params)
        called = tf.numpy_function(lambda x: calls.append(float(x)) or np.float32(x), [features["x"]], tf.float32)
        made.log_tensors["called"] = tf.ensure_shape(called, [])
        return made

    flags = {"steps_per_run": 8, "steps_to_validate": 1000, "max_steps": 800, "model_dir": str(tmp_path)}
    began = time.monotonic()
    train(model_of(counted(None), model_fn), 1, 1, **flags)
    secs = time.monotonic() - began
    assert 0 < len(calls) <= 8 * (2 + secs), "the first run, the last, and one a second"
    assert len(each_step) == 800 * loss_calls


def test_state_that_copies_do_not_share_is_not_unrolled() -> None:
    """A sampler that learns from what it has seen is one operation for all steps."""
    with tf.Graph().as_default() as graph:
        sampled = tf.random.learned_unigram_candidate_sampler(tf.constant([[1]], tf.int64), 1, 1, True, 5)
        steps = UnrolledStep(graph, [sampled.sampled_candidates])
        assert not steps.in_order
        assert steps.keeps_order


def scratch_table(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose gradient is the size of a table that each step makes, and puts one entry in."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    turn = tf.cast(tf.train.get_global_step(), tf.int64)
    table = tf2.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0, experimental_is_anonymous=True)
    with tf.control_dependencies([table.insert(turn, turn)]):
        size = tf.cast(table.size(), tf.float32)
    return tfps.ModelSpec(
        loss=-weight * size, predictions={"y": size}, optimizer=tf.train.GradientDescentOptimizer(1.0)
    )


def scratch_variable(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose gradient is the sum of a temporary variable that each step makes."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    made = tf.raw_ops.TemporaryVariable(shape=[], dtype=tf.float32, var_name="scratch")
    filled = tf.assign_add(tf.assign(made, 0.5 * features["x"]), 0.5)
    total = tf.raw_ops.DestroyTemporaryVariable(ref=filled, var_name="scratch")
    total = tf.stop_gradient(total)
    return tfps.ModelSpec(
        loss=-weight * total, predictions={"y": total}, optimizer=tf.train.GradientDescentOptimizer(1.0)
    )


@pytest.mark.parametrize("model_fn", [scratch_table, scratch_variable])
def test_what_a_step_makes_for_itself_is_not_shared(tmp_path: Path, model_fn: Any) -> None:
    """A table without a name, or a temporary variable, is another one in each step of a run."""
    train(model_of(counted(None), model_fn), 1, 1, steps_per_run=8, max_steps=48, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["weight"] == 48.0


@pytest.mark.parametrize("flags", [{}, {"steps_per_run": 8}])
def test_a_models_own_input_may_end_first(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The job takes each element of it, though the input of ``input_fn`` has no end."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.range(37))
        loss = -weight * tf.cast(iterator.get_next(), tf.float32)
        return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(counted(None), model_fn), 1, 1, max_steps=1000, model_dir=str(tmp_path), **flags)
    saved = variables_of(tmp_path)
    assert (saved["global_step"], saved["weight"]) == (37, sum(range(37)))
