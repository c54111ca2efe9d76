"""The protocol by which the tasks of a job agree on its beginning and its end, step by step, on real servers."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import (
    dataset_of,
    linear,
    meet_patiently,
    model_of,
    session_config,
    shared_servers,
    target_of,
    wait_until,
)
from support.listeners import Speaker

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import DataError, PeerLostError, StoppedError
from tfps.runtime.coordination import job_state, job_variables, state_reader
from tfps.runtime.coordination.job_state import Phase, WorkerTotals
from tfps.runtime.coordination.state_reader import JobStateReader
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.process import shutdown as stopping
from tfps.runtime.process.shutdown import StopRequest, run_supervised
from tfps.runtime.training import parameter_server, peer_monitor
from tfps.runtime.training.worker import Worker

STOP = StoppedError("stopped by SIGTERM")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which a task that does not answer counts as gone."""
    for module, name, secs in (
        (parameter_server, "_PROBE_EVERY_SECS", 0.1),
        (parameter_server, "_GONE_AFTER_SECS", 0.3),
        (peer_monitor, "_LOST_AFTER_SECS", 0.3),
        (peer_monitor, "REPLACED_AFTER_SECS", 0.3),
        (stopping, "_LOOK_SECS", 0.1),
    ):
        monkeypatch.setattr(module, name, secs)


class Job:
    """PS that serve, and workers that are ports which say who they are, with their side of the state."""

    def __init__(self, stack: contextlib.ExitStack, num_ps: int, num_workers: int) -> None:
        self._stack = stack
        self.workers = [stack.enter_context(contextlib.closing(Speaker(Task("worker", i)))) for i in range(num_workers)]
        hosts = [target_of(Task("ps", i)).removeprefix("grpc://") for i in range(num_ps)]
        self.cluster = Cluster(tuple(hosts), tuple(worker.address for worker in self.workers))
        self.stop = StopRequest()
        self.ended: dict[int, BaseException | None] = {}
        self.states = [self._side(worker) for worker in range(num_workers)]

    def _side(self, worker: int) -> tuple[job_state.JobState, tf.Session]:
        with tf.Graph().as_default() as graph:
            state = job_state.JobState(self.cluster, worker)
            return state, tf.Session(target_of(Task("ps", 0)), graph=graph, config=session_config("/job:ps"))

    def serve(self, patience_secs: float = 10.0) -> None:
        """Start the PS, and wait until they have set up their state."""
        config = JobConfig(max_steps=5, start_timeout_secs=patience_secs)
        for index in range(self.cluster.num_ps):
            threading.Thread(target=self._serve, args=(config, index), daemon=True).start()
        state, session = self.states[0]
        wait_until(lambda: state.is_up(session))

    def _serve(self, config: JobConfig, index: int) -> None:
        try:
            parameter_server.serve(config, self.cluster, Task("ps", index), self.stop)
            self.ended[index] = None
        except BaseException as error:
            self.ended[index] = error

    def write(self, worker: int, phase: int, steps: int = 0) -> None:
        """Let a worker tell its phase."""
        state, session = self.states[worker]
        state.write(session, phase, WorkerTotals(steps))

    def vanish(self, worker: int) -> None:
        """Let a worker not answer any more."""
        self.workers[worker].close()

    def freeze(self, worker: int) -> None:
        """Let a worker be reached, and say nothing."""
        address = self.workers[worker].server_address
        self.workers[worker].close()
        self.frozen = self._stack.enter_context(socket.create_server(address))

    def still_serves(self, secs: float) -> bool:
        """Return whether every PS serves for some time to come."""
        time.sleep(secs)
        return not self.ended

    def end(self) -> list[BaseException | None]:
        """Return what the PS ended with, which they do without being asked."""
        wait_until(lambda: len(self.ended) == self.cluster.num_ps, 60)
        return list(self.ended.values())


@contextlib.contextmanager
def a_job(num_ps: int = 1, num_workers: int = 3) -> Iterator[Job]:
    """Yield a job whose PS do not serve yet."""
    with shared_servers(), contextlib.ExitStack() as stack:
        yield Job(stack, num_ps, num_workers)


def test_nothing_is_up_before_every_ps_has_set_up_its_state() -> None:
    """Workers see that a server answers but its PS is not ready: also where only the second of two is missing."""
    with a_job(num_ps=2) as job:
        state, session = job.states[1]
        assert not state.is_up(session)
        with tf.Graph().as_default(), tf.Session(target_of(Task("ps", 0))) as first:
            first.run(job_variables.all_variables(job.cluster, 0, "")[0])
        assert not state.is_up(session)
        job.serve()
        assert state.is_up(session)
        assert state.read(session) == ([Phase.RUNNING] * 3, [0] * 3)
        assert not state.is_ready(session)


