"""Whether ``--model_dir`` can hold a job, and whether all hosts mean the same directory by it.

A visitor leaves a card there, with its host, its versions and its clock on it, and takes it away when it goes. Whoever
finds another host's card shares the directory with that host. When a card was written is told by the file system's own
clock, so cards also tell how wrong the clocks are. Does not import TensorFlow.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfps.errors import CheckpointError
from tfps.report import read_json, write_json

_CARDS = ".tfps-doctor-*.json"
_LOST_AFTER_SECS = 300.0  # a card older than that was left by one who did not get to take it away


@dataclass(frozen=True)
class Presence:
    """What a visitor has left.

    Attributes:
        told: What it says of itself.
        written: When, by the file system's clock, in seconds.
        ahead_secs: By how much its own clock was ahead of that.
    """

    told: Mapping[str, str]
    written: float
    ahead_secs: float


class SharedDirProbe:
    """One's own card in a directory, and what else is found there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def own(self) -> Presence | None:
        """One's own card, as it is read back."""
        return _read(self._path)

    @property
    def free_bytes(self) -> int:
        """How much more the directory can hold."""
        return shutil.disk_usage(self._path.parent).free

    def others(self) -> dict[str, Presence]:
        """Return the cards of others that are there now, by their files' names."""
        now = self._path.stat().st_mtime
        found = {path.name: _read(path) for path in self._path.parent.glob(_CARDS) if path != self._path}
        return {name: card for name, card in found.items() if card and now - card.written < _LOST_AFTER_SECS}


@contextlib.contextmanager
def visit(directory: Path, told: Mapping[str, str]) -> Iterator[SharedDirProbe]:
    """Leave a card in a directory, which is made if it is not there, as long as the context lasts.

    Raises:
        StorageError: If the directory cannot be made, or nothing written there.
    """
    made = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    own = directory / _CARDS.replace("*", uuid.uuid4().hex)
    try:
        write_json(own, {**told, "clock": time.time()})
        yield SharedDirProbe(own)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
            for path in made:
                path.rmdir()  # unless others have put something there


def _read(path: Path) -> Presence | None:
    """Return a card, or ``None`` if there is none, or it is not one."""
    try:
        told, written = read_json(path) or {}, path.stat().st_mtime
        return Presence({name: str(value) for name, value in told.items()}, written, float(told["clock"]) - written)
    except (OSError, CheckpointError, KeyError, TypeError, ValueError):
        return None
