"""The files of a job in a batch scheduler, and their reader: a scheduler knows its jobs, but not their tasks.

``PREFIX-ID.out`` records the tasks' states, one line per event:

- ``roles ps 1 worker 2``: the number of tasks of the job;
- ``run 0``: the job begins, for the first time, or again because the scheduler has requeued it;
- ``ps/0 started on HOST`` and ``ps/0 ended with 0 on HOST``;
- ``ended with exit code 0``: the job's exit code; ``cancelled``: somebody has asked for its end.

``PREFIX-ID-ROLE-K.out`` is the output of a task.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfps.cluster.spec import Task
from tfps.errors import ConfigError
from tfps.jobs.causes import is_final, is_told
from tfps.jobs.events import LogLine
from tfps.jobs.handle import FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status, TaskStatus

_POLL_SECS = 0.5
_LATER_SECS = 2.0  # between two questions to a scheduler, which all its users share
_RECORD_LINE = re.compile(r"(?:(ps|worker)/(\d+) (started|ended with (\d+)) on (.*)|(run|ended with exit code) (\d+))")


class Tail:
    """Reads the lines that are added to a file, which may not exist yet."""

    def __init__(self, path: Path, task: Task) -> None:
        self._path, self._task = path, task
        self._read = 0
        self._rest = b""

    def lines(self, whole: bool = False) -> Iterator[LogLine]:
        """Yield the new lines; with ``whole``, also a last one without a line end."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if whole and self._rest:
            lines.append(self._rest)
        yield from (LogLine(self._task, line.decode(errors="replace").rstrip("\r")) for line in lines)


def follow_lines(readers: Sequence[Tail], follow: bool, has_ended: Callable[[], bool]) -> Iterator[LogLine]:
    """Yield the lines of tasks.

    Args:
        readers: One for each task.
        follow: Whether to continue until the job has ended.
        has_ended: Asks the scheduler whether the job has ended.
    """
    asked, ended = -math.inf, not follow
    while not ended:
        if time.monotonic() - asked > _LATER_SECS:
            asked, ended = time.monotonic(), has_ended()
        yield from (line for reader in readers for line in reader.lines())
        time.sleep(0 if ended else _POLL_SECS)
    yield from (line for reader in readers for line in reader.lines(whole=True))


@dataclass(frozen=True)
class Files:
    """The files of a job.

    Attributes:
        logs: The directory.
        roles: Number of tasks of each role, in the order of their ranks.
        prefix: The first part of the files' names: the launcher's name.
    """

    logs: str
    roles: Mapping[str, int]
    prefix: str

    def tasks(self) -> Sequence[Task]:
        """Return all tasks, the parameter servers first."""
        return [Task(role, index) for role in sorted(self.roles) for index in range(self.roles[role])]

    def of_job(self, job_id: str) -> Path:
        """Return the file that records the states of the job's tasks."""
        return Path(self.logs, f"{self.prefix}-{job_id}.out")

    def of_task(self, job_id: str, task: Task) -> Path:
        """Return the file with the output of a task."""
        return Path(self.logs, f"{self.prefix}-{job_id}-{task.job}-{task.index}.out")

    def readers(self, job_id: str, task: Task | None) -> Sequence[Tail]:
        """Return a reader of each task's file, or only of that of ``task``.

        Raises:
            ConfigError: If the job has no such task.
        """
        if task is not None and task not in self.tasks():
            raise ConfigError(f"--task={task}: the job has only {', '.join(map(str, self.tasks()[:10]))}.")
        return [Tail(self.of_task(job_id, t), t) for t in (self.tasks() if task is None else [task])]

    def record(self, job_id: str) -> "JobRecord":
        """Return the record that the job has written about its tasks."""
        record = JobRecord({}, [], "", "")
        path = self.of_job(job_id)
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
            record.take(line)
        return record


@dataclass
class JobRecord:
    """The record that a job has written: the state of each task, and the data to find the cause of a failure."""

    tasks: dict[Task, TaskStatus]
    failed: list[Task]
    over: str
    error: str
    cancelled: bool = False
    runs: int = 0

    def take(self, line: str) -> None:
        """Process a line of the job's file."""
        match = _RECORD_LINE.fullmatch(line)
        if match and match[1]:
            task = Task(match[1], int(match[2]))
            before = self.tasks.get(task, TaskStatus(PENDING))
            code = before.exit_code if match[4] is None else int(match[4])
            state = RUNNING if match[4] is None else FAILED if code else SUCCEEDED
            self.tasks[task] = TaskStatus(state, code, where=match[5])
            self.failed += [task] if match[4] and code else []
        elif match and match[6] == "run":
            self.tasks = {task: TaskStatus(PENDING, known.exit_code) for task, known in self.tasks.items()}
            self.failed, self.over, self.error = [], "", ""
            self.runs = int(match[7])
        elif match:
            self.over = match[7]
        elif line == "cancelled":
            self.cancelled = True
        elif "error:" in line:
            self.error = self.error or line

    def cause(self) -> list[Task]:
        """Return the task that made the job fail, in a list: the first whose code no restart mends, else the first.

        A PS that a worker has told of its failure is only returned if it is alone. The script for Slurm does the same.
        """
        codes = {task: self.tasks[task].exit_code or 0 for task in self.failed}
        return sorted(codes, key=lambda task: (not is_final(task, codes[task]), is_told(task, codes[task])))[:1]


def with_tasks(whole: Status, record: JobRecord, tasks: Sequence[Task], restarts: int = 0) -> Status:
    """Return the status of a job with its tasks; after the job's end, the task that made it fail comes first.

    Args:
        whole: The job's status from the scheduler.
        record: The record from the job's files.
        tasks: All tasks of the job.
        restarts: Number of times that the scheduler has restarted the job.
    """
    order = [*(record.cause() if whole.ended else []), *tasks]
    known = {task: _settled(whole, record.tasks.get(task), restarts) for task in dict.fromkeys(order)}
    return Status(whole.state, known, whole.reason)


def _settled(job: Status, recorded: TaskStatus | None, restarts: int) -> TaskStatus:
    """Return the status of a task: its own record, as far as the job's state still allows it."""
    known = recorded or TaskStatus(PENDING)
    state = known.state
    is_of_this_run = state in (SUCCEEDED, FAILED) or not job.ended  # a run that goes on shows the code of the last one
    if job.state == PENDING or (job.state == RUNNING and state == PENDING):
        state = PENDING
    elif job.state == UNKNOWN:
        state = UNKNOWN if state in (PENDING, RUNNING) else state
    elif job.ended and state != SUCCEEDED:
        state = job.state
    code = known.exit_code if is_of_this_run else None
    return TaskStatus(state, code, restarts, known.where if job.state != PENDING else "")
