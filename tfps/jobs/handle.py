"""What a launcher gives back for a job, and what such a job tells: the same for every platform."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfps.cluster.resolver import Task
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
    """A job that this process sees through to its end.

    Example::

        for event in job.events():
            if isinstance(event, LogLine):
                print(event.task, event.text)
    """

    @property
    @abc.abstractmethod
    def restarts(self) -> Mapping[Task, int]:
        """How often it has started each task again."""

    @abc.abstractmethod
    def events(self) -> Iterator[JobEvent | None]:
        """Yield what happens, until all tasks have ended; ``None`` when nothing happened for a while."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ask every task to save and end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End every task at once."""


@dataclass(frozen=True)
class TaskStatus:
    """What a platform knows of a task.

    Attributes:
        state: One of the six.
        exit_code: Of its last process that ended.
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
    """What a platform knows of a job; ``reason`` says why it is in that state, in the platform's words."""

    state: str
    tasks: Mapping[Task, TaskStatus] = field(default_factory=dict)
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in (SUCCEEDED, FAILED, CANCELLED)


class SubmittedJob(abc.ABC):
    """A job on a platform; what is known of it is asked of the platform, so any process can hold its handle.

    Attributes:
        warnings: What the platform warned of when this process submitted the job.

    Example::

        job = launcher.find("4711")
        while not job.status().ended:
            time.sleep(1.0)
    """

    warnings: Sequence[str] = ()

    @property
    @abc.abstractmethod
    def handle(self) -> str:
        """``PLATFORM:ID``, what ``tfps status`` takes."""

    @abc.abstractmethod
    def status(self) -> Status:
        """Ask the platform.

        Raises:
            PlatformError: If it does not answer, or knows no such job.
        """

    @abc.abstractmethod
    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield what the tasks, or only ``task``, have said; with ``follow``, until the job ends.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If the platform does not answer, or knows no such job.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """End the job, its tasks having the time to save; nothing of it stays on the platform but what it wrote.

        Raises:
            PlatformError: If the platform does not answer, or knows no such job.
        """
