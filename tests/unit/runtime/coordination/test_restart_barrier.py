"""The workers of a sync job that are called together, as by one that was lost and started again, on real servers."""

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import (
    assert_done,
    cluster_of,
    dataset_of,
    job,
    linear,
    model_of,
    session_config,
    shared_servers,
    target_of,
    variables_of,
    wait_until,
)
from support.processes import summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import PeerLostError
from tfps.modes.sync import tokens
from tfps.runtime.coordination import interrupted_steps, job_state, restart_barrier
from tfps.runtime.coordination.job_state import Phase, RestartState
from tfps.runtime.coordination.restart_barrier import RestartBarrier
from tfps.runtime.graph import builder
from tfps.runtime.training import chief
from tfps.runtime.training.connection import Connection

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_barrier, "_LISTEN_SECS", 0.05)
    monkeypatch.setattr(interrupted_steps, "_SETTLE_SECS", 60.0)


def powers(mode: str, params: Any, context: Any) -> Any:
    """Give worker i the gradient 3 * 2^i, for ever: the mean of up to three is exact."""
    return None if mode == "eval" else dataset_of(np.float32([3 * 2.0**context.input_pipeline_id])).repeat()


def slow_powers(secs: float) -> Any:
    """Give ``powers``, each after a time: it is what steps wait for, so a job lasts as long as its steps say."""

    def wait(x: Any) -> Any:
        time.sleep(secs)
        return x

    def slowly(x: Any, y: Any) -> Any:
        return {"x": tf.ensure_shape(tf.numpy_function(wait, [x["x"]], tf.float32), [])}, y

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        dataset = powers(mode, params, context)
        return dataset and dataset.map(slowly)

    return input_fn


TWINS = ("left", "right")


