"""Processes as /proc shows them; signals that are proven to have arrived.

The harness is the first process of a namespace of its own: every other process in it was started by the harness, at
whatever depth, and none can hide.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PROOF_SECS = 5.0
_GONE = (None, "Z", "X")


class NotInjectedError(Exception):
    """A fault did not happen as meant: the run proves nothing."""


def every() -> set[int]:
    """Return all processes that run, but for this one."""
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()} - {os.getpid()}
    return {pid for pid in pids if alive(pid)}


def state(pid: int) -> str | None:
    """Return a process' state as one letter of proc(5), ``None`` if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def alive(pid: int) -> bool:
    """Return whether a process runs, or would if it were let."""
    return state(pid) not in _GONE


def holder(path: Path) -> int | None:
    """Return the newest process that holds a file open: a task is known by its log, however it was started."""
    found = [pid for pid in every() if _holds(pid, str(path.resolve()))]
    return max(found, key=_started, default=None)


def _holds(pid: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == path:
                    return True
    return False


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return -1


def resident_mb(pid: int) -> float:
    """Return the memory that a process has in use, in 10^6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def kill(pids: Collection[int]) -> None:
    """Kill processes with SIGKILL.

    Raises:
        NotInjectedError: If one did not run, or still runs after that.
    """
    for pid in pids:
        if not alive(pid):
            raise NotInjectedError(f"process {pid} was dead before it was killed")
    for pid in pids:
        send(pid, signal.SIGKILL)
    _prove(lambda: not any(alive(pid) for pid in pids), "it lived on after SIGKILL")


def stop(pid: int) -> None:
    """Freeze a process with SIGSTOP, all its threads; raises ``NotInjectedError`` if one of them goes on."""
    send(pid, signal.SIGSTOP)
    _prove(lambda: _thread_states(pid) == {"T"}, f"process {pid} is in states {_thread_states(pid)} after SIGSTOP")


def go_on(pid: int) -> None:
    """Let a frozen process go on; nothing if it was killed meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        send(pid, signal.SIGCONT)


def send(pid: int, number: int) -> None:
    """Send a signal."""
    os.kill(pid, number)


def _thread_states(pid: int) -> set[str | None]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {None}
    return {state(int(thread)) for thread in threads} - {"Z"}


def _prove(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _PROOF_SECS
    while not holds():
        if time.monotonic() > deadline:
            raise NotInjectedError(otherwise)
        time.sleep(0.005)


def wait_gone(pids: Collection[int], secs: float) -> set[int]:
    """Wait until processes have ended; returns those that have not after ``secs``."""
    deadline = time.monotonic() + secs
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end(pids: Collection[int]) -> None:
    """Kill whatever runs of some processes, frozen or not, and bury the orphans among them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)
    wait_gone(pids, _PROOF_SECS)
    for pid in pids:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(pid, os.WNOHANG)