def test_the_chief_makes_the_job_ready() -> None:
    """What the chief sets, the others see."""
    with a_job(num_ps=2) as job:
        job.serve()
        job.states[0][0].release(job.states[0][1])
        assert all(state.is_ready(session) for state, session in job.states)


def test_each_worker_writes_its_own_phase_on_every_ps() -> None:
    """A phase and a count of steps change for one worker only, and on all PS."""
    with a_job(num_ps=2) as job:
        job.serve()
        job.write(1, Phase.DONE, 7)
        job.write(2, Phase.STOPPED, 2**40)
        for state, session in job.states:
            assert state.read(session) == ([Phase.RUNNING, Phase.DONE, Phase.STOPPED], [0, 7, 2**40])
        with tf.Graph().as_default(), tf.Session(target_of(Task("ps", 1))) as session:
            second = job_variables.ps_variables(job.cluster, 1)
            np.testing.assert_array_equal(session.run(second.phase), [Phase.RUNNING, Phase.DONE, Phase.STOPPED])


def test_the_later_totals_of_a_worker_count() -> None:
    """They are those of its last heartbeat, or those that it wrote with its phase; other workers keep theirs."""
    with a_job() as job:
        job.serve()
        state, session = job.states[1]
        state.heartbeat_writer(session)(WorkerPace(7, 20, 0.0, 3.5, 2, 6, 48))
        assert state.totals(session) == [WorkerTotals(), WorkerTotals(7, 2, 3.5, 6, 48), WorkerTotals()]
        assert state.beats(session)()[1] == WorkerPace(7, 20, 0.0, 3.5, 2, 6, 48)
        state.write(session, Phase.STOPPED, WorkerTotals(9, 4, 4.5, 8, 64))
        assert state.totals(session)[1] == WorkerTotals(9, 4, 4.5, 8, 64)
        state.write(session, Phase.RUNNING, WorkerTotals())
        assert state.totals(session)[1] == WorkerTotals(7, 2, 3.5, 6, 48)


@pytest.mark.parametrize("ahead_secs", [0.0, 3600.0, -3600.0])
def test_how_long_ago_a_step_was_depends_on_no_other_clock(monkeypatch: pytest.MonkeyPatch, ahead_secs: float) -> None:
    """A worker whose clock differs took its last step 100 s ago; who has taken none tells no time."""
    really = time.time
    monkeypatch.setattr(state_reader, "_PATIENCE_SECS", 100.0)
    with a_job() as job:
        job.serve()
        (its, its_session), (own, own_session) = job.states[1], job.states[0]
        monkeypatch.setattr(job_state.time, "time", lambda: really() + ahead_secs)
        began = really()
        its.heartbeat_writer(its_session)(WorkerPace(7, 20, really() + ahead_secs - 100.0))
        monkeypatch.setattr(job_state.time, "time", lambda: really() - ahead_secs)
        reader = JobStateReader(lambda: contextlib.nullcontext(own_session), own, None)
        beats = reader.beats()
        secs = really() - ahead_secs - beats[1].when
        assert 100 - 1e-3 < secs < 100 + 1e-3 + really() - began
        assert [beats[0].when, beats[2].when] == [0.0, 0.0]


def test_a_ps_ends_when_every_worker_is_done() -> None:
    """A PS serves as long as one worker is not DONE, be it the chief, and ends well within a moment of the last."""
    with a_job(num_ps=2) as job:
        job.serve()
        job.write(1, Phase.DONE)
        job.write(2, Phase.DONE)
        assert job.still_serves(0.7)
        job.write(0, Phase.DONE)
        assert job.end() == [None, None]


def test_what_an_earlier_job_left_is_forgotten() -> None:
    """A PS that starts where workers of an earlier job are DONE does not take that for this job's end."""
    with a_job(num_workers=2) as job:
        for _ in range(2):
            job.ended.clear()
            job.serve()
            wait_until(lambda: job.states[0][0].read(job.states[0][1])[0] == [Phase.RUNNING, Phase.RUNNING])
            assert job.still_serves(0.3)
            job.write(0, Phase.DONE)
            job.write(1, Phase.DONE)
            assert job.end() == [None]


def test_a_worker_lost_after_the_chief_was_done_keeps_no_ps() -> None:
    """With the chief DONE, a worker that neither signs off nor answers is not waited for."""
    with a_job() as job:
        job.serve(patience_secs=1000.0)
        job.write(0, Phase.DONE)
        job.write(1, Phase.DONE)
        assert job.still_serves(0.7)  # it answers: it may be slow
        job.vanish(2)
        assert job.end() == [None]