def twins(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model of two variables, on two PS if there are two, whose gradients are its feature."""
    weights = [tf.get_variable(name, [4], initializer=tf.zeros_initializer()) for name in TWINS]
    loss = tf.reduce_sum(tf.add_n(weights) * features["x"])
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


class Caller:
    """A task beside a job's that sees its state."""

    def __init__(self, num_ps: int, num_workers: int) -> None:
        with tf.Graph().as_default() as graph:
            self._state = job_state.JobState(cluster_of(num_ps, num_workers), 0)
            with tf.device("/job:ps/task:0"):
                begun = tokens.shared_variable("tfps/begun_0")
                self._begun, self._begin = begun.read_value(), begun.assign_add(1, read_value=False)
                self._end = begun.assign_sub(1, read_value=False)
            self._session = tf.Session(target_of(Task("ps", 0)), graph=graph, config=session_config("/job:ps"))

    def wait_until_released(self, generation: int) -> None:
        """Wait until the workers go on in a generation."""
        wait_until(
            lambda: self._state.is_up(self._session) and self._state.restart_state(self._session).released == generation
        )

    def wait_for_a_step(self) -> None:
        """Wait until the workers have begun another update."""
        before = self._session.run(self._begun)
        wait_until(lambda: self._session.run(self._begun) > before)

    def begin_an_update(self) -> None:
        """Count an update as begun that is not."""
        self._session.run(self._begin)

    def end_the_update(self) -> None:
        """Count it no more."""
        self._session.run(self._end)

    def call(self) -> None:
        """Call the workers together."""
        self._state.request_restart(self._session)


@pytest.mark.parametrize(("num_ps", "num_workers", "steps_per_run"), [(1, 1, 1), (2, 3, 4)])
def test_called_together_they_lose_no_step(tmp_path: Path, num_ps: int, num_workers: int, steps_per_run: int) -> None:
    """Broken off in its steps and begun anew four times, a job has made exactly its updates, each the exact mean."""
    steps = 800
    flags = {"mode": "sync", "max_steps": steps, "steps_per_run": steps_per_run, "model_dir": str(tmp_path)}
    with job(model_of(slow_powers(0.005), twins), num_ps, num_workers, **flags) as running:
        caller = Caller(num_ps, num_workers)
        for generation in range(4):
            caller.wait_until_released(generation)
            caller.wait_for_a_step()
            caller.call()
        caller.wait_until_released(4)
        assert not running.ended, "the job was over before it was called"
        assert_done(running.wait())
    mean = 3 * (2**num_workers - 1) / num_workers
    saved = variables_of(tmp_path)
    assert saved["global_step"] == steps
    assert saved["left"].tolist() == saved["right"].tolist() == [-steps * mean] * 4
    reported = summary(tmp_path)
    assert [reported["tasks"][f"worker/{i}"]["steps"] for i in range(num_workers)] == [steps] * num_workers
    assert reported["gradients_dropped"] is None


@pytest.mark.parametrize("steps_per_run", [1, 4])
def test_called_while_they_wait_for_input_they_lose_none_of_it(tmp_path: Path, steps_per_run: int) -> None:
    """A step that is broken off while it waits for a batch does not end the input, as it does TensorFlow's iterator."""
    steps = 40
    flags = {"mode": "sync", "max_steps": steps, "steps_per_run": steps_per_run, "model_dir": str(tmp_path)}
    with job(model_of(slow_powers(0.05), linear), 1, 1, **flags) as running:
        caller = Caller(1, 1)
        for generation in range(3):
            caller.wait_until_released(generation)
            time.sleep(0.2)
            caller.call()
        assert_done(running.wait())
    assert variables_of(tmp_path) == {"weight": -steps * 3.0, "global_step": steps}


def test_variables_of_two_steps_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an update was begun and not ended, no worker goes on: every task leaves, to begin from a checkpoint."""
    monkeypatch.setattr(interrupted_steps, "_SETTLE_SECS", 0.1)
    with job(model_of(powers, linear), 1, 2, mode="sync", max_steps=10**6, model_dir=str(tmp_path)) as running:
        caller = Caller(1, 2)
        caller.wait_until_released(0)
        caller.begin_an_update()
        caller.call()
        wait_until(lambda: {"ps/0", "worker/0"} <= set(running.ended))
        assert isinstance(running.ended["ps/0"], PeerLostError)
        assert "the chief was lost in the middle of an update" in str(running.ended["worker/0"])


class _ByHand:
    """One worker's graph of a sync job, and a session, for a test that takes its steps by hand."""

    def __init__(self, num_ps: int = 1, num_workers: int = 2, model_fn: Any = linear) -> None:
        config, cluster, model = JobConfig(mode="sync"), cluster_of(num_ps, num_workers), model_of(powers, model_fn)
        self.built = builder.training(config, cluster, Task("worker", 0), model)
        with self.built.graph.as_default():
            self.session = self.session_of_its_own()
            self._chief = chief.Chief(config, cluster, model, self.built, self.connection())
            for op in (tf.global_variables_initializer(), self.built.iterator.initializer):
                self.session.run(op)
        operations = self.built.graph.get_operations()
        token = next(op for op in operations if op.type == "QueueDequeueV2" and op.control_inputs)
        self.push = token.control_inputs
        self.tokens = [op for op in operations if op.type == "QueueDequeueV2" and not op.control_inputs]
        queues = {op.inputs[0] for op in operations if op.type == "QueueDequeueV2"}
        with self.built.graph.as_default():
            self.unblock = [
                tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(7, tf.int64)]) for queue in queues
            ]

    def session_of_its_own(self) -> Any:
        """Return another session on the graph."""
        config = session_config("/job:ps", "/job:worker/task:0")
        return tf.Session(target_of(Task("worker", 0)), graph=self.built.graph, config=config)

    def connection(self) -> Connection:
        """Return a connection to a server of the test."""
        connection = Connection(self.built.graph)
        connection.set_target(target_of(Task("worker", 0)), session_config("/job:ps", "/job:worker/task:0"))
        return connection

    def ask(self, op: Any, feeds: Any = None) -> threading.Thread:
        """Run an operation that waits, in a session of its own, as one that is lost later."""
        session = self.session_of_its_own()

        def wait() -> None:
            with contextlib.suppress(tf.errors.InvalidArgumentError):  # a generation that is over
                session.run(op, feeds)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    def begin(self, generation: int, updates: bool = False) -> None:
        """Begin a generation, without updates in the background."""
        if not updates:
            object.__setattr__(self.built, "updates", None)
        self._chief.release_workers(self.session, generation)

    def comes_to_rest(self) -> bool:
        """Return whether the chief finds all variables of one step, and has ended the updates."""
        return self._chief.settle_update(self.session)

    def held(self) -> list[int]:
        """Return what the accumulator, the two queues of tokens, and the two of ``meeting`` hold."""
        return list(self.session.run(self.built.step.recovery.counts))


