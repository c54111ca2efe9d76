"""A chief that is asked to stop in its final evaluation: the PS and ``summary.json`` get the same end."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.cluster import LINEAR, dataset_of, job, linear, model_of, wait_until

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import PeerLostError, StoppedError, TfpsError
from tfps.runtime.checkpoint.ownership import Ownership
from tfps.runtime.coordination import job_state
from tfps.runtime.coordination.job_state import Phase, WorkerTotals
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results import evaluation
from tfps.runtime.training import early_end, joining, summary_writer
from tfps.runtime.training.worker import Worker
from tfps.runtime.training.worker_state import LifeCycle, WorkerState


def input_fn(mode: str, params: Any, context: Any) -> Any:
    """Be an input that does not end but for the evaluation."""
    data = dataset_of(np.ones(4, np.float32))
    return data if mode == "eval" else data.repeat()


def status_of(model_dir: Path) -> str:
    """Return the status that a summary tells."""
    return str(json.loads((model_dir / "summary.json").read_text())["status"])


def test_work_that_ends_after_the_stop_does_not_sign_off_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped first, with its summary yet to be written: the job is not done, and the PS stay for the next chief."""
    write, fail, measure = job_state.JobState.write, Worker.fail, evaluation.measure
    phases, begun, go_on, over = [], threading.Event(), threading.Event(), threading.Event()

    def noted(state: Any, session: Any, phase: int, *rest: Any) -> None:
        write(state, session, phase, *rest)
        phases.append(phase)

    def held_up(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(100)
        return measure(*args)

    def work_to_its_end(self: Worker) -> None:
        try:
            work(self)
        finally:
            over.set()

    def slow(self: Worker, error: TfpsError) -> None:
        go_on.set()
        assert over.wait(100)
        fail(self, error)

    work = Worker.work
    monkeypatch.setattr(evaluation, "measure", held_up)
    monkeypatch.setattr(job_state.JobState, "write", noted)
    monkeypatch.setattr(Worker, "work", work_to_its_end)
    monkeypatch.setattr(Worker, "fail", slow)
    with job(model_of(input_fn, linear), 1, 1, max_steps=8, model_dir=str(tmp_path)) as running:
        assert begun.wait(100)
        running.stop("worker/0")
        wait_until(lambda: "worker/0" in running.ended)
        assert isinstance(running.ended["worker/0"], StoppedError)
        assert "ps/0" not in running.ended
    assert phases[-1] == Phase.STOPPED
    assert Phase.DONE not in phases
    assert status_of(tmp_path) == "stopped"


def test_a_stop_that_comes_as_work_signs_off_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done first, and the sign-off is on its way when the time to end is over: all tasks end well."""
    write, signing, ending = job_state.JobState.write, threading.Event(), threading.Event()
    emergency_save = Worker.emergency_save

    def slow(state: Any, session: Any, phase: int, *rest: Any) -> None:
        if phase == Phase.DONE:
            signing.set()
            assert ending.wait(100)
            time.sleep(0.5)  # for what the main thread does
        write(state, session, phase, *rest)

    def noted(self: Worker) -> None:
        ending.set()
        emergency_save(self)

    monkeypatch.setattr(job_state.JobState, "write", slow)
    monkeypatch.setattr(Worker, "emergency_save", noted)
    monkeypatch.setattr(early_end, "SAVED_WITHIN_SECS", 100.0)
    with job(model_of(input_fn, linear), 1, 1, max_steps=8, model_dir=str(tmp_path)) as running:
        assert signing.wait(100)
        running.stop("worker/0")
        assert running.wait() == {"ps/0": None, "worker/0": None}
    assert status_of(tmp_path) == "done"
    assert not (tmp_path / ".chief").exists()


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_stop_in_a_restart_of_all_does_not_use_the_session_that_this_closes(is_interrupted: bool) -> None:
    """The replacement of a lost worker has just asked for it: the steps since the last save are not lost."""
    parts, loop = mock.MagicMock(), mock.MagicMock()
    old, new = parts.connection.session, mock.MagicMock()
    parts.barrier.interrupted = is_interrupted
    parts.connection.reopen.side_effect = lambda: setattr(parts.connection, "session", new)
    parts.others.any_trains.return_value = False
    early_end.EarlyEnd(parts, loop, StopRequest(), LifeCycle()).sign_off(StoppedError(""))
    parts.chief.save.assert_called_once_with(new if is_interrupted else old)


def test_an_end_that_fails_may_begin_anew() -> None:
    """Work that is called back while it signs off trains on, and may be ended early then, or be done later."""
    life, stop = LifeCycle(), StopRequest()
    with pytest.raises(ValueError, match="called back"), life.signing_off(stop):
        raise ValueError("called back")
    assert (life.state, life.is_done) == (WorkerState.FINISHING, False)
    with life.signing_off(stop):
        assert not life.begin_end(WorkerState.STOPPING)
    assert (life.state, life.is_done) == (WorkerState.DONE, True)


def test_an_end_goes_on_whatever_the_work_does() -> None:
    """The main thread ends a worker early while its work goes on in another thread: it stays so."""
    life, stop = LifeCycle(), StopRequest()
    for state in (WorkerState.CONNECTING, WorkerState.JOINED, WorkerState.TRAINING):
        life.enter(state)
        assert (life.state, life.has_joined) == (state, state is not WorkerState.CONNECTING)
    assert life.begin_end(WorkerState.STOPPING)
    life.enter(WorkerState.FINISHING)
    assert (life.state, life.has_joined) == (WorkerState.STOPPING, True)
    stop.request(StoppedError("stopped by SIGTERM"))
    with pytest.raises(StoppedError), life.signing_off(stop):
        raise AssertionError("the work has signed off, too")
    assert (life.state, life.is_done) == (WorkerState.STOPPING, False)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_chief_that_fails_when_it_was_replaced_writes_no_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """It stood still until its replacement had ended the job, and misses the PS before it looks at the directory."""
    monkeypatch.setattr(Ownership, "_keep", lambda _: None)
    write = mock.Mock()
    monkeypatch.setattr(summary_writer, "write", write)
    cluster, config = Cluster(("a:1",), ("b:1",)), JobConfig(model_dir=str(tmp_path))
    frozen, again = Ownership(config.model_dir, cluster), Ownership(config.model_dir, cluster)
    frozen.claim()
    if is_replaced:
        again.claim(frozen.this_chief.job)
        (tmp_path / "summary.json").write_text('{"status": "done"}')
        again.release()
    worker = Worker(config, cluster, Task("worker", 0), LINEAR, StopRequest())
    worker.parts = mock.Mock(chief=mock.Mock(owner=frozen), **{"totals.return_value": WorkerTotals()})
    worker.fail(PeerLostError("no PS answers"))
    worker.leave()
    assert write.called is not is_replaced


@pytest.mark.parametrize(
    ("looks", "phases"),
    [
        ([True, True], [Phase.FINISHING]),
        ([True, False, True, True], [Phase.FINISHING, Phase.EXHAUSTED, Phase.FINISHING]),
    ],
)
def test_a_chief_finishes_only_when_nobody_has_come_back(looks: Sequence[bool], phases: Sequence[Phase]) -> None:
    """A worker that comes just before is waited for, and so are those that come while it trains."""
    answers, written = iter(looks), list[Phase]()
    chief: Any = SimpleNamespace(_config=JobConfig())
    others = SimpleNamespace(are_through=lambda *_: next(answers), not_done=lambda _: [])
    parts: Any = SimpleNamespace(
        connection=SimpleNamespace(session=None),
        built=SimpleNamespace(step=SimpleNamespace(any_worker_can_finish=True)),
        has_trained_all=lambda _: False,
        is_at_end=lambda: False,
        write_phase=lambda phase, _: written.append(phase),
        others=others,
    )
    Worker._wait_for_others(chief, parts, mock.MagicMock(wait_until=next_true))
    assert written == phases
    assert next(answers, None) is None


def next_true(condition: Callable[[], bool]) -> None:
    """Ask until the answer is yes."""
    while not condition():
        pass


def test_a_worker_that_has_nothing_to_train_keeps_its_fence() -> None:
    """It comes back in the evaluation: what its lost process has sent must not change anything now."""
    for is_over in (True, False):
        session = mock.Mock()
        joining.begin(mock.MagicMock(barrier=mock.Mock(over=is_over)), session)
        assert session.run.called is not is_over
