"""What a worker that watches the others says of them."""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.cluster import dataset_of, job, linear, meet_patiently, model_of, ones, wait_until
from support.listeners import Speaker, address_of, listener

from tfps.cluster import rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ClusterFormError, PeerLostError, StallError
from tfps.modes.asynchronous import AsyncMode
from tfps.modes.synchronous import SyncMode
from tfps.runtime import task as tasks
from tfps.runtime.coordination import heartbeat, state_reader
from tfps.runtime.coordination.state_reader import JobStateReader
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.process import shutdown
from tfps.runtime.training import peer_monitor
from tfps.runtime.training.peer_monitor import PeerMonitor
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker_progress import Progress

CHIEF = Task("worker", 0)
LINEAR = model_of(lambda *_: dataset_of([1.0]), linear)


class FakeReader:
    """Returns fixed values in place of those on the PS."""

    def __init__(
        self, ahead: Sequence[int] = (), beats: Sequence[WorkerPace] = (), awaited: Sequence[int] = ()
    ) -> None:
        self.ahead, self.beats, self.phases, self.awaited = (lambda: ahead), (lambda: beats), list, lambda: awaited
        self.are_ps_up = lambda: False


def watch_of(cluster: Cluster, reader: FakeReader, **flags: float) -> PeerMonitor:
    """Return a chief's watch of a sync job."""
    return PeerMonitor(JobConfig(**flags), cluster, CHIEF, SyncMode(), reader)  # type: ignore[arg-type]


def test_a_ps_that_stands_still_is_lost_although_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel still takes calls for a process that is stopped: who says nothing for so long is lost, and named."""
    monkeypatch.setattr(peer_monitor, "MUTE_AFTER_SECS", 0.3)
    with listener() as standing, contextlib.closing(Speaker(Task("ps", 0))) as speaks:
        cluster = Cluster((speaks.address, address_of(standing)), ("127.0.0.1:1",))
        watched = watch_of(cluster, FakeReader())
        assert watched.error(None, False) is None
        time.sleep(0.4)
        error = watched.error(None, False)
    assert isinstance(error, PeerLostError)
    assert str(error) == "lost ps/1: it is reachable but has not answered for 0.3 s."


def test_a_worker_that_has_only_skipped_batches_tells_no_time() -> None:
    """It has taken no step, so that of its last one is not known."""
    assert Progress(skipped=2).beat().when == 0.0
    assert Progress(steps=1, last_step=time.monotonic()).beat().when > 0.0


@pytest.mark.parametrize(
    ("ahead", "behind", "awaited"),
    [
        ([1, 0, 0], [], ": waiting for worker/1 (last step 119, 45 s ago), worker/2 (no step yet)"),
        ([1, 1, 0], [], ": waiting for worker/2 (no step yet)"),
        ([1, 1, -3], [], ": waiting for worker/2 (no step yet)"),
        ([0, 0, 1], [], ""),  # it is this one that others wait for
        ([], [], ""),
        ([], [1], ": waiting for worker/1 (last step 119, 45 s ago)"),  # in ssp
    ],
)
def test_who_waits_tells_for_whom_and_since_when(
    monkeypatch: pytest.MonkeyPatch, ahead: list[int], behind: list[int], awaited: str
) -> None:
    """A worker that has handed over its part names those that have not, with their last steps."""
    now = time.time()
    monkeypatch.setattr(peer_monitor, "time", SimpleNamespace(time=lambda: now))
    beats = [WorkerPace(7, 120, now), WorkerPace(7, 119, now - 45), WorkerPace(0, 0, 0.0)]
    with contextlib.ExitStack() as stack:
        names = [Task("ps", 0), CHIEF, Task("worker", 1), Task("worker", 2)]
        there = [stack.enter_context(contextlib.closing(Speaker(name))).address for name in names]
        watched = watch_of(
            Cluster((there[0],), tuple(there[1:])), FakeReader(ahead, beats, behind), stall_timeout_secs=0.1
        )
        progress = Progress(steps=7, global_step=120)
        assert watched.error(progress, True) is None
        time.sleep(0.3)
        error = watched.error(progress, True)
    assert isinstance(error, StallError)
    assert f"the last was 120{awaited}: see the stacks in the task's log" in str(error)


@pytest.mark.parametrize(
    ("ahead", "awaited"),
    [
        ([1, 1, 1], ": waiting for what the other workers send (do all of them reach each other?)"),
        ([0, 1, 1], ""),  # it has not computed its own part
    ],
)
def test_workers_without_ps_that_all_have_their_parts_wait_for_the_exchange(ahead: list[int], awaited: str) -> None:
    """None of them is behind: something between two of them is in the way."""
    with contextlib.ExitStack() as stack:
        names = [CHIEF, Task("worker", 1), Task("worker", 2)]
        there = [stack.enter_context(contextlib.closing(Speaker(name))).address for name in names]
        watched = watch_of(Cluster((), tuple(there)), FakeReader(ahead), stall_timeout_secs=0.1)
        progress = Progress(steps=7, global_step=120)
        assert watched.error(progress, True) is None
        time.sleep(0.3)
        error = watched.error(progress, True)
    assert f"the last was 120{awaited}: see the stacks in the task's log" in str(error)


def test_a_ps_that_answers_on_its_connections_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections may fail for a reason of this host's own, and training needs none."""
    monkeypatch.setattr(peer_monitor, "_LOST_AFTER_SECS", 0.2)
    reader = FakeReader()
    watched = watch_of(Cluster(("127.0.0.1:1",), ("127.0.0.1:2",)), reader)
    assert watched.error(None, False) is None
    time.sleep(0.3)
    reader.are_ps_up = lambda: True
    assert watched.error(None, False) is None
    reader.are_ps_up = lambda: False
    assert str(watched.error(None, False)) == "lost ps/0: no answer for 0.2 s."


