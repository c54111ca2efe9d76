"""The ``params`` of a model: the flags of its job, and which of them it reads. Must not import TensorFlow."""

from collections.abc import Container, Mapping
from typing import Any

from tfps.config.job_config import JobConfig

_OF_DATA = ("batch_size", "data_dir")


class TrackedFlags(dict[str, Any]):
    """The flags, and the names of those that a model has read."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        super().__init__(flags)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a flag, which counts as read."""
        self.read.add(name)
        return super().get(name, default)

    def copy(self) -> dict[str, Any]:
        """Return all flags, which count as read."""
        self.read.update(self)
        return dict(self)

    def items(self) -> Any:
        """Return all flags, which count as read."""
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        """Return the values of all flags, which count as read."""
        self.read.update(self)
        return super().values()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


def unread_flags(config: JobConfig, read: Container[str]) -> list[str]:
    """Return the flags of a model's data that are given, and not among those that it has read, with their values."""
    default = JobConfig()
    given = {name: getattr(config, name) for name in _OF_DATA if getattr(config, name) != getattr(default, name)}
    return [f"--{name}={value}" for name, value in given.items() if name not in read]


def tracked_flags(config: JobConfig) -> TrackedFlags:
    """Return the flags of a job; ``issync`` is what the mode is, whichever of both flags was given."""
    return TrackedFlags({**config.to_dict(), "issync": config.mode == "sync"})
