"""Which process is which, on this machine and among its earlier ones. Linux tells; elsewhere nothing is known."""

import os
from pathlib import Path


def machine() -> str:
    """Return what tells the place where process ids count from all others; empty if that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """Return when a process was started, in ticks since the machine was; empty if there is none, or it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def lives(pid: int, when: str) -> bool:
    """Tell whether a process lives that was started then."""
    return bool(when) and started(pid) == when
