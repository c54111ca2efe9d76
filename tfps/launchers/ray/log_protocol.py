"""How the driver inside a Ray cluster tells the launcher outside of it what happens: through the job's log.

The log is all that Ray's Jobs API passes on while a job runs.

1. The driver writes each line that a task says after the name of its task: ``worker/0  | step=100 loss=0.5``.
2. Whenever a task's status changes, it writes ``tfps      | {"task": "worker/0", "state": "RUNNING", ...}``. No task
   can be taken for it, as whatever a task says comes after its own name.
3. The launcher reads both back; other lines in the log are Ray's.

Must not import ray.
"""

import dataclasses
import json
import re
from collections.abc import Iterable

from tfps.cluster.resolver import Task
from tfps.jobs.events import LogLine
from tfps.jobs.handle import PENDING, TaskStatus

_DRIVER = "tfps"
_LINE = re.compile(rf"({_DRIVER}|(?:ps|worker)/[0-9]{{1,9}}) *\| (.*)", re.DOTALL)


def format_line(task: Task, text: str) -> str:
    """Return the log's line for a line of a task."""
    return f"{task!s:<9} | {text}"


def format_status(task: Task, status: TaskStatus) -> str:
    """Return the log's line for what became of a task."""
    return f"{_DRIVER:<9} | {json.dumps({'task': str(task), **dataclasses.asdict(status)})}"


def is_protocol(text: str) -> bool:
    """Return whether a line of the log is the driver's."""
    return _LINE.fullmatch(text) is not None


class Reader:
    """What a job's log has told.

    Attributes:
        tasks: The newest status of each task.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = dict.fromkeys(tasks, TaskStatus(PENDING))

    def take(self, text: str) -> LogLine | None:
        """Take in a line of the log; return what a task says in it, if one does."""
        match = _LINE.fullmatch(text)
        if match is None:
            return None
        if match[1] == _DRIVER:
            told = json.loads(match[2])
            task = Task.parse(told.pop("task"))
            self.tasks[task] = TaskStatus(**told)
            return None
        return LogLine(Task.parse(match[1]), match[2])