def test_what_broken_off_steps_have_left_is_cleared() -> None:
    """Gradients and tokens of before are gone, and one that arrives late, with a stamp of before, is dropped."""
    with shared_servers():
        worker = _ByHand()
        worker.begin(0)
        worker.session.run(worker.built.step.worker_init)
        worker.session.run(worker.push)
        worker.session.run(worker.unblock)
        assert worker.held() == [1] * 5
        worker.begin(1)
        assert worker.held() == [0] * 5
        worker.session.run(worker.push)  # its stamp is still that of before
        assert worker.held() == [0] * 5
        worker.session.run(worker.built.step.worker_init)
        worker.session.run(worker.push)
        assert worker.held() == [1, 0, 0, 0, 0]


def test_what_a_lost_worker_still_waits_for_takes_nothing() -> None:
    """What was asked for before, by tasks that a PS does not know to be lost, is not given away.

    That is a mean, and an element of each queue. The update that waited with the chief that is gone changes nothing.
    """
    with shared_servers():
        worker = _ByHand()
        update, now = worker.built.step.update, {worker.built.step.recovery.generation: 0}
        worker.begin(0)
        worker.session.run(worker.built.step.worker_init)
        worker.session.run(worker.push)
        asked = [worker.ask(update, now) for _ in range(3)] + [
            worker.ask(token) for token in worker.tokens for _ in "12"
        ]
        time.sleep(0.5)
        assert [one.is_alive() for one in asked] == [True] * 11
        worker.begin(1)
        wait_until(lambda: not any(one.is_alive() for one in asked))
        assert worker.held() == [0] * 5
        assert not worker.session.run(worker.built.step.recovery.partially_applied)
        assert worker.session.run([worker.built.global_step, "weight/Read/ReadVariableOp:0"]) == [0, 0]
        worker.session.run(worker.built.step.worker_init)
        worker.session.run(worker.push)
        assert worker.held() == [1, 0, 0, 0, 0]


def test_training_has_ended_with_the_last_step_or_an_input() -> None:
    """Then all workers have to know, whoever starts again."""
    with shared_servers():
        worker = _ByHand()
        ended, step = worker.built.step.ended, worker.built.global_step
        with worker.built.graph.as_default():
            last = step.assign(JobConfig().max_steps, read_value=False)
            close = worker.built.step.give_back(0)
        assert not worker.session.run(ended)
        worker.session.run(last)
        assert worker.session.run(ended)
        worker.session.run(step.initializer)
        assert not worker.session.run(ended)
        worker.session.run(close)
        assert worker.session.run(ended)


class _OnTwoPs(_ByHand):
    """A sync job of one worker whose two variables are on two PS, in its first generation."""

    def __init__(self, updates: bool = False) -> None:
        super().__init__(num_ps=2, num_workers=1, model_fn=twins)
        operations = self.built.graph.get_operations()
        applied = [op for op in operations if op.type == "ResourceAccumulatorApplyGradient"]
        self.pushes = {op.device[-1]: op for op in applied if "/finite/" in op.inputs[2].name}
        self.begin(0, updates)
        self.session.run(self.built.step.worker_init)

    def has(self) -> list[Any]:
        """Return the step, and the first number of each variable."""
        self.session.run(self.built.store)
        step, *weights = self.session.run([self.built.global_step, *map("{}/Read/ReadVariableOp:0".format, TWINS)])
        return [step, *(weight[0] for weight in weights)]


def test_an_update_begins_on_all_ps_or_on_none() -> None:
    """While one of two PS lacks a gradient, as of a worker lost in the middle of its push, the other changes nothing.

    When it has come, both do.
    """
    with shared_servers():
        worker = _OnTwoPs()
        recovery = worker.built.step.recovery
        worker.session.run(worker.pushes["0"])
        asked = worker.ask(worker.built.step.update, {recovery.generation: 0})
        time.sleep(0.5)
        assert worker.has() == [0, 0, 0]
        assert not worker.session.run(recovery.partially_applied)
        assert asked.is_alive()
        worker.session.run(worker.pushes["1"])
        wait_until(lambda: not asked.is_alive())
        assert worker.has() == [1, -3, -3]


