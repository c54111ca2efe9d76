"""What happens to a job as it runs, for those who follow it: what its launcher knows, and what its tasks say.

A launcher tells what it knows as data; ``text`` is the same as a line for people. What a task says is a ``LogLine``,
whatever it looks like: no line of a task is taken for what a launcher knows.
"""

import signal
from dataclasses import dataclass

from tfps.cluster.resolver import Task


@dataclass(frozen=True)
class LogLine:
    """A line that a task said."""

    task: Task
    text: str


@dataclass(frozen=True)
class TaskRestarted:
    """A task has ended, and is started again.

    Attributes:
        task: The task.
        reason: How it ended: ``SIGKILL``, ``exit code 170``, ``the loss of ps/0``; empty if nobody knows.
        used: How much of its budget of restarts is used with this one; ``None`` if it costs nothing.
        budget: How often it may be started again.
        because: Why it costs nothing, in words.
        count: How often it was started again so far, where a platform counts instead of a budget.

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
        """The line that is shown."""
        after = f" after {self.reason}" if self.reason else ""
        spent = "" if self.used is None else f" ({self.used} of {self.budget})"
        because = f", {self.because}" if self.because else ""
        count = "" if self.count is None else f", the {self.count}. time"
        return f"restarted{after}{spent}{because}{count}"


@dataclass(frozen=True)
class TaskStalled:
    """A task has given no sign of life for ``secs`` seconds, and is killed."""

    task: Task
    secs: float

    @property
    def text(self) -> str:
        """The line that is shown."""
        return f"stalled: no sign of life for {self.secs:.0f} s, killed"


@dataclass(frozen=True)
class TaskExited:
    """A task has ended for good.

    Attributes:
        task: The task.
        exit_code: Its exit code; negative for a signal.
        error: Why that is a failure, where the task itself could not say so.
    """

    task: Task
    exit_code: int
    error: str = ""


@dataclass(frozen=True)
class Note:
    """What the launcher itself does now."""

    text: str


JobEvent = LogLine | TaskRestarted | TaskStalled | TaskExited | Note


def how_it_ended(code: int) -> str:
    """Return an exit code in words: ``SIGKILL`` of a negative one, ``exit code 170``."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
