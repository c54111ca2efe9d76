"""When and how often a lost task is restarted: a budget, and pauses that double until a process lasts.

A task that ends with ``PeerLostError`` soon after the loss of another restarts almost immediately, and this does not
use its budget. In a separate container, a task's supervisor does not see the losses of others. There the task's lines
decide: a task that had begun to train was not the first to be lost. Pure except for the clock.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tfps.cluster.spec import Task
from tfps.errors import ClusterFormError, PeerLostError, RetryableError
from tfps.timeouts import LONGEST_RESTART_PAUSE_SECS

_PAUSE_SECS = 1.0
_FOLLOWS_SECS, _SHORT_PAUSE_SECS = 30.0, 0.2
_MAX_IN_VAIN = 3  # so many ends with 170 in a row, before the task trains again, belong to one loss of another task
_MAX_UNFORMED = 2  # tries of --start_timeout_secs in which the cluster has not formed
_LASTED_SECS = 30.0  # the loss of a process that lived longer was not caused by its start


@dataclass(frozen=True)
class Grant:
    """Permission to start a task again.

    Attributes:
        used: The part of its budget that is now used; ``None`` if the restart is free, because others were lost.
        budget: The maximum number of restarts.
    """

    used: int | None
    budget: int


class RestartPolicy:
    """The tasks of a job that are between two processes.

    Args:
        tasks: All tasks of the job.
        budget: The maximum number of restarts of each.

    Attributes:
        counts: Number of restarts of each task.
        used: The part of its budget that each task has used.
    """

    def __init__(self, tasks: Collection[Task], budget: int) -> None:
        self.counts: dict[Task, int] = dict.fromkeys(tasks, 0)
        self.used: dict[Task, int] = dict.fromkeys(tasks, 0)
        self.budget = budget
        self._lost_at: dict[Task, float] = {}  # tasks whose restart was not free, and when they were lost
        self._began: dict[Task, float] = {}
        self._in_a_row: dict[Task, int] = {}
        self._due: dict[Task, tuple[float, int]] = {}  # when, and the last process's exit code
        self._unformed: Counter[Task] = Counter()  # processes in a row in which the cluster did not form

    def __bool__(self) -> bool:
        """Return whether any task waits for its restart."""
        return bool(self._due)

    def __contains__(self, task: Task) -> bool:
        """Return whether a task waits for its restart."""
        return task in self._due

    def began(self, task: Task) -> None:
        """Record the start of a process of a task."""
        self._began[task] = time.monotonic()

    def grant(self, task: Task, code: int) -> Grant | None:
        """Schedule a restart of a task whose process has ended, if that may help and the budget allows it.

        Args:
            task: The task.
            code: Its exit code, or the negative number of a signal.

        Returns:
            The cost of the restart; ``None`` if there is none.
        """
        self._unformed[task] = self._unformed[task] + 1 if code == ClusterFormError.exit_code else 0
        if 0 <= code < RetryableError.exit_code or self._unformed[task] >= _MAX_UNFORMED:
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
        """Return whether a task lost its peer because another task was lost shortly before."""
        since = time.monotonic() - _FOLLOWS_SECS
        return any(at > since for other, at in self._lost_at.items() if other != task)

    def _pause(self, task: Task) -> float:
        lasted = time.monotonic() - self._began[task] > _LASTED_SECS
        row = self._in_a_row[task] = 0 if lasted else self._in_a_row.get(task, -1) + 1
        return min(_PAUSE_SECS * 2.0**row, LONGEST_RESTART_PAUSE_SECS)

    def recall(self, task: Task) -> None:
        """Schedule a restart of a task that was done, because others were lost; it is free."""
        self.counts[task] += 1
        self._due[task] = time.monotonic() + _SHORT_PAUSE_SECS, 0

    def due(self) -> Iterator[Task]:
        """Yield the tasks to start now, each just before its start; in between, a signal may give up the others."""
        for task in [task for task, (when, _) in self._due.items() if time.monotonic() >= when]:
            if self._due.pop(task, None):
                yield task

    def give_up(self) -> dict[Task, int]:
        """Cancel all restarts that are not due yet; return the exit codes of those tasks."""
        given_up, self._due = {task: code for task, (_, code) in self._due.items()}, {}
        return given_up


class Alone(RestartPolicy):
    """The policy for the only task of a supervisor, which does not see the losses of others.

    The first three 170s in a row after the task has trained, or after the start, are free: others that have yet to
    leave may cause several. A cluster that does not form within ``--start_timeout_secs`` is tried twice, whatever
    else happens in between.

    Attributes:
        has_trained: Whether the current process, or the last one if none runs, has begun to train.
    """

    def __init__(self, task: Task, budget: int) -> None:
        super().__init__([task], budget)
        self._in_vain = self._never_formed = 0
        self.has_trained = False

    def trained(self) -> None:
        """Record that the task trains, or serves tasks that do."""
        self._in_vain = self._never_formed = 0
        self._unformed.clear()
        self.has_trained = True

    def began(self, task: Task) -> None:
        """Record the start of a process of the task."""
        super().began(task)
        self.has_trained = False

    def grant(self, task: Task, code: int) -> Grant | None:
        """Schedule a restart of the task, like ``RestartPolicy``, unless the cluster has failed to form twice."""
        self._never_formed += code == ClusterFormError.exit_code
        if code == ClusterFormError.exit_code and self._never_formed >= _MAX_UNFORMED:
            return None
        return super().grant(task, code)

    def _follows_others(self, task: Task) -> bool:  # noqa: ARG002  the only task
        self._in_vain += 1
        return self._in_vain <= _MAX_IN_VAIN