def test_a_worker_frozen_after_the_chief_was_done_keeps_no_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes calls for it: it is asked who it is, and is not waited for when it has not said so for long."""
    monkeypatch.setattr(parameter_server, "_FROZEN_AFTER_SECS", 1.0)
    with a_job() as job:
        job.serve(patience_secs=1000.0)
        job.write(0, Phase.DONE)
        job.write(1, Phase.DONE)
        assert job.still_serves(1.5)  # it says who it is: it may be slow
        job.freeze(2)
        assert job.end() == [None]


def test_a_lost_worker_does_not_end_a_ps_that_others_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the chief being DONE, a PS serves while any worker answers, and gives up when none has for a while."""
    meet_patiently(monkeypatch)
    caplog.set_level(logging.INFO, "tfps")
    with a_job() as job:
        job.serve(patience_secs=1.0)
        wait_until(lambda: "serving 3 workers" in caplog.text)
        job.vanish(0)
        job.vanish(2)
        assert job.still_serves(1.5)
        job.vanish(1)
        (error,) = job.end()
    assert isinstance(error, PeerLostError)
    assert str(error) == "no worker has answered for 1 s: giving up on the job. See the workers' logs."


def test_a_ps_that_is_asked_to_stop_lets_the_workers_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop, a PS serves on while a worker runs, and ends with 143 when all have left."""
    monkeypatch.setattr(parameter_server, "PS_GRACE_SECS", 1000.0)
    with a_job() as job:
        job.serve()
        job.stop.request(STOP)
        job.write(1, Phase.DONE)
        job.write(2, Phase.STOPPED)
        assert job.still_serves(0.7)
        job.write(0, Phase.STOPPED)
        assert job.end() == [STOP]


def test_a_ps_lets_the_others_save_when_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to stop after a worker has failed, a PS serves until the others have left, and ends with that failure."""
    monkeypatch.setattr(parameter_server, "_LAST_WORDS_SECS", 0.1)
    monkeypatch.setattr(parameter_server, "PS_GRACE_SECS", 1000.0)
    with a_job() as job:
        job.serve()
        job.stop.request(STOP)
        job.write(1, -DataError.exit_code)
        job.vanish(1)
        assert job.still_serves(2)
        job.write(0, Phase.STOPPED)
        assert job.still_serves(0.7)
        job.write(2, Phase.STOPPED)
        (error,) = job.end()
    assert isinstance(error, DataError)


def test_a_ps_that_is_asked_to_stop_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop, a PS gives workers that do not leave their time, and those that are gone hardly any."""
    monkeypatch.setattr(parameter_server, "PS_GRACE_SECS", 1.0)
    with a_job() as job:
        job.serve()
        began = time.monotonic()
        job.stop.request(STOP)
        assert job.end() == [STOP]
        assert time.monotonic() - began >= 1.0
    monkeypatch.setattr(parameter_server, "PS_GRACE_SECS", 1000.0)
    with a_job() as job:
        job.serve(patience_secs=1000.0)
        for worker in range(3):
            job.vanish(worker)
        job.stop.request(STOP)
        assert job.end() == [STOP]


def test_stopped_workers_alone_end_no_ps() -> None:
    """Workers that were stopped may come back: a PS that nobody has stopped serves on while they answer."""
    with a_job(num_workers=2) as job:
        job.serve()
        job.write(0, Phase.STOPPED)
        job.write(1, Phase.STOPPED)
        assert job.still_serves(0.6)


def test_a_worker_does_not_wait_for_a_chief_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief that ends before the variables have their values (a bad checkpoint, say): the others name it and end."""
    meet_patiently(monkeypatch)
    ended: list[BaseException] = []
    with a_job(num_workers=2) as job:
        job.serve()
        stop, ones = StopRequest(), model_of(lambda *_: dataset_of(np.float32([1])).repeat(), linear)
        worker = Worker(JobConfig(max_steps=5, start_timeout_secs=3), job.cluster, Task("worker", 1), ones, stop)

        def work() -> None:
            try:
                run_supervised(worker.work, stop, worker.watch)
            except BaseException as error:
                ended.append(error)

        threading.Thread(target=work, daemon=True).start()
        state, session = job.states[1]
        wait_until(lambda: state.marked(session) == [True])  # it has joined, and waits for the chief
        assert not ended
        job.vanish(0)
        wait_until(lambda: ended)
    assert isinstance(ended[0], PeerLostError)
    assert "lost worker/0" in str(ended[0])


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("/job:worker/replica:0/task:1", False),
        ("/job:worker/replica:0/task:10", None),
        ("/job:ps/replica:0/task:1", None),
    ],
)
def test_a_worker_that_is_not_found_is_no_ps_that_was_lost(target: str, found: bool | None) -> None:
    """While a PS looks for the worker's new address the worker waits; if the PS itself is gone, it does not."""

    class Broken:
        def run(self, *_: object) -> None:
            text = f"Socket closed\nAdditional GRPC error information from remote target {target} while calling x"
            raise tf.errors.UnavailableError(None, None, text)

    with tf.Graph().as_default():
        state = job_state.JobState(Cluster(("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:3", "127.0.0.1:4")), 1)
    if found is None:
        with pytest.raises(tf.errors.UnavailableError):
            state.is_found(Broken())
    else:
        assert state.is_found(Broken()) == found
