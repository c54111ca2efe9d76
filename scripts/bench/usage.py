"""What the processes of a run cost: CPU seconds and peak memory by role, from /proc, ten times a second.

A process counts for the role of the task that it descends from, unless its own title says more (Ray's actors).
"""

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_EVERY_SECS = 0.1
_TICK_SECS = 1 / os.sysconf("SC_CLK_TCK")
_RAY_WORKER = b"ray::DataWorker"


@dataclass(frozen=True)
class Sample:
    """One look: when (Unix time, seconds), CPU seconds by role so far, and peak megabytes of a process by role."""

    time: float
    cpu_secs: Mapping[str, float]
    peak_mb: Mapping[str, float]


class Sampler:
    """Looks at the processes of a run until stopped.

    Args:
        roots: Role by process id.
    """

    def __init__(self, roots: Mapping[int, str]) -> None:
        self._roots, self._stopped = roots, threading.Event()
        self._samples: list[Sample] = []
        self._known: dict[tuple[int, str], tuple[str, float, float]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; end what descends from the tasks and is left over."""
        self._stopped.set()
        self._thread.join()
        for pid, started in self._known:
            if _started(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cpu_secs(self, since: float, until: float) -> dict[str, float]:
        """Return CPU seconds by role between two times."""
        times = [sample.time for sample in self._samples]
        roles = {role for sample in self._samples for role in sample.cpu_secs}
        spent = {}
        for role in roles:
            used = [sample.cpu_secs.get(role, 0.0) for sample in self._samples]
            at_start, at_end = np.interp([since, until], times, used)
            spent[role] = float(at_end - at_start)
        return spent

    def peak_mb(self, until: float) -> Mapping[str, float]:
        """Return the peak memory of the largest process of each role by a time, in 10^6 bytes."""
        return next((sample.peak_mb for sample in reversed(self._samples) if sample.time <= until), {})

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_SECS):
            self._look()

    def _look(self) -> None:
        now, pending = time.time(), list(self._roots.items())
        while pending:
            pid, role = pending.pop()
            with contextlib.suppress(OSError, ValueError, IndexError):
                pending += [(child, role) for child in _children(pid)]
                fields = _stat(pid)
                secs = (int(fields[11]) + int(fields[12])) * _TICK_SECS
                self._known[pid, fields[19]] = _role(pid, role), secs, _peak_mb(pid)
        self._samples.append(_summed(now, self._known))


def _summed(now: float, known: Mapping[tuple[int, str], tuple[str, float, float]]) -> Sample:
    cpu: dict[str, float] = defaultdict(float)
    peak: dict[str, float] = defaultdict(float)
    for role, secs, mb in known.values():
        cpu[role] += secs
        peak[role] = max(peak[role], mb)
    return Sample(now, dict(cpu), dict(peak))


def _children(pid: int) -> list[int]:
    """Return the children that any thread of a process has."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text().split()]


def _stat(pid: int) -> list[str]:
    """Return a process' fields from the third, its state, on: proc(5) counts from 1."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _started(pid: int) -> str:
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def _role(pid: int, role: str) -> str:
    """Return a process' role; of Ray's processes, only the actors that compute gradients are workers."""
    if role != "ray":
        return role
    return "worker" if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_RAY_WORKER) else "ps"


def _peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
