"""Ends of tasks that the fork server does not report, because it is stopped, or stuck in the kernel.

Only the parent of a process learns its exit code, and the parent of every task is the fork server. If it is stopped,
tasks that have ended stay zombies, and the launcher would wait for them without end.
"""

import os
import time
from pathlib import Path

from tfps.cluster.spec import Task
from tfps.launchers.local.fork_server import ForkServer

_WAKE_AFTER_SECS = 2.0  # an end is late if it was not reported for so long
_KILL_AFTER_SECS = 5.0
_GIVE_UP_AFTER_SECS = 8.0


class SilentEnds:
    """The tasks that have ended, or were killed with all others, but whose end is not reported yet.

    Args:
        server: The fork server.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._since: dict[Task, float] = {}
        self._unsure: dict[Task, int | None] = {}  # process ids of those that may still run

    def closed(self, task: Task, pid: int | None) -> None:
        """Note that the connection of a task has closed: it has ended, or its model has closed all files."""
        self._since.setdefault(task, time.monotonic())
        self._unsure[task] = pid

    def killed(self, task: Task) -> None:
        """Note that a task was killed, with all others."""
        self._since.setdefault(task, time.monotonic())
        self._unsure.pop(task, None)

    def reported(self, task: Task) -> None:
        """Note that the end of a task was reported."""
        self._since.pop(task, None)
        self._unsure.pop(task, None)

    def act(self) -> list[Task]:
        """Wake the fork server if an end is late, or kill it if that has not helped; return the tasks to give up."""
        now = time.monotonic()
        late = {task: now - since for task, since in self._since.items() if now - since > _WAKE_AFTER_SECS}
        late = {task: secs for task, secs in late.items() if task not in self._unsure or _is_over(self._unsure[task])}
        if max(late.values(), default=0.0) > _KILL_AFTER_SECS:
            self._server.kill()
        elif late:
            self._server.wake()
        return [task for task, secs in late.items() if secs > _GIVE_UP_AFTER_SECS]


def put_end_of_file_at(descriptor: int) -> None:
    """Replace the pipe behind a file descriptor by one whose other end is closed."""
    ours, theirs = os.pipe()
    os.close(theirs)
    os.dup2(ours, descriptor, inheritable=False)
    os.close(ours)


def _is_over(pid: int | None) -> bool:
    """Return whether a process has ended, though its parent may not have noticed; ``False`` if the system hides it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return Path("/proc/self/stat").exists()
