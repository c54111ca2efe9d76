"""Check whether ``--model_dir`` can hold a job, and whether all hosts mean the same directory by it.

A visitor leaves a card there, a file with its host, versions and clock, and deletes the card when it leaves. A visitor
that finds another host's card shares the directory with that host. The file system's own clock dates each card, so
cards also show how wrong the clocks are. Does not import TensorFlow.
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
from tfps.storage import read_json, write_json

_CARDS = ".tfps-doctor-*.json"
_LOST_AFTER_SECS = 300.0  # an older card belongs to a visitor that could not delete it


@dataclass(frozen=True)
class Presence:
    """The card that a visitor left.

    Attributes:
        content: The card's content, as the visitor wrote it.
        written: The time of writing by the file system's clock, in seconds.
        ahead_secs: By how much the visitor's own clock was ahead of that.
    """

    content: Mapping[str, str]
    written: float
    ahead_secs: float


class SharedDirProbe:
    """This visitor's own card in a directory, and the cards of others there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def own(self) -> Presence | None:
        """This visitor's own card, read back from the file."""
        return _read(self._path)

    @property
    def free_bytes(self) -> int:
        """The free space of the directory's file system, in bytes."""
        return shutil.disk_usage(self._path.parent).free

    def others(self) -> dict[str, Presence]:
        """Return the current cards of other visitors by file name."""
        now = self._path.stat().st_mtime
        found = {path.name: _read(path) for path in self._path.parent.glob(_CARDS) if path != self._path}
        return {name: card for name, card in found.items() if card and now - card.written < _LOST_AFTER_SECS}


@contextlib.contextmanager
def visit(directory: Path, content: Mapping[str, str]) -> Iterator[SharedDirProbe]:
    """Leave a card in a directory while the context lasts; creates the directory if it is missing.

    Raises:
        StorageError: If the directory cannot be created or written to.
    """
    made = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    own = directory / _CARDS.replace("*", uuid.uuid4().hex)
    try:
        write_json(own, {**content, "clock": time.time()})
        yield SharedDirProbe(own)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
            for path in made:
                path.rmdir()  # fails if others have put something there


def _read(path: Path) -> Presence | None:
    """Return a card, or ``None`` if the file is missing or is not a card."""
    try:
        content, written = read_json(path) or {}, path.stat().st_mtime
        ahead_secs = float(content["clock"]) - written
        return Presence({name: str(value) for name, value in content.items()}, written, ahead_secs)
    except (OSError, CheckpointError, KeyError, TypeError, ValueError):
        return None
