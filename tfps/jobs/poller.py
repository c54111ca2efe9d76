"""Follow a submitted job as if it ran here, by polling its state and reading its logs."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping

from tfps.cluster.spec import Task
from tfps.errors import PeerLostError, PlatformError, StoppedError
from tfps.jobs.causes import by_cause, may_name_cause, named_cause
from tfps.jobs.events import JobEvent, LogLine, TaskExited, TaskRestarted
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, SUCCEEDED, RunningJob, Status, SubmittedJob
from tfps.timeouts import PLATFORM_SILENT_SECS

_ASK_EVERY_SECS = 1.0
_LAST_LINES_SECS = 10.0  # logs may arrive shortly after the end


class JobPoller(RunningJob):
    """A submitted job as a running one, for ``follow``. To cancel it only ends the polling: the job continues."""

    def __init__(self, job: SubmittedJob) -> None:
        self._job = job
        self.left = False
        self._reported_reason = ""  # why the job waited, when that was last reported
        self._lines: queue.Queue[LogLine] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._status = Status("UNKNOWN")
        self._answered = time.monotonic()
        self._restarts: dict[Task, int] = {}
        self._named: dict[Task, tuple[Task, int]] = {}  # the worker, and its exit code, that a PS's error names

    @property
    def restarts(self) -> Mapping[Task, int]:
        """Number of times that the platform has started each task again."""
        return self._restarts

    def events(self) -> Iterator[JobEvent | None]:
        """Yield lines, restarts, and exit codes once the job has ended; ``None`` when nothing happened for a while.

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
        yield from self._ends()

    def cancel(self) -> None:
        """Stop polling, unless the job has ended: then ``events`` still yields its end."""
        self.left = self.left or not self._status.ended

    def kill(self) -> None:
        """Stop polling, like ``cancel``."""
        self.cancel()

    def _ask(self) -> Status:
        try:
            self._status = self._job.status()
            self._answered = time.monotonic()
        except PlatformError:
            if time.monotonic() - self._answered > PLATFORM_SILENT_SECS:
                raise
        return self._status

    def _said(self, secs: float) -> Iterator[LogLine]:
        """Yield lines that have arrived, or arrive within ``secs``."""
        until = time.monotonic() + secs
        while not self.left:
            try:
                line = self._lines.get(timeout=max(until - time.monotonic(), 0.001))
            except queue.Empty:
                return
            if named := named_cause(line.task, line.text):
                self._named[line.task] = named
            yield line

    def _restarted(self) -> Iterator[TaskRestarted]:
        for task, known in self._status.tasks.items():
            if known.restarts > self._restarts.get(task, 0):
                reason = "" if known.exit_code is None else f"exit code {known.exit_code}"
                yield TaskRestarted(task, reason, count=known.restarts)
                self._restarts[task] = known.restarts

    def _waits(self) -> Iterator[LogLine]:
        """Yield the reason why the platform does not run the job, or part of it, when that reason changes."""
        waiting = [task for task, known in self._status.tasks.items() if known.state == PENDING]
        reason = self._status.reason if waiting else ""
        if reason and reason != self._reported_reason:
            yield LogLine(waiting[0], f"waiting: {reason}")
        self._reported_reason = reason or self._reported_reason

    def _ends(self) -> Iterator[TaskExited]:
        """Yield how each task ended, the cause first; a code that neither the platform nor a PS reports counts less."""
        tasks, told = self._status.tasks, self._told()
        codes = {task: told.get(task, _exit_code(self._status, task)) for task in tasks}

        def key(task: Task) -> tuple[int, bool, bool]:
            is_reported = task in told or tasks[task].exit_code is not None
            rank, is_ps = by_cause(task, codes[task], is_reported or tasks[task].state == FAILED)
            return rank, not is_reported, is_ps

        yield from (TaskExited(task, codes[task]) for task in sorted(tasks, key=key))

    def _told(self) -> Mapping[Task, int]:
        """Return the exit codes of workers that only the PS know, as a platform starts such a worker again."""
        if self._status.state != FAILED:
            return {}
        codes = {task: known.exit_code for task, known in self._status.tasks.items()}
        return {
            worker: code
            for ps, (worker, code) in self._named.items()
            if codes.get(worker, 0) is None and may_name_cause(ps, codes.get(ps) or 0)
        }

    def _read(self) -> None:
        """Run in a thread: read the logs. ``_ask`` notices a platform that does not answer any more."""
        with contextlib.suppress(PlatformError):
            for line in self._job.logs(None, follow=True):
                self._lines.put(line)


def _exit_code(status: Status, task: Task) -> int:
    """Return a task's exit code at the end of its job, even if the platform does not report it."""
    known = status.tasks[task]
    if status.state == SUCCEEDED:
        return 0
    if known.exit_code is not None and status.state != CANCELLED:  # a cancelled job's may be of an earlier process
        return known.exit_code
    gone = StoppedError if CANCELLED in (status.state, known.state) else PeerLostError
    return 0 if known.state == SUCCEEDED else gone.exit_code