def test_an_update_that_has_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are of one step when it has ended; where it does not end, they are of no use."""
    with shared_servers():
        worker, caller, ended = _OnTwoPs(), Caller(2, 1), threading.Event()
        caller.begin_an_update()
        ends = threading.Timer(0.5, lambda: (ended.set(), caller.end_the_update()))
        ends.start()
        assert worker.comes_to_rest()
        assert ended.is_set()
        ends.join()
        monkeypatch.setattr(interrupted_steps, "_SETTLE_SECS", 0.1)
        caller.begin_an_update()
        assert not worker.comes_to_rest()


def test_no_update_begins_at_rest() -> None:
    """Once updates are ended, one that has all it needs changes nothing, on any PS, until the next generation."""
    with shared_servers():
        worker = _OnTwoPs(updates=True)
        assert worker.comes_to_rest()
        worker.session.run([*worker.pushes.values()])
        time.sleep(0.3)
        assert worker.has() == [0, 0, 0]
        worker.begin(1, updates=True)
        worker.session.run(worker.built.step.worker_init)
        worker.session.run([*worker.pushes.values()])
        wait_until(lambda: worker.has() == [1, -3, -3])


@pytest.mark.parametrize(("status", "stays"), [("failed", False), ("done", True)])
def test_a_chief_that_takes_over_claims_its_run_and_leaves_no_old_summary(
    tmp_path: Path, status: str, stays: bool
) -> None:
    """The directory may come later, and is then claimed for that run; what a lost chief wrote is out of date."""
    config = JobConfig(model_dir=str(tmp_path), max_steps=3)
    (tmp_path / "summary.json").write_text(f'{{"status": "{status}"}}')
    cluster, model = Cluster(("a:1",), ("b:1",)), model_of(powers, linear)
    built = builder.training(config, cluster, Task("worker", 0), model)
    with built.graph.as_default():
        successor = chief.Chief(config, cluster, model, built, Connection(built.graph))
    run = {"id": "a run", "owner": "a job", "layout": built.layout, "step": 0}
    with (
        mock.patch.object(successor.owner, "claim") as claim,
        mock.patch.object(successor, "global_step", return_value=2),
    ):
        successor.take_over(mock.Mock(), json.dumps(run))
    claim.assert_called_once_with("a job", "a run")
    assert (tmp_path / "summary.json").exists() is stays
    assert json.loads((tmp_path / "job.json").read_text())["run"] == "a run"


class _LateState:
    """A job whose restart has been requested, and in which one worker never arrives."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def arrive(self, session: Any) -> int:
        """Arrive in the requested generation."""
        del session
        return 1

    def restart_state_reader(self, session: Any) -> Any:
        """Return what reads that this worker and no other has arrived."""
        del session
        return lambda: RestartState(1, 0, [1, 0], [Phase.RUNNING, Phase.RUNNING])

    def beats(self, session: Any) -> Any:
        """Return nothing that is called."""
        del session

    def release(self, session: Any, generation: int) -> None:
        """Note it."""
        del session
        self.released.append(generation)


@pytest.mark.parametrize("is_chief", [True, False])
def test_nobody_waits_for_others_when_training_has_ended(is_chief: bool) -> None:
    """Neither a chief for workers that are gone, nor a worker for a chief that has only its last duties left."""
    state, calls = _LateState(), mock.Mock()
    calls.settle_update.return_value = True
    session = SimpleNamespace(make_callable=lambda fetch: lambda: fetch == "ended")

    def wait_until(condition: Any) -> None:
        assert condition(), "it would wait for ever"

    ahead: Any = object()
    waiting = RestartBarrier(state, calls if is_chief else None, True, wait_until, ahead, "ended")  # type: ignore[arg-type]
    waiting.begin(session)
    assert waiting.over
    assert not calls.release_workers.called
    assert (calls.settle_update.called, state.released) == (is_chief, [1] * is_chief)
