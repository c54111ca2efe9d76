"""Which process is which, on this machine and among its earlier ones. Linux tells; elsewhere nothing is known."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def machine() -> str:
    """Return what tells the place where process ids count from all others; empty if that is not known."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # it is that of another place
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def moment() -> Mapping[str, Any]:
    """Return the present moment, for ``secs_since`` in another process."""
    return {"machine": machine(), "uptime": time.monotonic(), "time": time.time()}


def secs_since(then: Mapping[str, Any]) -> float:
    """Return for how many seconds a moment is past: on its machine by a clock that nobody sets."""
    here = then["machine"] and then["machine"] == machine()
    return float(time.monotonic() - then["uptime"] if here else time.time() - then["time"])


def started(pid: int) -> str | None:
    """Return when a process was started, in ticks since the machine was; ``None`` if it has ended.

    Empty if it is there, and that is not told: ``/proc`` may hide other users' processes.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if _is_there(pid) else None
    return None if state in "ZX" else fields[18]


def ancestors(pid: int) -> Sequence[int]:
    """Return a process's parent, and that one's: a task's are a fork server and its launcher. Empty if not told."""
    try:
        parent = _parent(pid)
        return parent, _parent(parent) if parent > 1 else 0
    except OSError:
        return ()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lives(pid: int, when: str) -> bool | None:
    """Return whether a process lives that was started then; ``None`` if it is not known."""
    now = started(pid)
    if now is None:
        return False
    return now == when if now and when else None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True
