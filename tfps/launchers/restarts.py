"""When a lost task is started again, and how often: a budget, and pauses that double while it does not last.

Pure but for the clock.
"""

import time
from collections.abc import Iterable

from tfps.cluster import Task
from tfps.errors import RetryableError

_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 10.0  # in sync others wait for 20 s
_LASTED_SECS = 30.0  # a process that has lived so long was not lost by what it was started for


class Restarts:
    """The tasks of a job that are between two processes.

    Args:
        tasks: All of the job's.
        budget: How often each may be started again.

    Attributes:
        counts: How often each was started again.
    """

    def __init__(self, tasks: Iterable[Task], budget: int) -> None:
        self.counts: dict[Task, int] = dict.fromkeys(tasks, 0)
        self.budget = budget
        self._began: dict[Task, float] = {}
        self._in_a_row: dict[Task, int] = {}
        self._due: dict[Task, tuple[float, int]] = {}  # when, and the last process's exit code

    def __bool__(self) -> bool:
        """Tell whether any task is yet to be started again."""
        return bool(self._due)

    def __contains__(self, task: Task) -> bool:
        """Tell whether a task is yet to be started again."""
        return task in self._due

    def began(self, task: Task) -> None:
        """Note that a process of a task has been started."""
        self._began[task] = time.monotonic()

    def is_granted(self, task: Task, code: int) -> bool:
        """Let a task whose process has ended be started again, if that may help and it was not too often."""
        if 0 <= code < RetryableError.exit_code or self.counts[task] >= self.budget:
            return False
        self.counts[task] += 1
        lasted = time.monotonic() - self._began[task] > _LASTED_SECS
        self._in_a_row[task] = row = 0 if lasted else self._in_a_row.get(task, -1) + 1
        self._due[task] = time.monotonic() + min(_PAUSE_SECS * 2**row, _LONGEST_PAUSE_SECS), code
        return True

    def recall(self, task: Task) -> None:
        """Let a task that was done be started again, as others were lost; that costs it nothing."""
        self._due[task] = time.monotonic() + _PAUSE_SECS, 0

    def due(self) -> list[Task]:
        """Return the tasks to be started now, each once."""
        found = [task for task, (when, _) in self._due.items() if time.monotonic() >= when]
        return [task for task in found if self._due.pop(task, None)]  # a signal may have taken it away

    def give_up(self) -> dict[Task, int]:
        """Start nothing again that is not due yet; returns the exit codes of those tasks."""
        given_up, self._due = {task: code for task, (_, code) in self._due.items()}, {}
        return given_up
