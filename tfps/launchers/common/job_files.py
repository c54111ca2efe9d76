"""What a job of a batch scheduler writes, and how that is read: a scheduler knows its jobs, and nothing of their tasks.

``PREFIX-ID.out`` tells how the tasks are, a line for each thing that happens:

- ``roles ps 1 worker 2``: how many tasks the job has;
- ``run 0``: the job begins, for the first time, or again as the scheduler has requeued it;
- ``ps/0 started on HOST`` and ``ps/0 ended with 0 on HOST``;
- ``over with 0``: the job's exit code; ``cancelled``: somebody has asked for its end.

``PREFIX-ID-ROLE-K.out`` is what a task says.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfps.cluster.resolver import Task
from tfps.errors import ConfigError
from tfps.jobs.events import LogLine
from tfps.jobs.handle import FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status, TaskStatus

_POLL_SECS = 0.5
_LATER_SECS = 2.0  # between two questions to a scheduler, which all its users share
_TOLD = re.compile(r"(?:(ps|worker)/(\d+) (started|ended with (\d+)) on (.*)|(run|over with) (\d+))")


class Tail:
    """Reads what is added to a file that may not be there yet."""

    def __init__(self, path: Path, task: Task) -> None:
        self._path, self._task = path, task
        self._read = 0
        self._rest = b""

    def lines(self, whole: bool = False) -> Iterator[LogLine]:
        """Yield the lines that have come; with ``whole``, also one without an end."""
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
    """Yield what tasks have said.

    Args:
        readers: One for each task.
        follow: Whether to go on until the job has ended.
        has_ended: Asks the scheduler whether it has.
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
    """Where a job writes.

    Attributes:
        logs: The directory.
        roles: How many tasks each role has, in the order of their ranks.
        prefix: What the files' names begin with: the launcher's name.
    """

    logs: str
    roles: Mapping[str, int]
    prefix: str

    def tasks(self) -> Sequence[Task]:
        """Return all tasks, the parameter servers first."""
        return [Task(role, index) for role in sorted(self.roles) for index in range(self.roles[role])]

    def of_job(self, job_id: str) -> Path:
        """Return the file that tells how the job's tasks are."""
        return Path(self.logs, f"{self.prefix}-{job_id}.out")

    def of_task(self, job_id: str, task: Task) -> Path:
        """Return the file that has what a task says."""
        return Path(self.logs, f"{self.prefix}-{job_id}-{task.job}-{task.index}.out")

    def readers(self, job_id: str, task: Task | None) -> Sequence[Tail]:
        """Return a reader of each task's file, or of that of only one.

        Raises:
            ConfigError: If the job has no such task.
        """
        if task is not None and task not in self.tasks():
            raise ConfigError(f"--task={task}: the job has only {', '.join(map(str, self.tasks()[:10]))}.")
        return [Tail(self.of_task(job_id, t), t) for t in (self.tasks() if task is None else [task])]

    def told(self, job_id: str) -> "Told":
        """Return what the job has told of its tasks."""
        told = Told({}, [], "", "")
        path = self.of_job(job_id)
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
            told.take(line)
        return told


@dataclass
class Told:
    """What a job has told of its tasks: of each, its state, and the cause of the job's failure first."""

    tasks: dict[Task, TaskStatus]
    failed: list[Task]
    over: str
    error: str
    cancelled: bool = False
    runs: int = 0

    def take(self, line: str) -> None:
        """Take in a line."""
        match = _TOLD.fullmatch(line)
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
        """Return the task that made the job fail, as a list: the first that cannot be helped, or that failed."""
        final = [task for task in self.failed if (self.tasks[task].exit_code or 0) < 128]
        return (final or self.failed)[:1]


def with_tasks(whole: Status, told: Told, tasks: Sequence[Task], restarts: int = 0) -> Status:
    """Return the state of a job with those of its tasks; in one that has ended the task that caused it comes first.

    Args:
        whole: What the scheduler says.
        told: What the job's files tell.
        tasks: The job's.
        restarts: How often the scheduler has started the job again.
    """
    order = [*(told.cause() if whole.ended else []), *tasks]
    known = {task: _settled(whole, told.tasks.get(task), restarts) for task in dict.fromkeys(order)}
    return Status(whole.state, known, whole.reason)


def _settled(job: Status, told: TaskStatus | None, restarts: int) -> TaskStatus:
    """Return how a task is: what it has told, as far as the job's state lets it be so still."""
    told = told or TaskStatus(PENDING)
    state = told.state
    if job.state == PENDING or (job.state == RUNNING and state == PENDING):
        state = PENDING
    elif job.state == UNKNOWN:
        state = UNKNOWN if state in (PENDING, RUNNING) else state
    elif job.ended and state != SUCCEEDED:
        state = job.state
    return TaskStatus(state, told.exit_code, restarts, told.where if job.state != PENDING else "")
