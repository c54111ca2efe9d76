"""The signs of life of tasks on this machine: which task has stalled, and which has reported that it is done.

A thread in each task writes a byte every second (``task_process``); it stops when the process is stopped, or stuck
where Python cannot run. A task that computes counts as alive even if Python cannot run.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfps.cluster.spec import Task
from tfps.config.launch_protocol import SIGNED_OFF
from tfps.timeouts import STALLED_AFTER_SECS

_BUSY = 0.2  # a task that uses this share of a core is computing


class _Sign(NamedTuple):
    """The last sign of a task: its monotonic time, and the seconds of CPU that the task had used by then."""

    time: float
    cpu_secs: float


class LifeSigns:
    """What the tasks' signs tell.

    Attributes:
        signed_off: The tasks whose current process has reported that it is done.
    """

    def __init__(self) -> None:
        self.signed_off: set[Task] = set()
        self._pids: dict[Task, int | None] = {}
        self._last: dict[Task, _Sign] = {}
        self._checked = time.monotonic()

    def began(self, task: Task, pid: int | None) -> None:
        """Note that a task has a new process, which counts as alive until after its first sign."""
        self._pids[task] = pid
        self.signed_off.discard(task)

    def ended(self, task: Task) -> None:
        """Note that a task's process has ended: no more signs are expected."""
        self._last.pop(task, None)

    def take(self, task: Task, signs: bytes) -> None:
        """Process what a task has written; nothing if it has written nothing."""
        if signs:
            self._last[task] = self._sign(task, time.monotonic())
        if SIGNED_OFF in signs:
            self.signed_off.add(task)

    def stalled(self) -> Sequence[Task]:
        """Return the tasks that have given no sign of life for too long, each only once."""
        now, before = time.monotonic(), self._checked
        self._checked = now
        if now - before > STALLED_AFTER_SECS / 2:  # this process was stopped, not the tasks
            self._last = {task: self._sign(task, now) for task in self._last}
        silent = [task for task, last in self._last.items() if now - last.time > STALLED_AFTER_SECS]
        return [task for task in silent if not self._computes(task, now)]

    def _computes(self, task: Task, now: float) -> bool:
        """Return whether a silent task has computed since its last sign, which counts as a sign; else forget it."""
        before, sign = self._last.pop(task), self._sign(task, now)
        if sign.cpu_secs - before.cpu_secs <= _BUSY * STALLED_AFTER_SECS:
            return False
        self._last[task] = sign
        return True

    def _sign(self, task: Task, now: float) -> _Sign:
        return _Sign(now, _cpu_secs(self._pids[task]))


def _cpu_secs(pid: int | None) -> float:
    """Return the CPU time that a process has used; 0.0 where the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
