"""The protocol in which the driver inside a Ray cluster reports events to the launcher outside: the job's log.

The log is the only data that Ray's Jobs API passes on while a job runs.

1. The driver writes each line of a task after the task's name: ``worker/0  | step=100 loss=0.5``.
2. Whenever a task's status changes, it writes ``tfps      | {"task": "worker/0", "state": "RUNNING", ...}``. No task
   can imitate that, because each line of a task comes after the task's own name.
3. The launcher reads both back; other lines in the log are Ray's.

Must not import ray.
"""

import dataclasses
import json
import re
from collections.abc import Iterable

from tfps.cluster.spec import Task
from tfps.jobs.events import LogLine
from tfps.jobs.handle import PENDING, TaskStatus

_DRIVER = "tfps"
_LINE = re.compile(rf"({_DRIVER}|(?:ps|worker)/[0-9]{{1,9}}) *\| (.*)", re.DOTALL)


def format_line(task: Task, text: str) -> str:
    """Return the line of the log for a line of a task."""
    return f"{task!s:<9} | {text}"


def format_status(task: Task, status: TaskStatus) -> str:
    """Return the line of the log for a new status of a task."""
    return f"{_DRIVER:<9} | {json.dumps({'task': str(task), **dataclasses.asdict(status)})}"


def is_protocol(text: str) -> bool:
    """Return whether the driver wrote a line of the log."""
    return _LINE.fullmatch(text) is not None


class Reader:
    """The state of a job's log so far.

    Attributes:
        tasks: The newest status of each task.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = dict.fromkeys(tasks, TaskStatus(PENDING))

    def take(self, text: str) -> LogLine | None:
        """Process a line of the log; return the task's line in it, if it has one."""
        match = _LINE.fullmatch(text)
        if match is None:
            return None
        if match[1] == _DRIVER:
            fields = json.loads(match[2])
            task = Task.parse(fields.pop("task"))
            self.tasks[task] = TaskStatus(**fields)
            return None
        return LogLine(Task.parse(match[1]), match[2])
