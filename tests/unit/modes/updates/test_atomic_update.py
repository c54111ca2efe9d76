"""Claims about checkpoints that are saved while updates are applied: each holds as many as its step says."""

import dataclasses
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import job, model_of, session_config, shared_servers, target_of, train, wait_until
from support.processes import summary

import tfps
from tfps.cluster.spec import Task
from tfps.errors import PeerLostError
from tfps.modes.updates import atomic_update, update_ops
from tfps.modes.updates.moments import APPLIED, FENCED, Moments
from tfps.runtime.checkpoint import manager, sharded_saver
from tfps.runtime.checkpoint.manifest import partial_updates
from tfps.runtime.coordination.job_state import JobState, WorkerTotals
from tfps.runtime.coordination.partial_updates import PartialUpdates
from tfps.runtime.graph.passes.snapshot import Snapshot
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.training import joining
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.peer_monitor import PeerMonitor
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker import Worker
from tfps.runtime.training.worker_parts import WorkerParts

pytestmark = pytest.mark.slow

BIG = 1 << 18  # floats: too large to be packed


def endless(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of two ids, without end."""
    if mode == "eval":
        return None
    return tf.data.Dataset.from_tensors(({"ids": np.int64([0, 3])}, 0.0)).repeat()


class _Averaging(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Averages the weights after each update, with what the worker computes from them."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.control_dependencies([super().apply_gradients(grads_and_vars, *args, **kwargs)]):
            return tf.train.ExponentialMovingAverage(0.5).apply([variable for _, variable in grads_and_vars])


def averaging(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` as ``counting``, with an average of every weight."""
    return dataclasses.replace(counting(features, labels, mode, params), optimizer=_Averaging(1.0))


def counting(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` each of whose updates raises every weight that it uses by 1."""
    small = [tf.get_variable(f"small{index}", [2], initializer=tf.zeros_initializer()) for index in range(3)]
    big = tf.get_variable("big", [BIG], initializer=tf.zeros_initializer())
    table = tf.get_variable("table", [4, BIG // 4], initializer=tf.zeros_initializer())
    rows = tf.nn.embedding_lookup(table, features["ids"])
    loss = -tf.add_n([tf.reduce_sum(each) for each in (*small, big, rows)])
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


COUNTING = model_of(endless, counting)


def counts(path: str) -> dict[str, set[float]]:
    """Return by variable how many updates a checkpoint of ``counting`` holds."""
    reader = tf.train.load_checkpoint(path)
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    values |= {name: value[[0, 3]] for name, value in values.items() if name.startswith("table")}
    return {name: set(np.ravel(value).tolist()) for name, value in values.items()}


def wait_for_whole_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves take no update that a busy machine has delayed for that of a lost worker."""
    monkeypatch.setattr(sharded_saver, "_STUCK_SECS", 100.0)
    monkeypatch.setattr(sharded_saver, "_TRIES_SECS", 100.0)


@pytest.mark.parametrize(("num_ps", "wire"), [(1, "packed"), (1, "plain"), (2, "packed")])
def test_a_checkpoint_of_a_job_under_way_holds_the_updates_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ps: int, wire: str
) -> None:
    """Small, large and sparsely updated weights of every checkpoint have had as many updates as ``global_step`` says.

    They are saved as often as the machine allows while three workers apply updates as fast as they can.
    """
    wait_for_whole_updates(monkeypatch)
    with mock.patch.object(manager, "_KEEP", 1000):
        flags: dict[str, Any] = {"max_steps": 400, "save_checkpoint_secs": 0.01, "wire": wire}
        train(COUNTING, num_ps, 3, model_dir=str(tmp_path), **flags)
    saved = sorted(path.with_suffix("") for path in tmp_path.glob("model.ckpt-*.index"))
    assert len(saved) >= 2, "one under way, and the last"
    for path in saved:
        step = float(path.name.rpartition("-")[2])
        found = counts(str(path))
        assert set(found) == {"global_step", "small0", "small1", "small2", "big", "table"}
        assert all(value == {step} for value in found.values()), (step, found)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_checkpoint_of_a_job_under_way_holds_the_averages_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ps: int
) -> None:
    """Each average is that of as many updates as ``global_step`` says, and so is each weight.

    On a machine that is very busy, a save may find no moment between two updates in time; the manifest then says so.
    """
    wait_for_whole_updates(monkeypatch)
    with mock.patch.object(manager, "_KEEP", 1000):
        flags: dict[str, Any] = {"max_steps": 200, "save_checkpoint_secs": 0.01}
        train(model_of(endless, averaging), num_ps, 3, model_dir=str(tmp_path), **flags)
    saved = sorted(path.with_suffix("") for path in tmp_path.glob("model.ckpt-*.index"))
    assert len(saved) >= 2, "one under way, and the last"
    whole = [path for path in saved if not partial_updates(str(path))]
    assert tmp_path / "model.ckpt-200" in whole
    for path in whole:
        step, average = int(path.name.rpartition("-")[2]), 0.0
        for number in range(step):
            average = float(np.float32(average) - (np.float32(average) - np.float32(number + 1)) / 2)
        found = counts(str(path))
        assert len(found) == 1 + 2 * 5
        for name, value in found.items():
            assert value == {average if name.endswith("Average") else step}, (step, found)


def test_a_job_saves_before_all_of_its_workers_have_begun(tmp_path: Path) -> None:
    """A worker that comes late, or never, keeps no checkpoint from being saved."""
    begin = joining.begin

    def late(parts: WorkerParts, session: Any) -> None:
        if not parts.task.is_chief:
            wait_until(lambda: list(tmp_path.glob("model.ckpt-*.index")))
        begin(parts, session)

    with mock.patch.object(joining, "begin", late):
        train(COUNTING, 2, 2, model_dir=str(tmp_path), max_steps=300, save_checkpoint_secs=0.01)
    assert counts(tf.train.latest_checkpoint(str(tmp_path)))["small0"] == {300.0}


def test_an_update_that_is_broken_off_between_the_ps_is_counted() -> None:
    """One PS has applied it, the other never gets its gradient: it is one update in part, also after whole ones."""
    with shared_servers(), tf.Graph().as_default() as graph:
        weights = []
        for index in range(2):
            with tf.device(f"/job:ps/task:{index}"):
                weights.append(tf.get_variable(f"weight{index}", [2], initializer=tf.zeros_initializer()))
        with tf.device("/job:ps/task:0"):
            global_step = tf.train.get_or_create_global_step()
        with tf.device("/job:ps/task:1"):
            late = tf.FIFOQueue(9, tf.float32, shapes=[[2]])
            gradients = [tf.identity(tf.ones([2])), late.dequeue()]  # one that a PS waits for, unlike a constant
        moments = Moments(2, 1)
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        update = atomic_update.apply(optimizer, list(zip(gradients, weights, strict=True)), global_step, moments, 0)
        step, partial = [update.counted, *update.others], moments.partial()[0]
        init = tf.group(tf.global_variables_initializer(), moments.reset([0]))
        push = late.enqueue(tf.ones([2]))
        target = target_of(Task("worker", 0))
        with tf.Session(target, graph=graph, config=session_config("/job:ps", "/job:worker/task:0")) as session:
            session.run(init)
            session.run(push)
            session.run(step)
            assert session.run([partial, *weights])[0] == 0
            with pytest.raises(tf.errors.DeadlineExceededError):
                session.run(step, options=tf.RunOptions(timeout_in_ms=5000))
            found, first, second = session.run([partial, *weights])
    assert (found, first.tolist(), second.tolist()) == (1, [-2.0, -2.0], [-1.0, -1.0])


class Adding(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Does not raise the step, as the wrapper in which tfps uses an optimizer."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply them."""
        del global_step
        return super().apply_gradients(grads_and_vars, None, name)


def test_updates_of_different_runs_are_told_apart() -> None:
    """One PS has the update of one run, the other that of another run: as many, and yet not the same."""
    with shared_servers(), tf.Graph().as_default() as graph:
        weights, queues, gradients = [], [], []
        for index in range(2):
            with tf.device(f"/job:ps/task:{index}"):
                weights.append(tf.get_variable(f"weight{index}", [], initializer=tf.zeros_initializer()))
                queues.append(tf.FIFOQueue(9, tf.float32, shapes=[[]]))
                gradients.append(queues[-1].dequeue())
        with tf.device("/job:ps/task:0"):
            global_step = tf.train.get_or_create_global_step()
        moments = Moments(2, 2)
        pairs = list(zip(gradients, weights, strict=True))
        update = atomic_update.apply(Adding(-1.0), pairs, global_step, moments, 1)
        step, partial = [update.counted, *update.others], moments.partial()
        same, steps = Snapshot(moments).same_updates, moments.steps("/job:ps/task:0")
        init = tf.group(tf.global_variables_initializer(), moments.reset([0, 1]))
        pushes = [queue.enqueue(float(2**index)) for index, queue in enumerate(queues)]
        target = target_of(Task("worker", 0))
        with tf.Session(target, graph=graph, config=session_config("/job:ps", "/job:worker/task:0")) as session:
            session.run(init)
            assert session.run([tf.reduce_all(same), partial])[0]
            for push in pushes:
                session.run(push)
                with pytest.raises(tf.errors.DeadlineExceededError):
                    session.run(step, options=tf.RunOptions(timeout_in_ms=5000))
            assert session.run(weights) == [1.0, 2.0]
            assert not session.run(tf.reduce_all(same))
            assert session.run(partial).tolist() == [0, 2]
            assert session.run(steps).tolist() == [0, 1]


def test_updates_in_part_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker whose they are says so, and the summary has how many of all workers there are."""
    caplog.set_level("INFO", "tfps")
    take = Worker._take_remaining_steps

    def interrupted(worker: Worker, parts: WorkerParts, loop: Any) -> None:
        take(worker, parts, loop)
        if not parts.task.is_chief:
            _raise_counter(parts, "tfps/applying_1_1")

    with mock.patch.object(Worker, "_take_remaining_steps", interrupted):
        train(COUNTING, 2, 2, model_dir=str(tmp_path), max_steps=30)
    assert "1 update of this worker applied in part" in caplog.text
    assert summary(tmp_path)["partial_updates"] == 1
    train(COUNTING, 2, 1, model_dir=str(tmp_path), max_steps=40)
    assert summary(tmp_path)["partial_updates"] == 1, "the checkpoint that was gone on from holds it"
    for steps, num_ps, mode in ((50, 2, "sync"), (60, 1, "sync"), (70, 1, "async")):
        train(COUNTING, num_ps, 1, model_dir=str(tmp_path), max_steps=steps, mode=mode)
        assert partial_updates(str(tmp_path / f"model.ckpt-{steps}")) == 1
        assert summary(tmp_path)["partial_updates"] == 1


def test_updates_in_part_that_nobody_tells_are_counted(tmp_path: Path) -> None:
    """A worker that is lost for good tells nothing; the summary and the manifest of the last checkpoint count it."""
    take = Worker._take_remaining_steps

    def interrupted(worker: Worker, parts: WorkerParts, loop: Any) -> None:
        take(worker, parts, loop)
        if not parts.task.is_chief:
            _raise_counter(parts, "tfps/applied_1_1")

    with mock.patch.object(Worker, "_take_remaining_steps", interrupted), mock.patch.object(PartialUpdates, "report"):
        train(COUNTING, 2, 2, model_dir=str(tmp_path), max_steps=30)
    assert summary(tmp_path)["partial_updates"] == 1
    assert partial_updates(str(tmp_path / "model.ckpt-30")) == 1


def _raise_counter(parts: WorkerParts, name: str) -> None:
    """Let a PS count one update more of a worker than there was."""
    [handle] = [op for op in parts.built.graph.get_operations() if op.name == name]
    with parts.built.graph.as_default():
        one = tf.raw_ops.AssignAddVariableOp(resource=handle.outputs[0], value=tf.constant([1, 5], tf.int64))
    parts.connection.session.run(one)


def test_the_steps_of_all_workers_are_those_that_the_ps_have_counted(tmp_path: Path) -> None:
    """Whatever the workers have come to tell of themselves, they sum up to the updates, also after a resume."""
    for max_steps, before in ((30, 0), (50, 30)):
        with mock.patch.object(JobState, "totals", return_value=[WorkerTotals(), WorkerTotals()]):
            train(COUNTING, 2, 2, model_dir=str(tmp_path), max_steps=max_steps)
        assert sum(task["steps"] for task in summary(tmp_path)["tasks"].values()) == max_steps - before


def test_a_lost_workers_update_in_part_spoils_no_others(tmp_path: Path) -> None:
    """While one worker's counts differ between the PS, checkpoints hold the same updates of each other on all PS.

    Where no such moment is found in time, as on a machine that is very busy, the manifest tells how many they lack.
    """
    begin = joining.begin

    def interrupted(parts: WorkerParts, session: Any) -> None:
        begin(parts, session)
        if parts.task.index == 2:
            _raise_counter(parts, "tfps/applied_1_2")
            StopRequest().wait_until(lambda: parts.global_step() >= 1500)  # as one that does not come back in time

    with (
        mock.patch.object(manager, "_KEEP", 1000),
        mock.patch.object(joining, "begin", interrupted),
        mock.patch.object(sharded_saver, "_TRIES_SECS", 100.0),
    ):
        flags: dict[str, Any] = {"max_steps": 1500, "save_checkpoint_secs": 0.01}
        train(COUNTING, 2, 3, model_dir=str(tmp_path), **flags)
    saved = sorted(tmp_path.glob("model.ckpt-*.index"))
    assert len(saved) > 3
    torn = []
    for path in saved:
        steps = set().union(*counts(str(path.with_suffix(""))).values())
        torn.append(max(steps) - min(steps))
        assert torn[-1] <= partial_updates(str(path.with_suffix(""))) - 1
    assert torn.count(0) > len(saved) / 2


def test_what_comes_after_another_ps_has_its_own_moment() -> None:
    """Adam's powers of beta, with two PS: they are multiplied under their PS's lock, and then the update is counted."""
    with tf.Graph().as_default() as graph:
        weights = []
        for index in range(2):
            with tf.device(f"/job:ps/task:{index}"):
                weights.append(tf.get_variable(f"weight{index}", [2], initializer=tf.zeros_initializer()))
        with tf.device("/job:ps/task:0"):
            global_step = tf.train.get_or_create_global_step()
        pairs = [(tf.ones([2]), weight) for weight in weights]
        moments = Moments(2, 1)
        with tf.device("/job:ps/task:0"):
            atomic_update.apply(tf.train.AdamOptimizer(0.1), pairs, global_step, moments, 0)
        powers = [one for one in tf.global_variables() if "_power" in one.op.name]
        writes = [op for op in graph.get_operations() if op.type == "AssignVariableOp"]
        for power in powers:
            [write] = [op for op in writes if op.inputs[0] is power.handle and op is not power.initializer]
            [lock] = [op for op in write.control_inputs if op.type == "MutexLock"]
            counts = next(op for op in lock.outputs[0].consumers() if op.type == "ConsumeMutexLock").control_inputs
            applied = moments.counter(APPLIED, "/job:ps/task:0", 0)
            assert lock.device == "/job:ps/task:0"
            assert any(op.inputs and op.inputs[0] is applied.handle for op in counts)
            reads = [op for op in update_ops.ancestors([write]) if op.type == "ReadVariableOp"]
            assert any(op.inputs[0] is power.handle and lock in op.control_inputs for op in reads)
        assert len(powers) == 2


class _Counting(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Counts its updates on a PS and on the worker. Adds the gradient, or the gradient times the count of the PS."""

    def __init__(self, rate: Any, by_count: bool) -> None:
        super().__init__(rate)
        self._by_count = by_count

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        with tf.device("/job:ps/task:0"):
            on_ps = tf.get_variable("on_ps", [], initializer=tf.zeros_initializer(), trainable=False)
            counted = on_ps.assign_add(1.0, read_value=self._by_count)
        with tf.device("/job:worker/task:0"):
            on_worker = tf.get_variable("on_worker", [], initializer=tf.zeros_initializer(), trainable=False)
            if self._by_count:
                grads_and_vars = [(gradient * counted, variable) for gradient, variable in grads_and_vars]
            own = on_worker.assign_add(1.0, read_value=False)
        return tf.group(counted, own, super().apply_gradients(grads_and_vars))


@pytest.mark.parametrize("by_count", [False, True])
def test_what_takes_no_gradient_waits_for_all_gradients(by_count: bool) -> None:
    """A step fails before it has its gradient. Then no count of the optimizer is raised, on PS or worker, nor the step.

    Nor does the learning rate change, which the model lowers in each step. The weight is on another PS than the rest.
    After that, two whole steps count as two.
    """
    with shared_servers(), tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:1"):
            weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        with tf.device("/job:ps/task:0"):
            global_step = tf.train.get_or_create_global_step()
            rate = tf.get_variable("rate", [], initializer=tf.zeros_initializer(), trainable=False)
            changed = rate.assign(rate - 1.0)
        with tf.device("/job:worker/task:0"):
            late = tf.FIFOQueue(9, tf.float32, shapes=[[]])
            pairs = [(late.dequeue(), weight)]
            push = late.enqueue(1.0)
        moments = Moments(2, 1)
        update = atomic_update.apply(_Counting(changed, by_count), pairs, global_step, moments, 0)
        step, partial = [update.counted, *update.others], moments.partial()[0]
        found = {variable.op.name: variable for variable in tf.global_variables()} | {"partial": partial}
        init = tf.group(tf.global_variables_initializer(), moments.reset([0]))
        target = target_of(Task("worker", 0))
        with tf.Session(target, graph=graph, config=session_config("/job:ps", "/job:worker/task:0")) as session:
            session.run(init)
            with pytest.raises(tf.errors.DeadlineExceededError):
                session.run(step, options=tf.RunOptions(timeout_in_ms=5000))
            failed = session.run(found)
            for _ in range(2):
                session.run(push)
                session.run(step)
            done = session.run(found)
    assert failed == dict.fromkeys(found, 0)
    sums = {"weight": 1 * 1 + 2 * 2 if by_count else 1 + 2}
    assert done == {"partial": 0, "global_step": 2, "rate": -2, "on_ps": 2, "on_worker": 2, **sums}


def test_a_worker_that_is_fenced_off_changes_nothing() -> None:
    """Its update fails before it changes anything on any PS, until it has begun anew; others' go on."""
    with shared_servers(), tf.Graph().as_default() as graph:
        weights = []
        for index in range(2):
            with tf.device(f"/job:ps/task:{index}"):
                weights.append(tf.get_variable(f"weight{index}", [2], initializer=tf.zeros_initializer()))
        with tf.device("/job:ps/task:0"):
            global_step = tf.train.get_or_create_global_step()
        moments = Moments(2, 2)
        pairs = [(tf.ones([2]), weight) for weight in weights]
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        updates = [atomic_update.apply(optimizer, pairs, global_step, moments, worker) for worker in range(2)]
        steps = [[update.counted, *update.others] for update in updates]
        off, back, partial = moments.fence([0]), moments.fence([0], off=False), moments.partial()
        init = tf.group(tf.global_variables_initializer(), moments.reset([0, 1]))
        target = target_of(Task("worker", 0))
        with tf.Session(target, graph=graph, config=session_config("/job:ps", "/job:worker/task:0")) as session:
            session.run(init)
            session.run(off)
            with pytest.raises(tf.errors.InvalidArgumentError, match=FENCED):
                session.run(steps[0])
            session.run(steps[1])
            reported = session.run([partial, *weights])
            session.run(back)
            session.run(steps[0])
            after = session.run([partial, *weights])
    assert [one.tolist() for one in reported] == [[0, 0], [-1.0, -1.0], [-1.0, -1.0]]
    assert [one.tolist() for one in after] == [[0, 0], [-2.0, -2.0], [-2.0, -2.0]]


def test_a_late_worker_adds_nothing_to_a_job_that_is_over(tmp_path: Path) -> None:
    """One that was taken for lost, with an update on its way: the job ends at ``max_steps``, and is not changed."""
    held, go_on = threading.Event(), threading.Event()
    start, make, complete = Loop._start, Worker._make_loop, Chief.complete
    loops: list[Loop] = []

    def noted(worker: Worker, parts: WorkerParts) -> Loop:
        loop = make(worker, parts)
        loops.extend([loop] * parts.task.index)
        return loop

    def late(loop: Loop, in_hand: Any) -> Any:
        if loop in loops and loop.progress.steps > 3:
            held.set()
            assert go_on.wait(100)
        return start(loop, in_hand)

    def when_over(chief: Chief, *args: Any) -> Any:
        found = complete(chief, *args)
        go_on.set()
        return found

    with (
        mock.patch.object(Worker, "_make_loop", noted),
        mock.patch.object(Loop, "_start", late),
        mock.patch.object(Chief, "complete", when_over),
        mock.patch.object(PeerMonitor, "are_gone", lambda _watch, tasks, _secs: not tasks or held.is_set()),
        job(COUNTING, 2, 2, model_dir=str(tmp_path), max_steps=40, steps_per_run=1) as running,
    ):
        wait_until(lambda: {"worker/0", "worker/1"} <= running.ended.keys())
        ended = dict(running.ended)
        running.stop()
        running.wait()
    assert ended["worker/0"] is None
    assert isinstance(ended["worker/1"], PeerLostError)
    assert "was presumed lost" in str(ended["worker/1"])
    assert counts(tf.train.latest_checkpoint(str(tmp_path)))["small0"] == {40.0}
