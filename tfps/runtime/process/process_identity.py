"""Identify processes on this machine, over time and across restarts. Needs Linux; elsewhere nothing is known."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  # when this process started, or the one that forks tasks: TensorFlow is imported later
_NAMESPACES = ("pid", "time")


def machine() -> str:
    """Return an id within which a process id and a start time are unique; empty if unknown.

    It is the boot with the PID namespace and the time namespace, which shifts clocks and the start times of processes.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc belongs to another PID namespace
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES if _has(kind))])
    except OSError:
        return ""


def _has(kind: str) -> bool:
    return os.path.lexists(f"/proc/self/ns/{kind}")  # the kernel may be built without namespaces of this kind


def moment() -> Mapping[str, Any]:
    """Return the current moment, for ``secs_since`` in another process."""
    return {"machine": machine(), "uptime": time.monotonic(), "time": time.time()}


def began() -> Mapping[str, Any]:
    """Return the moment when this process started, or the one that forks tasks, for ``secs_since``."""
    return {"machine": machine(), "uptime": BEGAN, "time": time.time() - (time.monotonic() - BEGAN)}


def secs_since(then: Mapping[str, Any]) -> float:
    """Return the seconds since a moment on this machine, by a clock that nobody can set; infinity for any other."""
    if then["machine"] != machine():
        return math.inf
    return float(time.monotonic() - then["uptime"] if then["machine"] else time.time() - then["time"])


def started(pid: int) -> str | None:
    """Return when a process started, in ticks since the machine did; ``None`` if the process has ended.

    Empty if it exists but its start is unknown, because ``/proc`` may hide other users' processes.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if _is_there(pid) else None
    return None if state in "ZX" else fields[18]


def ancestors(pid: int) -> Sequence[int]:
    """Return a process's parent and grandparent: for a task, fork server and launcher. Empty if unknown."""
    try:
        parent = _parent(pid)
        return parent, _parent(parent) if parent > 1 else 0
    except OSError:
        return ()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lives(pid: int, when: str) -> bool | None:
    """Return whether the process that started at ``when`` is alive; ``None`` if unknown."""
    now = started(pid)
    if now is None:
        return False
    return now == when if now and when else None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True
