"""Watching a submitted job: events are made of what its platform is asked, whatever the platform does meanwhile."""

import time
from collections.abc import Iterator

import pytest

from tfps.cluster.spec import Task
from tfps.errors import PlatformError
from tfps.jobs import poller
from tfps.jobs.events import LogLine, TaskExited, TaskRestarted
from tfps.jobs.handle import Status, TaskStatus
from tfps.jobs.poller import JobPoller

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)
RUNNING = Status("RUNNING", {PS: TaskStatus("RUNNING"), CHIEF: TaskStatus("RUNNING")})


class Scripted:
    """A job whose platform answers as told, the last answer again and again; an exception is raised."""

    handle = "scripted:1"

    def __init__(self, *answers: Status | PlatformError, lines: tuple[LogLine, ...] = ()) -> None:
        self.answers, self.lines, self.cancelled = list(answers), lines, False

    def status(self) -> Status:
        """Give the next answer."""
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, PlatformError):
            raise answer
        return answer

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Say the lines."""
        assert (task, follow) == (None, True)
        yield from self.lines

    def cancel(self) -> None:
        """Note that it was called."""
        self.cancelled = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "_ASK_EVERY_SECS", 0.05)
    monkeypatch.setattr(poller, "PLATFORM_SILENT_SECS", 0.5)


def happened(job: Scripted) -> list[LogLine | TaskExited]:
    """Return the events of a job."""
    return [event for event in JobPoller(job).events() if event is not None]


def ended(state: str, ps: TaskStatus, chief: TaskStatus) -> Status:
    """Return the answer of a platform on which the job is over."""
    return Status(state, {PS: ps, CHIEF: chief})


def test_lines_come_before_the_ends() -> None:
    """All that the tasks said is reported, then how each ended."""
    done = TaskStatus("SUCCEEDED", 0)
    lines = (LogLine(PS, "done"), LogLine(CHIEF, "step=5 loss=1"))
    assert happened(Scripted(RUNNING, ended("SUCCEEDED", done, done), lines=lines)) == [
        *lines,
        TaskExited(PS, 0),
        TaskExited(CHIEF, 0),
    ]


@pytest.mark.parametrize(
    ("state", "chief", "code"),
    [
        ("FAILED", TaskStatus("FAILED", 66), 66),
        ("FAILED", TaskStatus("FAILED"), 170),
        ("FAILED", TaskStatus("SUCCEEDED"), 0),
        ("CANCELLED", TaskStatus("CANCELLED"), 143),
        ("CANCELLED", TaskStatus("FAILED", 143), 143),
        ("CANCELLED", TaskStatus("RUNNING", 137, restarts=1), 143),
        ("SUCCEEDED", TaskStatus("UNKNOWN", 137), 0),
    ],
)
def test_exit_codes(state: str, chief: TaskStatus, code: int) -> None:
    """A task's exit code is what the platform says, or what its and the job's state mean."""
    events = happened(Scripted(ended(state, TaskStatus("SUCCEEDED", 0), chief)))
    assert set(events) == {TaskExited(PS, 0), TaskExited(CHIEF, code)}


@pytest.mark.parametrize(("cause", "follows"), [(66, 170), (66, 137), (137, 170), (170, 143), (171, 0)])
def test_the_cause_is_reported_first(cause: int, follows: int) -> None:
    """Of the exit codes of a failed job the one that explains the others comes first, as the job ends with it."""
    for order in ((cause, follows), (follows, cause)):
        events = happened(Scripted(ended("FAILED", *(TaskStatus("FAILED", code) for code in order))))
        assert [event.exit_code for event in events if isinstance(event, TaskExited)] == [cause, follows]


@pytest.mark.parametrize("code", [77, 137, 170, 171, 172])
def test_a_ps_that_was_told_is_not_the_cause(code: int) -> None:
    """A worker has failed for good, the PS repeats that, and another worker still runs: the job ends as the first."""
    known = {
        PS: TaskStatus("FAILED", 67),
        CHIEF: TaskStatus("RUNNING"),
        Task("worker", 1): TaskStatus("FAILED", code),
    }
    first, *_ = happened(Scripted(Status("FAILED", known)))
    assert first == TaskExited(Task("worker", 1), code)


@pytest.mark.parametrize(
    ("said", "ps", "worker", "first"),
    [
        ("error: worker/1 has failed with exit code 137.", 67, TaskStatus("RUNNING", restarts=1), (WORKER, 137)),
        ("error: worker/1 has failed with exit code 77.", 67, TaskStatus("FAILED"), (WORKER, 77)),
        ("error: worker/1 has failed with exit code 77.", 67, TaskStatus("FAILED", 139), (WORKER, 139)),
        ("error: worker/1 has failed with exit code 77.", 2, TaskStatus("RUNNING"), (PS, 2)),
        ("error: worker/7 has failed with exit code 77.", 67, TaskStatus("RUNNING"), (PS, 67)),
        ("bye", 67, TaskStatus("RUNNING"), (PS, 67)),
        ("bye", 67, TaskStatus("FAILED"), (WORKER, 170)),
    ],
)
def test_no_worker_that_runs_is_the_cause_but_whom_a_ps_names(
    said: str, ps: int, worker: TaskStatus, first: tuple[Task, int]
) -> None:
    """A PS ends before the worker that told it, or that worker is started again: the PS's own line names it."""
    known = {PS: TaskStatus("FAILED", ps), CHIEF: TaskStatus("RUNNING"), WORKER: worker}
    events = happened(Scripted(Status("FAILED", known), lines=(LogLine(PS, said),)))
    assert events[:2] == [LogLine(PS, said), TaskExited(*first)]


