"""What a mode does to the parameters, computed by hand and compared to the bit, on real servers."""

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import (
    assert_done,
    cluster_of,
    dataset_of,
    job,
    linear,
    model_of,
    ones,
    session_config,
    shared_servers,
    target_of,
    train,
    variables_of,
    wait_until,
)
from support.processes import REPO, summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.optimizers.registry import OPTIMIZERS
from tfps.progress import parse_progress
from tfps.runtime.graph import builder
from tfps.runtime.graph.background_updates import UpdateRunner
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.summary_writer import dropped as gradients_dropped
from tfps.runtime.training.worker_progress import Progress

pytestmark = pytest.mark.slow

STEPS = 50

SIZES = {"first": 3, "second": 4, "third": 2}


def eighths(num_workers: int, steps: int) -> Any:
    """Return a gradient for each worker and step: multiples of 1/8, whose sums are exact in any order."""
    return np.random.default_rng(7).integers(-80, 80, [num_workers, steps, 2]).astype(np.float32) / 8


def from_table(table: Any, slow: Sequence[int] = ()) -> Any:
    """Return an ``input_fn`` that gives worker i the rows of ``table[i]``, one a step; some workers late at times."""

    def late(step: Any) -> Any:
        time.sleep(0.03 if step % 7 == 3 else 0)
        return step

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        worker = context.input_pipeline_id
        numbers = tf.data.Dataset.range(len(table[worker]))
        if worker in slow:
            numbers = numbers.map(lambda step: tf.ensure_shape(tf.numpy_function(late, [step], tf.int64), []))
        return numbers.map(lambda step: ({"x": tf.gather(table[worker], step), "worker": worker}, 0.0))

    return input_fn


def two_variables(params: Any, x: Any, note: Any = None) -> tfps.ModelSpec:
    """Be a model with two variables, each with the gradient x; ``note`` is given their values at every step."""
    variables = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in ("first", "second")]
    values = [tf.identity(variable) for variable in variables]
    noted = [note(*values)] if note else []
    with tf.control_dependencies(noted):
        loss = tf.add_n([tf.reduce_sum(value * x) for value in values])
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=1.0))


@pytest.mark.parametrize(("num_ps", "num_workers", "slow"), [(1, 1, []), (2, 3, []), (2, 2, [1]), (1, 3, [0, 2])])
def test_sync_applies_the_mean_of_one_gradient_of_each_worker(
    tmp_path: Path, num_ps: int, num_workers: int, slow: list[int]
) -> None:
    """Update k of ``sync`` is the sum of every worker's k-th gradient divided by their number, to the bit.

    Each worker computed its k-th gradient at the parameters that k updates had made, also where some are slow; each
    took exactly ``max_steps`` steps.
    """
    table = eighths(num_workers, STEPS)
    at = [np.zeros(2, np.float32)]
    for k in range(STEPS):
        at.append(at[-1] - table[:, k].sum(axis=0) / np.float32(num_workers))
    seen = defaultdict(list)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        def note(*values: Any) -> Any:
            return tf.numpy_function(
                lambda worker, *arrays: seen[int(worker)].append(arrays), [features["worker"], *values], []
            )

        return two_variables(params, features["x"], note)

    flags = {"mode": "sync", "max_steps": STEPS, "model_dir": str(tmp_path)}
    # Longer than needed: the job has to end because of max_steps.
    longer = np.concatenate([table, table], axis=1)
    train(model_of(from_table(longer, slow), model_fn), num_ps, num_workers, **flags)

    for worker in range(num_workers):
        np.testing.assert_array_equal(seen[worker], [(value, value) for value in at[:STEPS]])
    saved = variables_of(tmp_path)
    np.testing.assert_array_equal([saved["first"], saved["second"]], [at[STEPS], at[STEPS]])
    assert saved["global_step"] == STEPS
    reported = summary(tmp_path)["tasks"]
    assert [reported[f"worker/{i}"]["steps"] for i in range(num_workers)] == [STEPS] * num_workers


