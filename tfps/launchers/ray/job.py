"""A job on Ray as the launcher sees it from outside the cluster, only through the Jobs API."""

import asyncio
import dataclasses
import importlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from tfps.cluster.spec import Task
from tfps.errors import ConfigError, JobNotFoundError, PlatformError
from tfps.jobs.events import JobEvent, LogLine
from tfps.jobs.handle import (
    CANCELLED,
    FAILED,
    PENDING,
    RUNNING,
    SUCCEEDED,
    RunningJob,
    Status,
    SubmittedJob,
    TaskStatus,
)
from tfps.jobs.poller import JobPoller
from tfps.launchers.ray import cluster
from tfps.launchers.ray.log_protocol import Reader, is_protocol
from tfps.text import one_line
from tfps.timeouts import CANCEL_SECS, RAY_LOGS_SILENT_SECS

_STATES = {"PENDING": PENDING, "RUNNING": RUNNING, "SUCCEEDED": SUCCEEDED, "FAILED": FAILED, "STOPPED": CANCELLED}
_ASK_EVERY_SECS = 0.5


class RayJob(SubmittedJob):
    """A job submitted to Ray."""

    def __init__(self, client: Any, id_: str) -> None:
        self._client = client
        self._id = id_
        self._following: Reader | None = None  # the state of a log that is being followed

    @property
    def handle(self) -> str:
        """``ray:ID@host:port``."""
        return f"ray:{self._id}@{self._client.get_address().removeprefix('http://')}"

    def status(self) -> Status:
        """Ask for the job's state, and read the tasks' states from its log.

        Raises:
            PlatformError: If the cluster does not answer, or knows no such job.
        """
        info = self._info()
        reader = self._following
        if reader is None or info.status.is_terminal():
            reader = self._reader(info)
            for text in self._log():
                reader.take(text)
        state = _STATES[info.status.value]
        tasks = dict(reader.tasks)
        if not info.status.is_terminal():
            return Status(state, tasks, one_line(info.message or "") if state == PENDING else "")
        tasks = _ended(tasks, state, info.driver_exit_code)
        return Status(state, tasks, _why(tasks, info.message or "") if state == FAILED else "")

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of the tasks; with ``follow``, until the job ends.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If the cluster does not answer, or knows no such job.
        """
        reader = self._reader(self._info())
        if task is not None and task not in reader.tasks:
            raise ConfigError(f"--task={task}: the job has {', '.join(map(str, reader.tasks))}.")
        if follow:
            self._following = reader
        for text in self._tail() if follow else self._log():
            line = reader.take(text)
            if line and task in (None, line.task):
                yield line
        if follow:
            yield from self._unsaid(task)

    def cancel(self) -> None:
        """Stop the job, and wait until its tasks have saved and ended.

        Raises:
            PlatformError: If the cluster does not answer, knows no such job, or does not end it.
        """
        self.stop()
        deadline = time.monotonic() + CANCEL_SECS
        while not self._info().status.is_terminal():
            if time.monotonic() > deadline:
                raise PlatformError(
                    f"{self.handle} has not ended {CANCEL_SECS:g} s after it was asked to stop: ask Ray why."
                )
            time.sleep(_ASK_EVERY_SECS)

    def stop(self) -> None:
        """Ask the job to stop.

        Raises:
            PlatformError: If the cluster does not answer, or knows no such job.
        """
        with cluster.words():
            self._client.stop_job(self._id)

    def _info(self) -> Any:
        with cluster.words():
            return self._client.get_job_info(self._id)

    def _reader(self, info: Any) -> Reader:
        """Return a reader of the job's log.

        Raises:
            JobNotFoundError: If tfps did not submit the job.
        """
        metadata = info.metadata or {}
        sizes = {"ps": metadata.get("num_ps", ""), "worker": metadata.get("num_workers", "")}
        if not all(size.isdigit() for size in sizes.values()):
            raise JobNotFoundError(f"{self.handle} is no job of tfps: ray job list shows which there are.")
        return Reader(Task(job, index) for job, size in sizes.items() for index in range(int(size)))

    def _log(self) -> list[str]:
        with cluster.words():
            return str(self._client.get_job_logs(self._id)).split("\n")

    def _tail(self) -> Iterator[str]:
        """Yield the lines of the log until the job ends, over as many connections as needed.

        Raises:
            PlatformError: If the cluster has not answered for a while.
        """
        seen, answered = 0, time.monotonic()
        while True:
            try:
                with cluster.words():
                    for number, line in enumerate(_lines(self._client.tail_job_logs(self._id))):
                        if number >= seen:
                            seen += 1
                            yield line
                if self._info().status.is_terminal():
                    return
                answered = time.monotonic()
            except PlatformError:
                if time.monotonic() - answered > RAY_LOGS_SILENT_SECS:
                    raise
            time.sleep(_ASK_EVERY_SECS)

    def _unsaid(self, task: Task | None) -> Iterator[LogLine]:
        """Yield the job's error if no task reported one: Ray could not start the driver, or the driver was killed."""
        status = self.status()
        first = min(status.tasks)
        if (
            status.state == FAILED
            and not any(known.reason for known in status.tasks.values())
            and task in (None, first)
        ):
            yield LogLine(first, f"error: {status.reason}")


def _lines(chunks: AsyncGenerator[str, None]) -> Iterator[str]:
    """Yield the lines of a text in chunks; the next connection gives an incomplete last line in full."""
    loop = asyncio.new_event_loop()
    rest = ""
    try:
        while True:
            *lines, rest = (rest + loop.run_until_complete(anext(chunks))).split("\n")
            yield from lines
    except StopAsyncIteration:
        return
    finally:
        loop.run_until_complete(chunks.aclose())
        loop.close()


def _ended(tasks: Mapping[Task, TaskStatus], state: str, code: int | None) -> dict[Task, TaskStatus]:
    """Return the tasks of an ended job: none still runs, and those that made it fail come first."""
    unblamed = state == FAILED and not any(known.state == FAILED for known in tasks.values())
    closed = {task: _closed(known, state, code if unblamed else None) for task, known in tasks.items()}
    return dict(sorted(closed.items(), key=lambda item: item[1].state != FAILED))


def _closed(known: TaskStatus, state: str, code: int | None) -> TaskStatus:
    if known.state not in (PENDING, RUNNING):
        return known
    return dataclasses.replace(known, state=state, exit_code=known.exit_code if code is None else code)


def _why(tasks: Mapping[Task, TaskStatus], message: str) -> str:
    """Return why a job failed: its task's error, else the end of Ray's message."""
    said = [f"{task}: {known.reason}" for task, known in tasks.items() if known.state == FAILED and known.reason]
    lines = [line for line in message.split("\n") if line.strip() and not is_protocol(line)]
    return said[0] if said else one_line(" ".join(lines[-2:]))[:500]


class OwnCluster(RunningJob):
    """A job on a cluster that was started for it, and that ends with it."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._watch = JobPoller(job)

    @property
    def restarts(self) -> Mapping[Task, int]:
        """Number of times that each task was started again."""
        return self._watch.restarts

    def events(self) -> Iterator[JobEvent | None]:
        """Yield the tasks' lines and ends until all have ended; ``None`` when nothing happened for a while."""
        try:
            yield from self._watch.events()
        finally:
            importlib.import_module("ray").shutdown()

    def cancel(self) -> None:
        """Ask every task to save and end."""
        self._job.stop()

    def kill(self) -> None:
        """Stop following the job; the end of ``events`` ends the cluster, and with it every task."""
        self._watch.cancel()
