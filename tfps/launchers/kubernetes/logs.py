"""Follow the logs of pods: one ``kubectl logs -f`` for each, restarted when it breaks off or a pod is replaced."""

import atexit
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.spec import Task
from tfps.jobs.events import LogLine
from tfps.jobs.handle import Status
from tfps.launchers.kubernetes import status
from tfps.launchers.kubernetes.manifests import Object

MOST = 64  # the most tasks followed at the same time: each takes a process
_LOOK_EVERY_SECS = 2.0
_LAST_LINES_SECS = 5.0  # the longest wait for readers that still run when the job has ended
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL)

_Look = Callable[[], tuple[Status, Mapping[Task, Sequence[Object]]]]
_Command = Callable[[Object], list[str]]


def follow(look: _Look, log: _Command, tasks: Sequence[Task]) -> Iterator[LogLine]:
    """Yield the lines of tasks until their job has ended.

    Args:
        look: Returns the job's status, and the pods of each task, the oldest first.
        log: Returns the command that prints a pod's log.
        tasks: The tasks to follow.

    Raises:
        PlatformError: If the cluster does not answer.
    """
    followed = sorted(tasks, key=lambda task: (task.index, task.job == "ps"))[:MOST]
    if len(followed) < len(tasks):
        yield LogLine(followed[0], f"({MOST} of {len(tasks)} tasks are followed: --task follows another)")
    readers = _Readers(log)
    try:
        ended_at, busy = None, True
        while ended_at is None or (busy and time.monotonic() < ended_at + _LAST_LINES_SECS):
            whole, running = look()
            ended_at = ended_at or (time.monotonic() if whole.ended else None)
            reading = [readers.take(task, running.get(task, ())) for task in followed]
            busy = any(reading)
            yield from readers.said(0.5 if ended_at else _LOOK_EVERY_SECS)
    finally:
        readers.stop()


class _Readers:
    """The readers of pods, at most one for a task."""

    def __init__(self, log: _Command) -> None:
        self._log = log
        self._lines: queue.Queue[LogLine] = queue.Queue()
        self._reading: dict[Task, _Reader] = {}
        self._last: dict[str, _Stamp] = {}  # by pod, the stamp of its last line
        self._read: set[str] = set()  # pods that are read to the end
        atexit.register(self.stop)  # a thread that follows may end with the process before it calls stop

    def take(self, task: Task, found: Sequence[Object]) -> bool:
        """Read the oldest pod of a task that has more to read, unless one is being read; return whether one is."""
        before = self._reading.get(task)
        if before and before.runs:
            return True
        if before:
            self._last[before.uid] = before.last
            self._read |= {before.uid} if before.to_the_end else set()
        for pod in found:
            uid = pod["metadata"]["uid"]
            if uid not in self._read and status.has_started(pod):
                last = self._last.get(uid, _Stamp())
                self._reading[task] = _Reader(task, pod, self._log(pod), last, self._lines)
                return True
        return False

    def said(self, secs: float) -> Iterator[LogLine]:
        """Yield lines that have arrived, or arrive within ``secs``."""
        until = time.monotonic() + secs
        while True:
            try:
                yield self._lines.get(timeout=max(until - time.monotonic(), 0.001))
            except queue.Empty:
                return

    def stop(self) -> None:
        """Stop every reader."""
        atexit.unregister(self.stop)
        for reader in self._reading.values():
            reader.stop()


@dataclass(frozen=True, order=True)
class _Stamp:
    """The time of a line."""

    second: str = ""
    fraction: str = ""
    zone: str = ""

    def __str__(self) -> str:
        return f"{self.second}{self.zone}"


class _Reader:
    """One ``kubectl logs -f``. Time stamps exclude repeated lines, and kubectl's own messages, which have none.

    Attributes:
        uid: The uid of the pod.
        to_the_end: Whether the pod had ended before this began, so that its whole log is read.
        last: The stamp of the last line.
    """

    def __init__(self, task: Task, pod: Object, log: list[str], last: _Stamp, lines: "queue.Queue[LogLine]") -> None:
        self.uid = str(pod["metadata"]["uid"])
        self.to_the_end = status.has_ended(pod)
        self.last = last
        since = [f"--since-time={last}"] if last.second else []
        self._process = subprocess.Popen(
            [*log, "--follow", "--timestamps", *since],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the command that follows the job
        )
        self._thread = threading.Thread(target=self._run, args=(task, lines), daemon=True)
        self._thread.start()

    def _run(self, task: Task, lines: "queue.Queue[LogLine]") -> None:
        assert self._process.stdout is not None
        with self._process:
            for line in self._process.stdout:
                match = _STAMPED.fullmatch(line.rstrip("\n"))
                if match and (stamp := _Stamp(match[1], (match[2] or ".").ljust(10, "0"), match[3])) > self.last:
                    self.last = stamp
                    lines.put(LogLine(task, match[4]))

    @property
    def runs(self) -> bool:
        """Whether more lines may arrive."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the process."""
        self._process.terminate()
