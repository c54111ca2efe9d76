"""The objects that a launcher returns for a job, and the status of such a job: the same for every platform."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfps.cluster.spec import Task
from tfps.jobs.events import JobEvent, LogLine

# TorchX's names. The last three are the end of a job.
PENDING, RUNNING, UNKNOWN, SUCCEEDED, FAILED, CANCELLED = (
    "PENDING",
    "RUNNING",
    "UNKNOWN",
    "SUCCEEDED",
    "FAILED",
    "CANCELLED",
)


class RunningJob(abc.ABC):
    """A job that this process follows to its end.

    Example::

        for event in job.events():
            if isinstance(event, LogLine):
                print(event.task, event.text)
    """

    @property
    @abc.abstractmethod
    def restarts(self) -> Mapping[Task, int]:
        """Number of times that each task was started again."""

    @abc.abstractmethod
    def events(self) -> Iterator[JobEvent | None]:
        """Yield the events of the job until all tasks have ended; ``None`` when nothing happened for a while."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ask every task to save and end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill every task immediately."""


@dataclass(frozen=True)
class TaskStatus:
    """The platform's record of a task.

    Attributes:
        state: One of the six states above.
        exit_code: The exit code of its last process that ended.
        restarts: How many times the platform has started it again.
        where: The node, container or pod that runs it, in the platform's words.
        reason: Why it is in that state, in the platform's words.
    """

    state: str
    exit_code: int | None = None
    restarts: int = 0
    where: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """The platform's record of a job; ``reason`` is the cause of its state, in the platform's words."""

    state: str
    tasks: Mapping[Task, TaskStatus] = field(default_factory=dict)
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job has reached a final state."""
        return self.state in (SUCCEEDED, FAILED, CANCELLED)


class SubmittedJob(abc.ABC):
    """A job on a platform. All facts about it come from the platform, so any process can hold its handle.

    Attributes:
        warnings: The platform's warnings when this process submitted the job.

    Example::

        job = launcher.find("4711")
        while not job.status().ended:
            time.sleep(1.0)
    """

    warnings: Sequence[str] = ()

    @property
    @abc.abstractmethod
    def handle(self) -> str:
        """``PLATFORM:ID``, the argument of ``tfps status``."""

    @abc.abstractmethod
    def status(self) -> Status:
        """Ask the platform for the job's status.

        Raises:
            PlatformError: If it does not answer, or knows no such job.
        """

    @abc.abstractmethod
    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of all tasks, or only of ``task``; with ``follow``, until the job ends.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If the platform does not answer, or knows no such job.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """End the job, with time for its tasks to save; only the files that it wrote stay on the platform.

        Raises:
            PlatformError: If the platform does not answer, or knows no such job.
        """
