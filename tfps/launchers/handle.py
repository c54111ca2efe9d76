"""What a launcher gives back for a running job, and what such a job tells: the same for every platform."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tfps.cluster import Task


@dataclass(frozen=True)
class Line:
    """A line that a task said."""

    task: Task
    text: str


@dataclass(frozen=True)
class Exited:
    """A task has ended; ``exit_code`` is negative for a signal."""

    task: Task
    exit_code: int


class Handle(Protocol):
    """A running job."""

    def events(self) -> Iterator[Line | Exited | None]:
        """Yield what the tasks say and how they end, until all have; ``None`` when nothing happened for a while."""

    def cancel(self) -> None:
        """Ask every task to save and end."""

    def kill(self) -> None:
        """End every task at once."""
