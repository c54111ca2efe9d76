"""The events of a running job, for its followers: facts from its launcher, and lines from its tasks.

A launcher reports its facts as data; ``text`` is the same fact as a line for people. Each line of a task is a
``LogLine``, even if it looks like another event: no line of a task is mistaken for a fact from the launcher.
"""

import signal
from dataclasses import dataclass

from tfps.cluster.spec import Task
from tfps.text import ordinal


@dataclass(frozen=True)
class LogLine:
    """A line that a task printed."""

    task: Task
    text: str


@dataclass(frozen=True)
class TaskRestarted:
    """A task has ended and is started again.

    Attributes:
        task: The task.
        reason: How it ended: ``SIGKILL``, ``exit code 170``, ``the loss of ps/0``; empty if unknown.
        used: The part of its restart budget that is now used; ``None`` if this restart is free.
        budget: The maximum number of restarts.
        because: Why the restart is free, in words.
        count: Number of restarts so far, on a platform that has a count instead of a budget.

    Example::

        >>> TaskRestarted(Task("worker", 0), "SIGKILL", used=1, budget=5).text
        'restarted after SIGKILL (1 of 5)'
    """

    task: Task
    reason: str = ""
    used: int | None = None
    budget: int | None = None
    because: str = ""
    count: int | None = None

    @property
    def text(self) -> str:
        """The line to show."""
        after = f" after {self.reason}" if self.reason else ""
        spent = "" if self.used is None else f" ({self.used} of {self.budget})"
        because = f", {self.because}" if self.because else ""
        count = "" if self.count is None else f", the {ordinal(self.count)} time"
        return f"restarted{after}{spent}{because}{count}"


@dataclass(frozen=True)
class TaskStalled:
    """A task is killed because it has given no sign of life for ``secs`` seconds."""

    task: Task
    secs: float

    @property
    def text(self) -> str:
        """The line to show."""
        return f"stalled: no sign of life for {self.secs:.0f} s, killed"


@dataclass(frozen=True)
class TaskExited:
    """A task has ended and is not started again.

    Attributes:
        task: The task.
        exit_code: Its exit code; negative for a signal.
        error: Why the exit is a failure, where the task itself could not report that.
    """

    task: Task
    exit_code: int
    error: str = ""


@dataclass(frozen=True)
class Note:
    """A note about what the launcher does now."""

    text: str


JobEvent = LogLine | TaskRestarted | TaskStalled | TaskExited | Note


def how_it_ended(code: int) -> str:
    """Return an exit code in words: ``SIGKILL`` for a negative code, else ``exit code 170``."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
