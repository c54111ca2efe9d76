"""When a lost task is started again, and how often: a budget, and pauses that double while it does not last.

A task that ends with ``PeerLostError`` soon after another was lost comes back at once, and that costs nothing of its
budget. Where nobody sees the others' losses, as in a container of its own, what a task said tells: one that had come to
train was not lost by itself. Pure but for the clock.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tfps.cluster.resolver import Task
from tfps.errors import ClusterFormError, PeerLostError, RetryableError

_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 10.0  # in sync others wait for 20 s
_FOLLOWS_SECS, _SHORT_PAUSE_SECS = 30.0, 0.2
_MOST_IN_VAIN = 3  # as many ends with 170 in a row, before the task trains again, are of one loss of another task
_MOST_UNFORMED = 2  # tries of --start_timeout_secs in which the cluster has not formed
_LASTED_SECS = 30.0  # a process that has lived so long was not lost by what it was started for


@dataclass(frozen=True)
class Grant:
    """A task may be started again.

    Attributes:
        used: How much of its budget is used with that; ``None`` if it costs nothing, as others were lost.
        budget: How often it may be started again.
    """

    used: int | None
    budget: int


class RestartPolicy:
    """The tasks of a job that are between two processes.

    Args:
        tasks: All of the job's.
        budget: How often each may be started again.

    Attributes:
        counts: How often each was started again.
        used: How much of its budget each has used.
    """

    def __init__(self, tasks: Collection[Task], budget: int) -> None:
        self.counts: dict[Task, int] = dict.fromkeys(tasks, 0)
        self.used: dict[Task, int] = dict.fromkeys(tasks, 0)
        self.budget = budget
        self._lost_at: dict[Task, float] = {}  # who has paid for it, and when
        self._began: dict[Task, float] = {}
        self._in_a_row: dict[Task, int] = {}
        self._due: dict[Task, tuple[float, int]] = {}  # when, and the last process's exit code
        self._unformed: Counter[Task] = Counter()  # processes in a row in which the cluster did not form

    def __bool__(self) -> bool:
        """Return whether any task is yet to be started again."""
        return bool(self._due)

    def __contains__(self, task: Task) -> bool:
        """Return whether a task is yet to be started again."""
        return task in self._due

    def began(self, task: Task) -> None:
        """Note that a process of a task has been started."""
        self._began[task] = time.monotonic()

    def grant(self, task: Task, code: int) -> Grant | None:
        """Let a task whose process has ended be started again, if that may help and it was not too often.

        Args:
            task: The task.
            code: Its exit code; minus a signal's number.

        Returns:
            What it costs; ``None`` if it is not started again.
        """
        self._unformed[task] = self._unformed[task] + 1 if code == ClusterFormError.exit_code else 0
        if 0 <= code < RetryableError.exit_code or self._unformed[task] >= _MOST_UNFORMED:
            return None
        free = code == PeerLostError.exit_code and self._follows_others(task)
        if self.used[task] >= self.budget and not free:
            return None
        self.counts[task] += 1
        self._due[task] = time.monotonic() + (_SHORT_PAUSE_SECS if free else self._pause(task)), code
        if free:
            return Grant(None, self.budget)
        self.used[task], self._lost_at[task] = self.used[task] + 1, time.monotonic()
        return Grant(self.used[task], self.budget)

    def _follows_others(self, task: Task) -> bool:
        """Return whether a task that has lost a peer was not lost by itself."""
        since = time.monotonic() - _FOLLOWS_SECS
        return any(at > since for other, at in self._lost_at.items() if other != task)

    def _pause(self, task: Task) -> float:
        lasted = time.monotonic() - self._began[task] > _LASTED_SECS
        row = self._in_a_row[task] = 0 if lasted else self._in_a_row.get(task, -1) + 1
        return min(_PAUSE_SECS * 2.0**row, _LONGEST_PAUSE_SECS)

    def recall(self, task: Task) -> None:
        """Let a task that was done be started again, as others were lost; that costs it nothing."""
        self.counts[task] += 1
        self._due[task] = time.monotonic() + _SHORT_PAUSE_SECS, 0

    def due(self) -> Iterator[Task]:
        """Yield the tasks to be started now, each just before it is; a signal may give up the others meanwhile."""
        for task in [task for task, (when, _) in self._due.items() if time.monotonic() >= when]:
            if self._due.pop(task, None):
                yield task

    def give_up(self) -> dict[Task, int]:
        """Start nothing again that is not due yet; returns the exit codes of those tasks."""
        given_up, self._due = {task: code for task, (_, code) in self._due.items()}, {}
        return given_up


class Alone(RestartPolicy):
    """The one task that a process supervises, which sees no other's loss.

    A 170 costs nothing if the task had trained since its start, nor do the next few, in which it meets others that are
    yet to leave. A cluster that does not form within ``--start_timeout_secs`` is tried twice, whatever else happens in
    between.

    Attributes:
        has_trained: Whether the present process has come to train, or the last one had.
    """

    def __init__(self, task: Task, budget: int) -> None:
        super().__init__([task], budget)
        self._in_vain = self._never_formed = 0
        self.has_trained = False

    def trained(self) -> None:
        """Note that the task trains, or serves those who do."""
        self._in_vain = self._never_formed = 0
        self._unformed.clear()
        self.has_trained = True

    def began(self, task: Task) -> None:
        """Note that a process of the task has been started."""
        super().began(task)
        self.has_trained = False

    def grant(self, task: Task, code: int) -> Grant | None:
        """Let the task be started again, as ``RestartPolicy`` does."""
        self._never_formed += code == ClusterFormError.exit_code
        if code == ClusterFormError.exit_code and self._never_formed >= _MOST_UNFORMED:
            return None
        return super().grant(task, code)

    def _follows_others(self, task: Task) -> bool:  # noqa: ARG002  the only one
        self._in_vain += 1
        return self._in_vain <= _MOST_IN_VAIN