def test_a_chief_in_the_place_of_the_ps_is_lost_when_its_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may wait for others alone, and hear nothing of it. One that cannot be reached may be back."""
    monkeypatch.setattr(peer_monitor, "_ENDED_AFTER_SECS", 0.2)
    monkeypatch.setattr(peer_monitor.rendezvous, "missing", lambda _, tasks: list(tasks))
    with listener() as reached:
        for address, error in [("127.0.0.1:1", "lost worker/0: no answer for 0.2 s."), (address_of(reached), "None")]:
            cluster = Cluster((), (address, "127.0.0.1:2"))
            watched = PeerMonitor(JobConfig(), cluster, Task("worker", 1), AsyncMode(), FakeReader())  # type: ignore[arg-type]
            assert watched.error(None, False) is None
            time.sleep(0.3)
            assert str(watched._any_ended_chief()) == error


def test_a_job_needs_no_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """While none can be opened to any PS, the workers ask on those that they have, and go on."""
    monkeypatch.setattr(peer_monitor, "_LOST_AFTER_SECS", 0.2)
    monkeypatch.setattr(shutdown, "_LOOK_SECS", 0.1)
    monkeypatch.setattr(state_reader, "_PATIENCE_SECS", 100.0)
    monkeypatch.setattr(heartbeat, "_HEARD_SECS", 100.0)
    asked, really, lost = list[bool](), JobStateReader.are_ps_up, threading.Event()
    run, missing = Loop.run, rendezvous.missing

    def are_ps_up(self: JobStateReader) -> bool:
        asked.append(really(self))
        return asked[-1]

    def cut_off(cluster: Cluster, tasks: Sequence[Task]) -> list[Task]:
        absent = missing(cluster, tasks)
        return [task for task in tasks if task in absent or (lost.is_set() and task.job == "ps")]

    monkeypatch.setattr(JobStateReader, "are_ps_up", are_ps_up)
    monkeypatch.setattr(rendezvous, "missing", cut_off)
    monkeypatch.setattr(Loop, "run", lambda loop: (lost.set(), run(loop)))
    with job(model_of(ones, linear), num_ps=2, max_steps=10**9) as running:
        wait_until(lambda: len(asked) > 5 or running.ended)
        assert running.ended == {}
        assert all(asked)  # while the job runs: at its end the PS go, and a question that was open gets no answer


@pytest.mark.parametrize("began", [True, False])
def test_a_worker_that_the_ps_hear_is_not_lost(monkeypatch: pytest.MonkeyPatch, began: bool) -> None:
    """Who cannot be reached from here, but gives signs of life on the PS, is no reason to end."""
    monkeypatch.setattr(peer_monitor, "REPLACED_AFTER_SECS", 0.2)
    silent_secs, progress = {1: 0.0}, Progress(steps=1) if began else None
    with contextlib.closing(Speaker(Task("ps", 0))) as ps:
        cluster = Cluster((ps.address,), ("127.0.0.1:1", "127.0.0.1:2"))
        config, reader = JobConfig(start_timeout_secs=0.2), FakeReader()
        reader.phases = lambda: [0, 0]  # type: ignore[assignment]
        watched = PeerMonitor(config, cluster, CHIEF, SyncMode(), reader, silent_secs.__getitem__)  # type: ignore[arg-type]
        assert watched.error(progress, False) is None
        time.sleep(0.4)
        assert watched.error(progress, False) is None
        assert not watched.are_gone([Task("worker", 1)], 0.2)
        silent_secs[1] = 5.0
        assert str(watched.error(progress, False)) == "lost worker/1: no answer for 0.2 s."
        assert (watched.error(progress, False, needs_others=False) is None) == began, "its last duties need no worker"
        assert watched.are_gone([Task("worker", 1)], 0.2)


def test_lost_workers_can_be_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One backup worker: one of the others may be lost, not two, nor the chief."""
    monkeypatch.setattr(peer_monitor, "REPLACED_AFTER_SECS", 0.2)
    silent_secs, progress = {0: 0.0, 1: 5.0, 2: 0.0}, Progress(steps=1)
    with contextlib.closing(Speaker(Task("ps", 0))) as ps:
        cluster = Cluster((ps.address,), ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"))
        config, reader = JobConfig(mode="sync", backup_workers=1), FakeReader()
        reader.phases = lambda: [0, 0, 0]  # type: ignore[assignment]
        watches = [
            PeerMonitor(config, cluster, Task("worker", me), SyncMode(), reader, silent_secs.__getitem__)  # type: ignore[arg-type]
            for me in (0, 2)
        ]
        assert [watched.error(progress, True) for watched in watches] == [None, None]
        time.sleep(0.4)
        assert [watched.error(progress, True) for watched in watches] == [None, None]
        assert [watches[0].can_spare(workers) for workers in ([], [1], [2], [1, 2])] == [True, True, False, False]
        silent_secs[2] = 5.0
        assert not watches[0].can_spare([1, 2])
        assert str(watches[0].error(progress, True)) == "lost worker/1, worker/2: no answer for 0.2 s."
        silent_secs[0], silent_secs[1] = 5.0, 0.0
        assert str(watches[1].error(progress, True)) == "lost worker/0: no answer for 0.2 s."


def test_a_frozen_worker_is_not_waited_for_in_the_end(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """The kernel takes calls for it, but the PS hear nothing: it is named, and gone after ``stall_timeout_secs``."""
    caplog.set_level(logging.INFO, "tfps")
    monkeypatch.setattr(peer_monitor, "_REPORT_AFTER_SECS", 0.1)
    silent_secs, now, clock = {1: 0.1}, 1e9, [0.0]
    monkeypatch.setattr(peer_monitor, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: clock[0]))
    with listener() as standing, contextlib.closing(Speaker(Task("ps", 0))) as ps:
        cluster = Cluster((ps.address,), ("127.0.0.1:1", address_of(standing)))
        reader = FakeReader(beats=[WorkerPace(7, 120, now), WorkerPace(7, 119, now - 45)])
        config, waited_for = JobConfig(stall_timeout_secs=5.0), [Task("worker", 1)]
        watched = PeerMonitor(config, cluster, CHIEF, AsyncMode(), reader, silent_secs.__getitem__)  # type: ignore[arg-type]
        assert not watched.are_gone(waited_for, 0.2)
        clock[0] += 0.2
        assert not watched.are_gone(waited_for, 0.2)
        silent_secs[1] = 6.0
        assert watched.are_gone(waited_for, 0.2)
        assert not watched.are_gone(waited_for, 60.0), "a replacement that has just started has that time, too"
    assert caplog.messages == ["waiting: for worker/1 (last step 119, 45 s ago) to end"]


def test_a_ps_of_another_release_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PS that is there, but never sets up what the tasks agree on: every worker ends with 171, and says so."""
    meet_patiently(monkeypatch)
    with mock.patch.object(tasks, "_ps"), job(LINEAR, start_timeout_secs=1.0) as running:
        wait_until(lambda: {"worker/0", "worker/1"} <= set(running.ended))
    for worker in ("worker/0", "worker/1"):
        assert isinstance(running.ended[worker], ClusterFormError)
        assert "a PS answers but has not set up the job's state in 1 s" in str(running.ended[worker])
