"""The parameters of one server as they are after each update, for clients that read from several servers.

Each server makes all updates in the same order. A client reads from all of them at the same time, and may see one after
update 7 and another one after update 8. It then asks the first for what it has after update 8. Therefore a server keeps
the last few versions for a short time after a read, if there are other servers.

After a server was lost, all of them begin again from a checkpoint: that is another *generation*. An update may then
have the number of one that was lost, so versions of two generations are never mixed.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tfps.client.message import Array, TensorSpec
from tfps.errors import NotReadyError
from tfps.runtime.service.pushes import State

_KEPT, _KEPT_SECS = 8, 5.0  # versions, and how long after a read
_LOOK_SECS = 0.5

_Found = TypeVar("_Found")


class Readable(Protocol):
    """What has parameters."""

    def read(self, names: Sequence[str] | None = None) -> Mapping[str, Array]:
        """Return parameters, all of one moment."""


@dataclass(frozen=True)
class Version:
    """The moment of a read.

    Attributes:
        generation: The generation; empty while the servers begin again.
        step: The number of the last update.
    """

    generation: str = ""
    step: int = 0


def version_in(metadata: Mapping[str, str]) -> Version:
    """Return the version that a request names."""
    return Version(metadata["generation"], int(metadata["step"]))


class Checkpoint(Protocol):
    """A checkpoint, as the first server reads it.

    Attributes:
        run: The identity of the run.
        state: The number of the last update, and which pushes are in it.
        specs: The parameters by name.
    """

    run: str
    state: State
    specs: Mapping[str, TensorSpec]

    def read(self, names: Sequence[str]) -> Mapping[str, Array]:
        """Return the values of some parameters and of their slots, by the names of a checkpoint."""


@dataclass(frozen=True)
class Snapshot:
    """The values of one moment on all servers.

    Attributes:
        run: The identity of the run.
        state: The number of the last update, and which pushes are in it.
        specs: The parameters by name.
        parts: Returns, for each server, the values of its parameters and slots by name.
    """

    run: str
    state: State
    specs: Mapping[str, TensorSpec]
    parts: Sequence[Callable[[], Mapping[str, Array]]] = field(default_factory=list)


class Versions:
    """The parameters, by the number of the last update.

    Args:
        store: The parameters.
        is_alone: Whether there is no other server.
    """

    def __init__(self, store: Readable, is_alone: bool) -> None:
        self._store, self._is_alone = store, is_alone
        self._now, self._read_at = Version(), float("-inf")
        self._kept: dict[int, Mapping[str, Array]] = {}
        self._changed = threading.Condition()

    @property
    def now(self) -> Version:
        """The generation, and the number of the last update."""
        return self._now

    def suspend(self) -> None:
        """Let all reads and updates fail until the next generation begins."""
        with self._changed:
            self._now = Version("", self._now.step)
            self._changed.notify_all()

    def begin(self, now: Version, make: Callable[[], None]) -> None:
        """Begin a generation; ``make`` gives the parameters their values."""
        with self._changed:
            self._kept.clear()
            make()
            self._now = now
            self._changed.notify_all()

    def update(self, now: Version, make: Callable[[], None]) -> bool:
        """Make an update, unless it was made; return whether this call has made it. No read is of the middle of it.

        Raises:
            NotReadyError: If it is of another generation.
        """
        with self._changed:
            self._check(now.generation)
            if now.step <= self._now.step:
                return False
            if time.monotonic() - self._read_at < _KEPT_SECS and not self._is_alone:
                self._kept[self._now.step] = self._store.read()
            else:
                self._kept.clear()
            make()
            self._now = now
            while len(self._kept) > _KEPT:
                del self._kept[min(self._kept)]
            self._changed.notify_all()
            return True

    def read(self, names: Sequence[str]) -> tuple[Version, Mapping[str, Array]]:
        """Return the moment and the parameters.

        Raises:
            NotReadyError: If no generation has begun.
        """

        def act() -> Mapping[str, Array]:
            self._read_at = time.monotonic()
            return self._store.read(names)

        return self.at_rest(act)

    def at_rest(self, act: Callable[[], _Found], generation: str | None = None) -> tuple[Version, _Found]:
        """Return the moment, and what a function returns that is called while no update is made.

        Raises:
            NotReadyError: If no generation has begun, or another one than asked for.
        """
        with self._changed:
            self._check(self._now.generation if generation is None else generation)
            return self._now, act()

    def read_at(
        self, wanted: Version, names: Sequence[str], stopping: Callable[[], bool]
    ) -> Mapping[str, Array] | None:
        """Wait for an update, and return parameters as they are after it; ``None`` if they are not kept any more.

        Raises:
            NotReadyError: If it is of another generation.
        """
        with self._changed:
            self._check(wanted.generation)
            while self._now.step < wanted.step and not stopping():
                self._changed.wait(_LOOK_SECS)
                self._check(wanted.generation)
            if self._now.step == wanted.step:
                return self._store.read(names)
            kept = self._kept.get(wanted.step)
            return None if kept is None else {name: kept[name] for name in names}

    def _check(self, generation: str) -> None:
        if not self._now.generation or generation != self._now.generation:
            raise NotReadyError("the service begins again from its last checkpoint.")
