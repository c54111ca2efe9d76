"""Watch a submitted job as if it ran here: made of what its platform can be asked, its state and its logs."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping

from tfps.cluster.resolver import Task
from tfps.errors import ClusterFormError, PeerLostError, PlatformError, StoppedError
from tfps.jobs.events import JobEvent, LogLine, TaskExited, TaskRestarted
from tfps.jobs.handle import CANCELLED, PENDING, SUCCEEDED, RunningJob, Status, SubmittedJob

_ASK_EVERY_SECS = 1.0
_SILENT_SECS = 60.0  # a platform that does not answer for so long is given up
_LAST_LINES_SECS = 10.0  # logs may come a little after the end


class JobPoller(RunningJob):
    """A submitted job as ``follow`` takes it. To cancel it is to stop watching: the job goes on."""

    def __init__(self, job: SubmittedJob) -> None:
        self._job = job
        self.left = False
        self._told = ""  # the last reason why it waits
        self._lines: queue.Queue[LogLine] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._status = Status("UNKNOWN")
        self._answered = time.monotonic()
        self._restarts: dict[Task, int] = {}

    @property
    def restarts(self) -> Mapping[Task, int]:
        """How often the platform has started each task again."""
        return self._restarts

    def events(self) -> Iterator[JobEvent | None]:
        """Yield what the tasks say, and how they ended once the job has; ``None`` when nothing happened for a while.

        Raises:
            PlatformError: If the platform has not answered for a minute.
        """
        self._reader.start()
        while not self.left and not self._ask().ended:
            yield from self._said(_ASK_EVERY_SECS)
            yield from self._restarted()
            yield from self._waits()
            yield None
        if self.left:
            return
        self._reader.join(_LAST_LINES_SECS)
        yield from self._said(0.0)
        codes = {task: _exit_code(self._status, task) for task in self._status.tasks}
        yield from (TaskExited(task, codes[task]) for task in sorted(codes, key=lambda task: _rank(codes[task])))

    def cancel(self) -> None:
        """Stop watching, unless the job has ended: then its end is told."""
        self.left = self.left or not self._status.ended

    def kill(self) -> None:
        """Stop watching, as ``cancel`` does."""
        self.cancel()

    def _ask(self) -> Status:
        try:
            self._status = self._job.status()
            self._answered = time.monotonic()
        except PlatformError:
            if time.monotonic() - self._answered > _SILENT_SECS:
                raise
        return self._status

    def _said(self, secs: float) -> Iterator[LogLine]:
        """Yield lines that have come, or come within ``secs``."""
        until = time.monotonic() + secs
        while not self.left:
            try:
                yield self._lines.get(timeout=max(until - time.monotonic(), 0.001))
            except queue.Empty:
                return

    def _restarted(self) -> Iterator[TaskRestarted]:
        for task, known in self._status.tasks.items():
            if known.restarts > self._restarts.get(task, 0):
                reason = "" if known.exit_code is None else f"exit code {known.exit_code}"
                yield TaskRestarted(task, reason, count=known.restarts)
                self._restarts[task] = known.restarts

    def _waits(self) -> Iterator[LogLine]:
        """Yield why the platform does not run the job, or part of it, when that is another reason than before."""
        waiting = [task for task, known in self._status.tasks.items() if known.state == PENDING]
        reason = self._status.reason if waiting else ""
        if reason and reason != self._told:
            yield LogLine(waiting[0], f"waiting: {reason}")
        self._told = reason or self._told

    def _read(self) -> None:
        """Run in a thread: read the logs. A platform that does not answer any more is noticed by ``_ask``."""
        with contextlib.suppress(PlatformError):
            for line in self._job.logs(None, follow=True):
                self._lines.put(line)


def _exit_code(status: Status, task: Task) -> int:
    """Return a task's exit code at the end of its job, also where the platform does not tell it."""
    known = status.tasks[task]
    if status.state == SUCCEEDED:
        return 0
    if known.exit_code is not None and status.state != CANCELLED:  # there it may be of a process before the last
        return known.exit_code
    gone = StoppedError if CANCELLED in (status.state, known.state) else PeerLostError
    return 0 if known.state == SUCCEEDED else gone.exit_code


def _rank(code: int) -> int:
    """Order exit codes: what cannot be helped is why the others ended, and who was only told to end is never."""
    if 0 < code < 128:
        return 0
    return {PeerLostError.exit_code: 2, ClusterFormError.exit_code: 2, StoppedError.exit_code: 3, 0: 4}.get(code, 1)