def plain(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """Be a ``model_fn`` with two variables."""
    return two_variables(params, features["x"])


def on_one_machine(optimizer: str, gradients: Any) -> dict[str, Any]:
    """Return the variables that an optimizer makes of some gradients, without a cluster."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        variables = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in ("first", "second")]
        gradient = tf.placeholder(tf.float32, [2])
        made = tfps.make_optimizer({"optimizer": optimizer}, "sgd", learning_rate=1.0)
        train_op = made.apply_gradients([(gradient, variable) for variable in variables], step)
        session.run(tf.global_variables_initializer())
        for value in gradients:
            session.run(train_op, {gradient: value})
        return session.run({variable.op.name: variable for variable in tf.global_variables()})


def assert_same(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fail unless two sets of variables have the same names and the same bits."""
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_sync_slots_are_those_of_the_mean_gradient(tmp_path: Path, optimizer: str) -> None:
    """In ``sync`` the optimizer sees the mean only: weights, slots and beta powers are those of one machine."""
    table = eighths(2, 20)
    flags = {"optimizer": optimizer, "mode": "sync", "max_steps": 20, "model_dir": str(tmp_path)}
    train(model_of(from_table(table), plain), num_ps=2, **flags)
    assert_same(variables_of(tmp_path), on_one_machine(optimizer, table.sum(axis=0) / np.float32(2)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_async_with_one_worker_is_plain_training(tmp_path: Path, optimizer: str) -> None:
    """One worker in ``async`` makes what one machine makes, with every optimizer and its slots spread over two PS."""
    table = eighths(1, 5)
    flags = {"optimizer": optimizer, "max_steps": 5, "model_dir": str(tmp_path)}
    train(model_of(from_table(table), plain), num_ps=2, num_workers=1, **flags)
    assert_same(variables_of(tmp_path), on_one_machine(optimizer, table[0]))


def powers(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` that gives worker i the gradient 2^i at every step."""
    power = np.float32([2.0**context.input_pipeline_id])
    return None if mode == "eval" else dataset_of(power).repeat()


def assert_all_applied(model_dir: Path) -> None:
    """Fail unless the weight is minus the sum of the powers that the workers say they have pushed."""
    reported, saved = summary(model_dir), variables_of(model_dir)
    steps = {int(name.partition("/")[2]): task["steps"] for name, task in reported["tasks"].items()}
    assert saved["weight"] == -sum(taken * 2**worker for worker, taken in steps.items())
    assert saved["global_step"] == reported["global_step"] == sum(steps.values())


@pytest.mark.parametrize(("max_steps", "num_workers", "num_ps"), [(1, 3, 2), (2, 2, 1), (7, 2, 2), (100, 3, 1)])
def test_async_applies_every_gradient_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_steps: int, num_workers: int, num_ps: int
) -> None:
    """In ``async`` the weight is the sum of all gradients; steps, tickets and ``global_step`` are ``max_steps``.

    Each ticket from 0 to ``max_steps - 1`` is used once, whatever the number of workers.
    """
    tickets: list[int] = []
    finish = Loop._finish

    def noted(loop: Any, run: Any, *rest: Any) -> Any:
        tickets.extend(run.block.tickets)
        return finish(loop, run, *rest)

    monkeypatch.setattr(Loop, "_finish", noted)
    train(model_of(powers, linear), num_ps, num_workers, max_steps=max_steps, model_dir=str(tmp_path))
    assert_all_applied(tmp_path)
    assert sorted(ticket for ticket in tickets if ticket < max_steps) == list(range(max_steps))
    assert variables_of(tmp_path)["global_step"] == max_steps


def test_async_resumes_where_it_ended(tmp_path: Path) -> None:
    """A second run goes on from the checkpoint's step and weight, up to a larger ``max_steps``."""
    for max_steps in (30, 50):
        train(model_of(powers, linear), num_workers=1, max_steps=max_steps, model_dir=str(tmp_path))
    assert variables_of(tmp_path) == {"weight": -50, "global_step": 50}


@pytest.mark.parametrize(("mode", "min_slice_mb"), [("sync", 64.0), ("sync", 1e-9), ("async", 1e-9)])
def test_embedding_rows(tmp_path: Path, mode: str, min_slice_mb: float) -> None:
    """Sparse gradients follow the mode's rule, for a whole table and one split over two PS.

    Indices come unsorted, repeated, and different by worker: in ``sync`` a row's update is the sum of both workers'
    gradients divided by two, also where only one has met it; in ``async`` it is the sum of all.
    """
    ids = np.tile([[[4, 0, 4], [1, 5, 0], [2, 2, 2]], [[0, 3, 4], [5, 1, 5], [3, 0, 0]]], [1, 4, 1])
    flags = {"mode": mode, "min_slice_mb": min_slice_mb, "max_steps": 9}

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        table = tf.get_variable("table", [6, 2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, features["x"])
        scale = tf.constant([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
        return tfps.ModelSpec(loss=tf.reduce_sum(rows * scale), optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(from_table(ids), model_fn), num_ps=2, model_dir=str(tmp_path), **flags)
    expected = np.ones([6, 2], np.float32)
    for worker in (0, 1):
        for step_ids in ids[worker][: summary(tmp_path)["tasks"][f"worker/{worker}"]["steps"]]:
            np.subtract.at(expected, step_ids, np.float32([[1, 2], [4, 8], [16, 32]]) / (2 if mode == "sync" else 1))
    np.testing.assert_array_equal(variables_of(tmp_path)["table"], expected)


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_an_optimizer_is_given_each_row_of_a_sparse_mean_once(tmp_path: Path, wire: str) -> None:
    """In whatever order the workers name their rows: an optimizer that clips by the norm takes that of the mean."""

    class Clipped(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            [(mean, table)] = grads_and_vars
            clipped = tf.IndexedSlices(mean.values / tf.reduce_sum(mean.values**2), mean.indices, mean.dense_shape)
            return super().apply_gradients([(clipped, table)], *args, **kwargs)

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        ids = [[8, 6, 5, 3, 0], [7, 5, 3, 9, 0]][context.input_pipeline_id]
        return None if mode == "eval" else tf.data.Dataset.from_tensors(({"x": ids}, 0.0)).repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        table = tf.get_variable("table", [10, 1], initializer=tf.zeros_initializer())
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, features["x"]))
        return tfps.ModelSpec(loss=loss, optimizer=Clipped(1.0))

    train(model_of(input_fn, model_fn), mode="sync", max_steps=1, wire=wire, model_dir=str(tmp_path))
    mean = np.float32([2, 0, 0, 2, 0, 2, 1, 1, 1, 1]) / 2
    assert variables_of(tmp_path)["table"].ravel().tolist() == (-mean / (mean**2).sum()).tolist()


def _sparse(table: Any, ids: Any) -> Any:
    at = tf.stack([tf.range(tf.size(ids, out_type=tf.int64)), tf.zeros_like(ids)], axis=1)
    return tf.nn.embedding_lookup_sparse(
        table, tf.SparseTensor(at, ids, [tf.size(ids, out_type=tf.int64), 1]), None, combiner="sum"
    )


def _sampled(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss of six classes whose samples are all the classes but the label's, for a table of weights."""

    def of(table: Any, ids: Any) -> Any:
        biases = tf.get_variable("biases", [6], initializer=tf.zeros_initializer())
        classes = tf.range(6, dtype=tf.int64), tf.ones([tf.size(ids), 1]), tf.ones([6])
        inputs = tf.fill([tf.size(ids), 2], 0.25)
        return loss(table, biases, ids[:, None], inputs, num_sampled=6, num_classes=6, sampled_values=classes)

    return of


@pytest.mark.parametrize(
    "use", [_sparse, _sampled(tf.nn.sampled_softmax_loss), _sampled(tf.nn.nce_loss)], ids=["sparse", "softmax", "nce"]
)
def test_a_split_table_is_trained_row_by_row_as_a_whole_one(tmp_path: Path, use: Callable[..., Any]) -> None:
    """Sparse lookups and sampled losses find a row where it is, in whichever slice: the table is that of one PS."""
    ids = np.tile(np.int64([[1, 4, 4], [5, 0, 1], [3, 3, 4]]), [3, 1])

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(ids)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        table = tf.get_variable("table", [6, 2], initializer=tf.ones_initializer())
        loss = tf.reduce_sum(use(table, features["x"]))
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.5))

    tables = []
    for num_ps in (1, 2):
        directory = str(tmp_path / str(num_ps))
        train(model_of(input_fn, model_fn), num_ps, 1, min_slice_mb=1e-9, max_steps=9, model_dir=directory)
        tables.append(variables_of(Path(directory))["table"])
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-5)
    assert len({tuple(row) for row in tables[0].round(4)}) > 3


class _Gate:
    """An ``input_fn`` in which some workers wait, at some element, for an event."""

    def __init__(self, lengths: Sequence[int], waits: dict[int, tuple[int, threading.Event]]) -> None:
        self._lengths, self._waits = lengths, waits

    def __call__(self, mode: str, params: Any, context: Any) -> Any:
        """Give worker i as many elements as its length says; a worker that waits does so before an element's number."""
        del params
        if mode == "eval":
            return None
        worker = context.input_pipeline_id
        at, event = self._waits.get(worker, (-1, threading.Event()))

        def elements() -> Iterator[float]:
            for number in range(self._lengths[worker] + 1):
                assert number != at or event.wait(100)
                if number < self._lengths[worker]:
                    yield 2.0**worker

        return tf.data.Dataset.from_generator(elements, tf.float32, []).map(lambda x: ({"x": x}, 0.0))

    __code__ = from_table.__code__


@pytest.mark.parametrize("short", [0, 1])
def test_async_goes_on_without_a_worker_whose_input_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, short: int
) -> None:
    """A worker's input ends after 3 steps, be it the chief's or not: the other takes all the others."""
    caplog.set_level(logging.INFO, "tfps")
    lengths, ended = [1000, 1000], threading.Event()
    lengths[short] = 3
    model = model_of(_Gate(lengths, {1 - short: (20, ended)}), linear)
    with job(model, max_steps=60, model_dir=str(tmp_path)) as running:
        wait_until(lambda: "the input has ended" in caplog.text)
        time.sleep(0.2)  # the ticket is given back just after
        ended.set()
        assert_done(running.wait())
    assert_all_applied(tmp_path)
    reported = summary(tmp_path)
    assert reported["global_step"] == 60
    assert reported["tasks"][f"worker/{short}"]["steps"] == 3


def test_async_ends_when_all_inputs_have(tmp_path: Path) -> None:
    """All inputs end, after 5, 3 and 8 elements: every element is a step, everyone ends well, with a checkpoint."""
    train(model_of(_Gate([5, 3, 8], {}), linear), num_workers=3, max_steps=1000, model_dir=str(tmp_path))
    assert variables_of(tmp_path) == {"weight": -(5 * 1 + 3 * 2 + 8 * 4), "global_step": 16}
    assert summary(tmp_path)["status"] == "done"


def test_the_chief_takes_the_step_of_a_worker_that_found_no_input_for_it(tmp_path: Path) -> None:
    """Worker 1 learns that its input has ended while it holds a ticket, all others used: the chief takes that step."""
    through = threading.Event()
    flags = {"max_steps": 40, "steps_to_validate": 1, "model_dir": str(tmp_path)}
    with job(model_of(_Gate([1000, 0], {1: (0, through)}), linear), **flags) as running:
        wait_until(lambda: _written(tmp_path, 39))
        through.set()
        assert_done(running.wait())
    assert variables_of(tmp_path) == {"weight": -40, "global_step": 40}


def test_a_step_that_nobody_has_input_for_is_left_out(tmp_path: Path) -> None:
    """As before, but the chief has no element left either: the job ends well, one step short."""
    through = threading.Event()
    flags = {"max_steps": 40, "steps_to_validate": 1, "model_dir": str(tmp_path)}
    with job(model_of(_Gate([39, 0], {1: (0, through)}), linear), **flags) as running:
        wait_until(lambda: _written(tmp_path, 39))
        through.set()
        assert_done(running.wait())
    assert variables_of(tmp_path) == {"weight": -39, "global_step": 39}
    assert summary(tmp_path)["status"] == "done"


@pytest.mark.parametrize("short", [0, 2])
def test_sync_ends_for_all_with_the_first_input(tmp_path: Path, short: int) -> None:
    """In ``sync`` no mean can be made once one input has ended: all end well, after as many steps as it had."""
    lengths = [100, 100, 100]
    lengths[short] = 6
    flags = {"mode": "sync", "max_steps": 1000, "model_dir": str(tmp_path)}
    train(model_of(_Gate(lengths, {}), linear), num_workers=3, **flags)
    saved = variables_of(tmp_path)
    assert saved["global_step"] == 6
    assert saved["weight"] == pytest.approx(-6 * 7 / 3, rel=1e-6)


class _SyncByHand:
    """Two workers of a sync job on one PS, a session each, whose steps a test takes itself."""

    def __init__(self) -> None:
        job_config = JobConfig(mode="sync", max_steps=100)
        cluster, model = cluster_of(), model_of(powers, linear)
        self._built = [builder.training(job_config, cluster, Task("worker", i), model) for i in (0, 1)]
        self._sessions = []
        now = {self._built[0].step.recovery.generation: 0}
        for index, built in enumerate(self._built):
            with built.graph.as_default():
                init = [tf.global_variables_initializer(), built.step.chief_init] if index == 0 else []
                config = session_config("/job:ps", f"/job:worker/task:{index}")
                self._sessions.append(tf.Session(target_of(Task("worker", index)), graph=built.graph, config=config))
                for op in (*init, built.iterator.initializer, built.step.worker_init):
                    self._sessions[-1].run(op, now if index == 0 else None)
        UpdateRunner(self._sessions[0], self._built[0].updates, now)

    def push(self, worker: int) -> None:
        """Push a worker's gradient, and draw no token."""
        token = self._token(worker)
        self._sessions[worker].run(token.control_inputs)

    def draw(self, worker: int) -> int:
        """Draw a token, and push nothing."""
        stamp, stamped = self._built[worker].step.train_op.inputs
        with self._built[worker].graph.as_default():
            [token] = tf.raw_ops.QueueDequeueV2(handle=self._token(worker).inputs[0], component_types=[tf.int64])
            take = tf.raw_ops.AssignVariableOp(resource=stamp, value=token + stamped.op.inputs[1])
        return int(self._sessions[worker].run([token, take])[0])

    def step(self, worker: int) -> int:
        """Take a step; returns the ticket drawn."""
        built = self._built[worker]
        return int(self._sessions[worker].run([built.next_ticket, built.step.train_op])[0][0])

    def _token(self, worker: int) -> Any:
        operations = self._built[worker].graph.get_operations()
        return next(op for op in operations if op.type == "QueueDequeueV2" and op.control_inputs)


def test_a_quick_worker_waits_for_a_slow_ones_next_gradient() -> None:
    """B has pushed its first gradient, but not drawn its token: A cannot draw that one and push twice in a step."""
    with shared_servers():
        workers = _SyncByHand()
        workers.push(1)
        assert workers.step(0) == 1
        drawn: list[int] = []
        again = threading.Thread(target=lambda: drawn.append(workers.step(0)), daemon=True)
        again.start()
        assert workers.draw(1) == 1  # would wait for ever if A had taken it
        time.sleep(0.2)
        assert not drawn
        workers.push(1)
        again.join(20)
        assert drawn == [2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tables_local_variables_summaries_and_logged_tensors(tmp_path: Path, mode: str) -> None:
    """A model may have a lookup table, local variables, a summary and logged tensors, in training and evaluation."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        words = tf.data.Dataset.from_tensor_slices([["one", "two"]]).map(lambda word: ({"word": word}, 0.0))
        return words if mode == "eval" else words.repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        values = tf.lookup.KeyValueTensorInitializer(["one", "two"], [1.0, 2.0])
        numbers = tf.lookup.StaticHashTable(values, -100.0).lookup(features["word"])
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(weight * numbers)
        tf.summary.scalar("twice", 2 * loss)
        seen = tf.metrics.mean(numbers)
        return tfps.ModelSpec(
            loss=loss,
            eval_metric_ops={"seen": seen},
            optimizer=tf.train.GradientDescentOptimizer(1.0),
            log_tensors={"seen": seen[1], "weight": weight},
        )

    train(model_of(input_fn, model_fn), num_ps=2, mode=mode, max_steps=10, model_dir=str(tmp_path))
    assert variables_of(tmp_path) == {"weight": -15, "global_step": 10}
    assert summary(tmp_path)["eval"] == {"loss": -22.5, "seen": 1.5}


@pytest.mark.parametrize(
    ("wire", "num_ps", "read"),
    [
        ("packed", 1, lambda rate: rate),
        ("plain", 1, tf2.function(lambda rate: 1.0 * rate)),
        ("packed", 2, tf2.function(lambda rate: 1.0 * rate)),
    ],
)
def test_sync_takes_the_learning_rate_of_its_step(tmp_path: Path, wire: str, num_ps: int, read: Any) -> None:
    """A rate that the model raises in each step is read when the update begins: it is that before or after its step."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign_add(1.0, read_value=False))
        return tfps.ModelSpec(
            loss=-weight + 0.0 * features["x"], optimizer=tf.train.GradientDescentOptimizer(read(rate))
        )

    steps = 60
    flags = {"mode": "sync", "wire": wire, "max_steps": steps, "model_dir": str(tmp_path)}
    train(model_of(lambda *_: dataset_of(np.ones(steps, np.float32)), model_fn), num_ps, 2, **flags)
    whole = steps * (steps + 1) // 2
    assert whole <= variables_of(tmp_path)["weight"] <= whole + steps


@pytest.mark.parametrize(
    ("mode", "num_ps", "raises"), [("async", 1, True), ("async", 2, False), ("sync", 1, False), ("sync", 2, True)]
)
def test_an_optimizer_is_given_the_step(tmp_path: Path, mode: str, num_ps: int, raises: bool) -> None:
    """As ``minimize(loss, global_step)`` gives it; whether it raises it or not, each update is one step."""

    class Decayed(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
            rate = 1.0 / (1.0 + tf.cast(global_step.read_value(), tf.float32))
            pairs = [(gradient * rate, variable) for gradient, variable in grads_and_vars if gradient is not None]
            applied = super().apply_gradients(pairs, global_step if raises else None, name)
            with tf.control_dependencies([applied]):
                return tf.no_op()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weights = [tf.get_variable(name, [size], initializer=tf.zeros_initializer()) for name, size in SIZES.items()]
        return tfps.ModelSpec(loss=-tf.add_n([tf.reduce_sum(one) for one in weights]), optimizer=Decayed(1.0))

    train(model_of(from_table(eighths(1, 9)), model_fn), num_ps, 1, mode=mode, max_steps=4, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert values["global_step"] == 4
    for name in SIZES:
        np.testing.assert_allclose(values[name], 1 + 1 / 2 + 1 / 3 + 1 / 4, rtol=1e-6)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_an_optimizer_counts_is_counted_with_its_update(tmp_path: Path, mode: str) -> None:
    """Though it takes no gradient: a checkpoint has as many as there are updates, and so has what goes on from it."""

    class Counting(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.variable_scope("own", reuse=tf.AUTO_REUSE):
                count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)
            counted = count.assign_add(1.0, read_value=False)
            return tf.group(counted, super().apply_gradients(grads_and_vars, *args, **kwargs))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight + 0.0 * features["x"], optimizer=Counting(1.0))

    for steps in (11, 24):
        train(
            model_of(lambda *_: dataset_of(np.ones(64, np.float32)), model_fn),
            2,
            2,
            mode=mode,
            max_steps=steps,
            model_dir=str(tmp_path),
        )
        assert variables_of(tmp_path) == {"weight": -steps, "own/count": steps, "global_step": steps}


class Stepping(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """An optimizer that raises the global step itself, and then adds it to variables, in places of three kinds.

    Args:
        is_called: Whether to read it in a ``tf.function`` instead.
    """

    def __init__(self, is_called: bool = False) -> None:
        super().__init__(1.0)
        self._is_called = is_called

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, *_: Any) -> Any:
        """Apply, raise, and add."""
        with tf.variable_scope("own", reuse=tf.AUTO_REUSE):
            sums = [tf.get_variable(key, [], tf.int64, tf.zeros_initializer(), trainable=False) for key in "abc"]
        with tf.control_dependencies([super().apply_gradients(grads_and_vars, global_step)]):
            if self._is_called:
                return tf.group(sums[0].assign_add(tf.function(lambda: tf.identity(global_step.read_value()))()))
            plain = sums[0].assign_add(global_step.read_value())
            is_third = tf.equal(global_step.read_value() % 3, 0)
            branch = tf.cond(is_third, lambda: sums[1].assign_add(global_step.read_value()).op, tf.no_op)
            turn = lambda at, total: (at + 1, total + global_step.read_value())  # noqa: E731
            _, twice = tf.while_loop(lambda at, _: at < 2, turn, [tf.constant(0), tf.constant(0, tf.int64)])
            return tf.group(plain, branch, sums[2].assign_add(twice))


def stepped(optimizer: Any) -> Any:
    """Return a model that an optimizer trains with a gradient of 1."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight + 0.0 * features["x"], optimizer=optimizer)

    return model_of(lambda *_: dataset_of(np.ones(64, np.float32)), model_fn)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_optimizer_that_raises_the_step_reads_the_raised_one(tmp_path: Path, mode: str) -> None:
    """Also in a branch and in a loop; in a function it would read the one before, and is refused."""
    train(stepped(Stepping()), 1, 1, mode=mode, max_steps=7, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert (values["weight"], values["global_step"]) == (-7, 7)
    assert [values[f"own/{key}"] for key in "abc"] == [sum(range(8)), 3 + 6, 2 * sum(range(8))]
    with pytest.raises(ModelError, match=r"reads global_step in a tf.function, after it has raised it: do it outside"):
        builder.training(JobConfig(mode=mode), Cluster(("p:1",), ("w:1",)), Task("worker", 0), stepped(Stepping(True)))


class Raising(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """An optimizer that raises the global step in a way of its own."""

    def __init__(self, how: Any) -> None:
        super().__init__(1.0)
        self._how = how

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, *_: Any) -> Any:
        """Apply, and raise."""
        with tf.control_dependencies([super().apply_gradients(grads_and_vars)]):
            return tf.group(self._how(global_step))


def _in_a_loop(step: Any) -> Any:
    """Raise the step twice."""
    return tf.while_loop(lambda at: at < 2, lambda at: at + tf.cast(step.assign_add(1) > 0, tf.int32), [0])


@pytest.mark.parametrize(
    "how",
    [
        lambda step: step.assign_add(2),
        lambda step: step.assign(step + 2),
        lambda step: step.assign(2 * step),
        lambda step: [step.assign_add(1), step.assign_add(1)],
        _in_a_loop,
    ],
)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_optimizer_that_raises_the_step_by_another_amount_is_refused(mode: str, how: Any) -> None:
    """Each update raises it by 1."""
    with pytest.raises(ModelError, match="changes global_step by another amount than 1"):
        builder.training(JobConfig(mode=mode), Cluster(("p:1",), ("w:1",)), Task("worker", 0), stepped(Raising(how)))


@pytest.mark.parametrize(
    ("how", "is_warned_of"),
    [
        (lambda step: step.assign(step + 1), False),
        (lambda step: step.assign(1 + tf.identity(step)), False),
        (lambda step: tf.cond(tf.equal(step % 3, 0), lambda: step.assign_add(1).op, tf.no_op), True),
    ],
)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_each_step_counts_however_the_optimizer_raises_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, how: Any, is_warned_of: bool
) -> None:
    """By an assignment, or in some steps only, which a warning names."""
    train(stepped(Raising(how)), 1, 1, mode=mode, max_steps=7, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert (values["weight"], values["global_step"]) == (-7, 7)
    assert ("the optimizer raises global_step in a condition" in caplog.text) == is_warned_of


def test_sync_refuses_an_update_that_needs_a_batch() -> None:
    """A learning rate that depends on the batch's loss would take the chief's batches from its steps: refused."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = tf.square(weight - features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1 * tf.stop_gradient(loss)))

    model = model_of(lambda *_: dataset_of(np.ones(4, np.float32)), model_fn)
    cluster = Cluster(("p:1",), ("w:1", "w:2"))
    with pytest.raises(ModelError, match="the optimizer needs the batch, perhaps for its learning rate"):
        builder.training(JobConfig(mode="sync"), cluster, Task("worker", 0), model)
    assert builder.training(JobConfig(mode="async"), cluster, Task("worker", 0), model).updates is None


def _written(model_dir: Path, step: int) -> bool:
    """Return whether the event file has come to a step."""
    files = list(model_dir.glob("events*"))
    return bool(files) and any(event.step >= step for event in tf.train.summary_iterator(str(files[0])))


def _trained_by(optimizer: Any, directory: Path, num_ps: int = 1, **flags: Any) -> Any:
    """Train a table of two rows, a weight and one that the loss does not use; returns their values."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        table = tf.get_variable("table", [2, 2], initializer=tf.ones_initializer())
        weight = tf.get_variable("weight", [2], initializer=tf.ones_initializer())
        tf.get_variable("unused", [2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, [0])
        return tfps.ModelSpec(loss=-tf.reduce_sum(rows) - 2 * tf.reduce_sum(weight), optimizer=optimizer())

    model = model_of(from_table(eighths(1, 9)), model_fn)
    train(model, num_ps, 1, max_steps=2, model_dir=str(directory), **flags)
    return variables_of(directory)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_optimizer_is_given_what_minimize_gives_it(tmp_path: Path, mode: str) -> None:
    """Variables without a gradient too, gradients that it may make dense, a variable twice; it need raise no step."""

    class Decaying(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = super().compute_gradients(loss, *args, **kwargs)
            return [*pairs, *(pair for pair in pairs if pair[1].op.name == "weight")]

        def apply_gradients(self, pairs: Any, *_: Any) -> Any:
            dense = [(tf.zeros_like(v) if g is None else tf.convert_to_tensor(g), v) for g, v in pairs]
            with tf.control_dependencies([super().apply_gradients(dense)]):
                return tf.group(*[v.assign(v.read_value() / 2) for v in {v.ref(): v for _, v in pairs}.values()])

    values = _trained_by(lambda: Decaying(1.0), tmp_path, mode=mode)
    assert values["unused"].tolist() == [0.25] * 2
    assert values["table"].tolist() == [[((1 + 1) / 2 + 1) / 2] * 2, [0.25] * 2]
    assert values["weight"].tolist() == [((1 + 4) / 2 + 4) / 2] * 2
    assert values["global_step"] == 2


def _of_page(name: str) -> Any:
    """Return a class of the page on migration."""
    page = (REPO / "tfps/docs/migration.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    known = {"tf": tf}
    exec(code, known)
    return known[name]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_port_clips_what_the_script_clips(tmp_path: Path, mode: str) -> None:
    """As the page on migration has it: each worker's own gradient, 8 to 1; in sync the mean is of the clipped ones."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([[8, 0.25][context.input_pipeline_id]])).repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        tf.get_variable("unused", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=_of_page("Clipped")(0.125))

    train(model_of(input_fn, model_fn), mode=mode, max_steps=10, model_dir=str(tmp_path))
    steps = [summary(tmp_path)["tasks"][f"worker/{index}"]["steps"] for index in range(2)]
    assert sum(steps) == (20 if mode == "sync" else 10)
    total = steps[0] * 1 + steps[1] * 0.25
    assert variables_of(tmp_path)["weight"] == -0.125 * total / (2 if mode == "sync" else 1)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_port_trains_the_variables_of_the_scripts_list(tmp_path: Path, mode: str) -> None:
    """As the page on migration has it for ``var_list``: the others keep their first values."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        base, head = (tf.get_variable(name, [], initializer=tf.ones_initializer()) for name in ("base", "head"))
        return tfps.ModelSpec(loss=features["x"] * base * head, optimizer=_of_page("OfHead")(0.125))

    train(model_of(ones, model_fn), 2, 2, mode=mode, max_steps=10, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert (values["base"], values["head"]) == (1.0, 1.0 - 10 * 0.125)


class Showing(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Shows the gradient as it is computed and as it is applied."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pairs, and show the gradient of the first one."""
        pairs = super().compute_gradients(*args, **kwargs)
        tf.summary.scalar("computed", pairs[0][0])
        tf.summary.histogram("spread", pairs[0][0])
        return pairs

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the pairs, and show the gradient of the first one."""
        pairs = list(grads_and_vars)
        tf.summary.scalar("applied", pairs[0][0])
        return super().apply_gradients(pairs, *args, **kwargs)


def _summaries(model_dir: Path) -> dict[str, dict[int, Any]]:
    """Return by tag, without its scope, and by step what the chief has written."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for path in model_dir.glob("events.*"):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[value.tag.rpartition("/")[2]][event.step] = value
    return found


def _shown_by_optimizer(directory: Path, values: Any, **flags: Any) -> dict[str, dict[int, Any]]:
    """Train a weight whose gradients are some values; return the summaries."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        tf.summary.scalar("of_model", features["x"])
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=Showing(1.0))

    model = model_of(lambda mode, *_: None if mode == "eval" else dataset_of(np.float32(values)), model_fn)
    train(model, 1, 1, max_steps=int(np.isfinite(values).sum()), model_dir=str(directory), steps_to_validate=1, **flags)
    return _summaries(directory)


@pytest.mark.parametrize(("mode", "steps_per_run"), [("async", 1), ("async", 4), ("sync", 1), ("sync", 4)])
def test_what_an_optimizer_shows_is_written(
    tmp_path: Path, mode: str, steps_per_run: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each step, its own gradient. In sync, the update is not the step's: a warning says what is not written."""
    values = [float(3**n) for n in range(8)]
    found = _shown_by_optimizer(tmp_path, values, mode=mode, steps_per_run=steps_per_run)
    names = ["of_model", "computed", *(["applied"] if mode == "async" else [])]
    for name in names:
        assert [value.simple_value for _, value in sorted(found[name].items())] == values, name
    assert [value.histo.max for _, value in sorted(found["spread"].items())] == values
    assert ("applied" in found) == (mode == "async")
    assert ("the optimizer's summary 'applied" in caplog.text) == (mode == "sync")
    assert variables_of(tmp_path)["weight"] == -sum(values)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_update_that_an_optimizer_collects_is_named(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not run, unlike what the model has collected before."""

    class Collecting(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
            late = tf.get_variable("late", [], initializer=tf.zeros_initializer(), trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, late.assign_add(1.0, name="add_late"))
            return super().compute_gradients(*args, **kwargs)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        early = tf.get_variable("early", [], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, early.assign_add(1.0))
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=Collecting(1.0))

    model = model_of(lambda mode, *_: None if mode == "eval" else dataset_of(np.ones(5, np.float32)), model_fn)
    train(model, 1, 1, max_steps=5, model_dir=str(tmp_path), mode=mode)
    values = variables_of(tmp_path)
    assert (values["weight"], values["early"], values["late"]) == (-5, 5, 0)
    [line] = [line for line in caplog.messages if "is not run: the optimizer" in line]
    assert "add_late" in line
    assert "early" not in line


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_histogram_of_a_gradient_waits_for_the_checks(tmp_path: Path, mode: str) -> None:
    """A step with NaN is skipped, though a histogram of it would fail with another error."""
    _shown_by_optimizer(tmp_path, [1.0, 1.0, np.nan, 1.0, np.nan, 1.0, 1.0, 1.0], mode=mode, on_nan="skip")
    assert variables_of(tmp_path)["weight"] == -6


@pytest.mark.parametrize(("mode", "wire"), [("async", "packed"), ("async", "plain"), ("sync", "packed")])
def test_an_optimizer_may_return_several_operations(tmp_path: Path, mode: str, wire: str) -> None:
    """A list is an update as a group of it is, as for ``Session.run``."""

    class Several(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, pairs: Any, *_: Any) -> Any:
            return [super(Several, self).apply_gradients([pair]) for pair in pairs if pair[0] is not None]

    values = _trained_by(lambda: Several(1.0), tmp_path, num_ps=2, mode=mode, wire=wire)
    assert (values["table"].tolist(), values["weight"].tolist()) == ([[3, 3], [1, 1]], [5, 5])
    assert values["global_step"] == 2


@pytest.mark.parametrize(
    ("mode", "num_ps", "optimizer"),
    [
        ("async", 1, tf.train.GradientDescentOptimizer),
        ("async", 2, tf.train.AdamOptimizer),
        ("sync", 1, tf.train.AdamOptimizer),
        ("sync", 2, tf.train.GradientDescentOptimizer),
    ],
)
def test_a_constraint_may_be_made_of_anything(tmp_path: Path, mode: str, num_ps: int, optimizer: Any) -> None:
    """Constants of a constraint wait for the update, and so are part of it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weights = [
            tf.get_variable(name, [4], initializer=tf.ones_initializer(), constraint=lambda w: tf.clip_by_norm(w, 1.0))
            for name in SIZES
        ]
        return tfps.ModelSpec(loss=-tf.add_n([tf.reduce_sum(one) for one in weights]), optimizer=optimizer(1.0))

    model = model_of(from_table(eighths(1, 9)), model_fn)
    train(model, num_ps, 1, mode=mode, max_steps=3, model_dir=str(tmp_path))
    for name in SIZES:
        np.testing.assert_allclose(variables_of(tmp_path)[name], [0.5] * 4, rtol=1e-6)


def test_an_optimizer_with_a_minimize_of_its_own_is_refused() -> None:
    """It would not be called, and what it does be left out in silence."""

    class Choosing(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
            return super().minimize(loss, *args, **kwargs)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        return tfps.ModelSpec(loss=2 * tf.get_variable("weight", []), optimizer=Choosing(1.0))

    cluster = Cluster(("a:1",), ("b:1",))
    with pytest.raises(ModelError, match="whose own minimize\\(\\) would not be called"):
        builder.training(JobConfig(), cluster, Task("worker", 0), model_of(from_table(eighths(1, 9)), model_fn))


@pytest.mark.parametrize(("mode", "num_ps"), [("async", 1), ("sync", 2)])
def test_an_optimizer_that_reads_the_step_finds_the_one_before(tmp_path: Path, mode: str, num_ps: int) -> None:
    """As ``minimize(loss, global_step)`` does it: the step is raised when the variables have been changed."""

    class Decayed(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
            rate = 1.0 / (1.0 + tf.cast(tf.train.get_global_step(), tf.float32))
            return tf.raw_ops.ResourceApplyGradientDescent(var=var.handle, alpha=rate, delta=grad)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weights = [tf.get_variable(name, [size], initializer=tf.zeros_initializer()) for name, size in SIZES.items()]
        return tfps.ModelSpec(loss=-tf.add_n([tf.reduce_sum(one) for one in weights]), optimizer=Decayed(1.0))

    train(model_of(from_table(eighths(1, 9)), model_fn), num_ps, 1, mode=mode, max_steps=4, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    for name in SIZES:
        np.testing.assert_allclose(values[name], 1 + 1 / 2 + 1 / 3 + 1 / 4, rtol=1e-6)


@pytest.mark.parametrize(("mode", "num_ps"), [("async", 2), ("sync", 1)])
def test_an_optimizer_may_read_the_step_when_it_has_changed_something(tmp_path: Path, mode: str, num_ps: int) -> None:
    """Every third step, a weight goes back half the way: Lookahead, Zhang et al. 2019."""

    class Lookahead(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
            variables = [variable for gradient, variable in grads_and_vars if gradient is not None]
            slow = [self._get_or_make_slot(one, tf.zeros(one.shape), "slow", "slow") for one in variables]
            with tf.control_dependencies([super().apply_gradients(grads_and_vars)]):
                slow_one = tf.matmul(tf.random.stateless_uniform([900, 900], [1, 2]), tf.ones([900, 900]))
            with tf.control_dependencies([slow_one]):
                third = tf.equal((tf.train.get_global_step().read_value() + 1) % 3, 0)
                for one, other in zip(variables, slow, strict=True):
                    back = tf.where(third, (one.read_value() + other.read_value()) / 2, one.read_value())
                    with tf.control_dependencies([back]):
                        kept = tf.where(third, back, other.read_value())
                        changes = [one.assign(back, read_value=False), other.assign(kept, read_value=False)]
                    tf.add_to_collection("changes", tf.group(changes))
            return tf.group(tf.get_collection("changes"))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weights = [tf.get_variable(name, [size], initializer=tf.zeros_initializer()) for name, size in SIZES.items()]
        return tfps.ModelSpec(loss=-tf.add_n([tf.reduce_sum(one) for one in weights]), optimizer=Lookahead(1.0))

    train(model_of(from_table(eighths(1, 9)), model_fn), num_ps, 1, mode=mode, max_steps=8, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert values["global_step"] == 8
    for name in SIZES:
        np.testing.assert_array_equal(values[name], 1.5 + 1.5 + 2)
        np.testing.assert_array_equal(values[f"{name}/slow"], 3)


@pytest.mark.parametrize(
    ("mode", "steps", "was_restarted", "dropped"),
    [
        ("sync", {0: 10, 1: 13}, False, 3),
        ("sync", {0: 10, 1: 10}, False, 0),
        ("sync", {0: 10}, False, None),
        ("sync", {0: 10, 1: 4}, True, None),
        ("async", {0: 5, 1: 5}, False, None),
    ],
)
def test_gradients_that_came_too_late_are_counted(
    mode: str, steps: dict[int, int], was_restarted: bool, dropped: int | None
) -> None:
    """What workers have pushed and no update has used was dropped; it is not known where some steps are not."""
    one = SimpleNamespace(num_workers=2, resumed_from_step=90, was_restarted=was_restarted)
    assert gradients_dropped(JobConfig(mode=mode), one, Progress(global_step=100), steps) == dropped


def test_staleness_is_counted(tmp_path: Path) -> None:
    """In async each step is counted by the updates it has missed: none where one worker trains alone, a step a run."""
    train(model_of(powers, linear), num_workers=1, max_steps=50, steps_per_run=1, model_dir=str(tmp_path / "alone"))
    assert summary(tmp_path / "alone")["staleness"] == [50]
    train(model_of(powers, linear), num_workers=2, max_steps=200, model_dir=str(tmp_path / "two"))
    assert sum(summary(tmp_path / "two")["staleness"]) == 200
    train(model_of(powers, linear), num_workers=2, max_steps=5, mode="sync", model_dir=str(tmp_path / "sync"))
    assert summary(tmp_path / "sync")["staleness"] is None


def test_a_step_is_as_stale_as_the_updates_it_has_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that is held in its first step while the other makes all others is stale by those, once."""
    caplog.set_level(logging.INFO, "tfps")
    go_on = threading.Event()
    flags = {"max_steps": 20, "steps_per_run": 1, "runs_in_flight": 1, "steps_to_validate": 1}
    with job(model_of(_Gate([100, 100], {1: (0, go_on)}), linear), model_dir=str(tmp_path), **flags) as running:
        wait_until(lambda: caplog.text.count(" step=") == 19)  # all that the other can take
        go_on.set()
        assert_done(running.wait())
    counts = summary(tmp_path)["staleness"]
    assert (counts[0], counts[-1], sum(counts)) == (19, 1, 20)
    assert 1 < len(counts) <= 20  # the other may have made some before this one read


@pytest.mark.parametrize("flags", [{}, {"runs_in_flight": 3, "steps_per_run": 4}])
def test_no_step_is_reported_that_was_not_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any]
) -> None:
    """Progress lines and event files of a job whose input ends have no step beyond the last, whatever was drawn."""
    caplog.set_level(logging.INFO, "tfps")

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones(20, np.float32))

    train(model_of(input_fn, linear), 1, 2, max_steps=1000, steps_to_validate=1, model_dir=str(tmp_path), **flags)
    reported = [found["step"] for record in caplog.records if (found := parse_progress(record.getMessage()))]
    assert max(reported) <= 40
    [file] = tmp_path.glob("events*")
    assert max(event.step for event in tf.train.summary_iterator(str(file))) <= 40
    assert variables_of(tmp_path)["global_step"] == 40


class Both(tf.train.Optimizer):  # type: ignore[misc]
    """Two optimizers in one, which know their variables by their places among the pairs, as those of a GAN."""

    def __init__(self) -> None:
        super().__init__(False, "Both")
        self._down, self._up = tf.train.GradientDescentOptimizer(1.0), tf.train.GradientDescentOptimizer(10.0)

    def compute_gradients(self, loss: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Return the pairs of the one, then of the other."""
        found = tf.trainable_variables()
        down = self._down.compute_gradients(loss, [one for one in found if one.op.name.startswith("down")])
        self._count = len(down)
        return down + self._up.compute_gradients(-loss, [one for one in found if one.op.name.startswith("up")])

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply those of each."""
        pairs = list(grads_and_vars)
        with tf.control_dependencies([self._down.apply_gradients(pairs[: self._count])]):
            return self._up.apply_gradients(pairs[self._count :], global_step, name)


@pytest.mark.parametrize(
    ("mode", "num_ps", "num_workers", "unused"),
    [("async", 2, 1, []), ("async", 2, 1, ["down0"]), ("sync", 2, 2, ["down0"]), ("sync", 1, 1, [])],
)
def test_an_optimizer_gets_the_pairs_as_it_has_computed_them(
    tmp_path: Path, mode: str, num_ps: int, num_workers: int, unused: list[str]
) -> None:
    """In their order, and with those that have no gradient in their places."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        names = [f"{which}{index}" for which in ("down", "up") for index in range(3)]
        weights = {name: tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in names}
        loss = tf.add_n([tf.reduce_sum(weight) for name, weight in weights.items() if name not in unused])
        return tfps.ModelSpec(loss=loss * features["x"], optimizer=Both())

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones(1, np.float32)).repeat()

    train(model_of(input_fn, model_fn), num_ps, num_workers, mode=mode, max_steps=6, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    for index in range(3):
        np.testing.assert_array_equal(values[f"down{index}"], 0.0 if f"down{index}" in unused else -6.0)
        np.testing.assert_array_equal(values[f"up{index}"], 60.0)


@pytest.mark.parametrize(("mode", "num_ps"), [("async", 1), ("async", 2), ("sync", 2)])
def test_an_optimizer_that_has_raised_the_step_finds_it_raised(tmp_path: Path, mode: str, num_ps: int) -> None:
    """A Lookahead that goes by ``global_step`` after the inner optimizer's update moves at its fifth step and tenth."""

    class Lookahead(tf.train.Optimizer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(False, "Lookahead")
            self._inner = tf.train.GradientDescentOptimizer(1.0)

        def compute_gradients(self, loss: Any, *_args: Any, **_kwargs: Any) -> Any:
            return self._inner.compute_gradients(loss)

        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
            variables = [variable for _, variable in grads_and_vars]
            moved = [self._get_or_make_slot(one, tf.zeros(one.shape), "moved", "moved") for one in variables]
            with tf.control_dependencies([self._inner.apply_gradients(grads_and_vars, global_step, name)]):
                step = tf.train.get_global_step().read_value()
                is_time = tf.cast(tf.equal(step % 5, 0), tf.float32)
                return tf.group(*(slot.assign_add(is_time * tf.cast(step + 1, tf.float32)) for slot in moved))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weights = [tf.get_variable(name, [], initializer=tf.zeros_initializer()) for name in SIZES]
        return tfps.ModelSpec(loss=-tf.add_n(weights) * features["x"], optimizer=Lookahead())

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones(1, np.float32)).repeat()

    train(model_of(input_fn, model_fn), num_ps, 1, mode=mode, max_steps=12, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert {float(values[f"{name}/moved"]) for name in SIZES} == {6.0 + 11.0}
    assert {float(values[name]) for name in SIZES} == {12.0}


@pytest.mark.parametrize("flags", [{"steps_per_run": 8}, {"steps_per_run": 1, "wire": "plain"}])
def test_a_map_may_end_the_input(tmp_path: Path, flags: dict[str, Any]) -> None:
    """By what its function takes from: every element that there is makes a step, in runs of several, too."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        other = tf.data.make_one_shot_iterator(tf.data.Dataset.range(37))
        numbers = tf.data.Dataset.range(100)
        return numbers.map(lambda _: ({"x": tf.ones([])}, tf.cast(other.get_next(), tf.float32)))

    train(model_of(input_fn, linear), 1, 1, max_steps=100, model_dir=str(tmp_path), **flags)
    assert variables_of(tmp_path) == {"weight": -37, "global_step": 37}


@pytest.mark.parametrize("flags", [{"runs_in_flight": 3}, {"runs_in_flight": 3, "steps_per_run": 4}])
def test_the_last_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any]) -> None:
    """Whichever run of which worker makes it: the last progress line is of ``--max_steps``."""
    caplog.set_level(logging.INFO, "tfps")
    for turn in range(5):
        caplog.clear()
        train(model_of(powers, linear), 1, 3, max_steps=60, model_dir=str(tmp_path / str(turn)), **flags)
        reported = [found["step"] for record in caplog.records if (found := parse_progress(record.getMessage()))]
        assert max(reported) == 60


def batch_unused(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` whose loss does not use the batch: the input only says how many steps there are."""
    weights = [tf.get_variable(name, [4], initializer=tf.zeros_initializer()) for name in ("a", "b")]
    loss = tf.reduce_sum(tf.add_n(weights))
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


@pytest.mark.parametrize(("mode", "wire"), [("async", "packed"), ("sync", "packed"), ("sync", "plain")])
def test_no_update_is_made_where_the_input_has_ended(tmp_path: Path, mode: str, wire: str) -> None:
    """Each PS has as many updates as the input has batches, also if the loss uses none of them."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.zeros(13, np.float32))

    flags = {"mode": mode, "wire": wire, "steps_per_run": 1, "max_steps": 100, "model_dir": str(tmp_path)}
    train(model_of(input_fn, batch_unused), 2, 1, **flags)
    saved = variables_of(tmp_path)
    assert (saved["global_step"], saved["a"].tolist(), saved["b"].tolist()) == (13, [-13.0] * 4, [-13.0] * 4)