def test_restarts_are_reported_once() -> None:
    """Each time the platform has started a task again, it is reported, with the exit code."""
    again = Status("RUNNING", {PS: TaskStatus("RUNNING"), CHIEF: TaskStatus("RUNNING", 137, restarts=1)})
    done = ended("SUCCEEDED", TaskStatus("SUCCEEDED", 0), TaskStatus("SUCCEEDED", 0, restarts=1))
    events = happened(Scripted(RUNNING, again, again, done))
    assert [event for event in events if not isinstance(event, TaskExited)] == [
        TaskRestarted(CHIEF, "exit code 137", count=1)
    ]


def test_a_platform_may_be_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few questions without an answer end nothing; no answer for long is raised, in the platform's words."""
    away, done = PlatformError("connection refused"), TaskStatus("SUCCEEDED", 0)
    monkeypatch.setattr(poller, "PLATFORM_SILENT_SECS", 60.0)
    assert len(happened(Scripted(RUNNING, away, away, ended("SUCCEEDED", done, done)))) == 2
    monkeypatch.setattr(poller, "PLATFORM_SILENT_SECS", 0.5)
    with pytest.raises(PlatformError, match="connection refused"):
        happened(Scripted(RUNNING, away))


def test_to_cancel_is_to_look_away() -> None:
    """The job goes on when nobody watches it any more."""
    job = Scripted(RUNNING)
    watching = JobPoller(job)
    events = watching.events()
    next(events)
    watching.cancel()
    began = time.monotonic()
    assert [event for event in events if event is not None] == []
    assert time.monotonic() - began < 60
    assert watching.left
    assert not job.cancelled


def test_why_a_job_waits_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused pods, an image that cannot be pulled: a line says why, and another one only if that changes."""
    monkeypatch.setattr(poller, "_LAST_LINES_SECS", 0.1)
    waits = [Status("PENDING", {PS: TaskStatus("PENDING"), CHIEF: TaskStatus("PENDING")}, why) for why in "aaba"]
    over = ended("SUCCEEDED", TaskStatus("SUCCEEDED", 0), TaskStatus("SUCCEEDED", 0))
    reported = [event.text for event in happened(Scripted(*waits, RUNNING, over)) if isinstance(event, LogLine)]
    assert reported == ["waiting: a", "waiting: b", "waiting: a"]
