"""What launchers know of a job's tasks, as the lines that are shown."""

import pytest

from tfps.cluster.spec import Task
from tfps.jobs.events import TaskRestarted, TaskStalled, how_it_ended

WORKER = Task("worker", 0)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (TaskRestarted(WORKER, "SIGKILL", 1, 5), "restarted after SIGKILL (1 of 5)"),
        (TaskRestarted(WORKER, "the loss of ps/1"), "restarted after the loss of ps/1"),
        (
            TaskRestarted(WORKER, "exit code 170", None, 5, "as others were lost"),
            "restarted after exit code 170, as others were lost",
        ),
        (TaskRestarted(WORKER, "exit code 137", count=2), "restarted after exit code 137, the 2nd time"),
        (TaskRestarted(WORKER, count=1), "restarted, the 1st time"),
        (TaskStalled(WORKER, 15.0), "stalled: no sign of life for 15 s, killed"),
    ],
)
def test_events_as_lines(event: TaskRestarted | TaskStalled, text: str) -> None:
    """Each has the line that launch has always shown."""
    assert event.text == text


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (170, "exit code 170"), (-9, "SIGKILL"), (-35, "signal 35")]
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    """A negative code is a signal, by its name if it has one."""
    assert how_it_ended(code) == words
