"""Find the checkpoint to use: the newest intact one, or the one that a flag names. Does not import TensorFlow."""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from tfps.errors import CheckpointError
from tfps.runtime.checkpoint.directory import list_checkpoints, sealed
from tfps.runtime.checkpoint.manifest import INDEX, damage, file_of, problem, unreadable
from tfps.storage import JobDirectory, read_file
from tfps.text import show

log = logging.getLogger(__name__)


def select_checkpoint(model_dir: str | None, path: str | None = None) -> str:
    """Return the checkpoint that ``--checkpoint_path`` names, or the newest intact one in ``--model_dir``.

    Raises:
        CheckpointError: If there is none.
    """
    if path:
        if not os.path.isfile(file_of(path, INDEX)):
            given, index = show(path, 200), show(f"{path}.index", 200)
            name = path.removesuffix(".index")
            fix = f"give its name without the suffix, {show(name, 200)}" if name != path else f"there is no {index}"
            raise CheckpointError(f"--checkpoint_path={given} is not a checkpoint: {fix}.")
        return path
    warn_about_state_file(model_dir)
    for saved in sealed(model_dir):
        log.warning("%s is saved but not yet published: the job publishes it when it resumes.", saved)
    finder = Finder(model_dir)
    if path := finder.newest():
        return path
    if finder.damaged:
        raise no_intact_checkpoint(model_dir, finder.damaged)
    given = show(model_dir or "", 200)
    if not os.path.exists(model_dir or ""):
        raise CheckpointError(f"--model_dir={given} does not exist: give the directory of a trained job.")
    raise CheckpointError(f"--model_dir={given} holds no checkpoint (model.ckpt-*): train first.")


def newest_by_sizes(model_dir: str | None) -> str | None:
    """Return the newest checkpoint whose index is intact and whose files have their sizes; does not read the data.

    Raises:
        StorageError: If the directory exists and cannot be read.
    """
    found = reversed(list_checkpoints(model_dir))
    return next((path for path in found if problem(path, read_data=False) is None), None)


class Finder:
    """Find the newest intact checkpoint of a directory, any number of times; read and report each one only once.

    A checkpoint that cannot be read now, as in an outage of a network file system, is read again the next time.

    Attributes:
        damaged: The checkpoints that were skipped, with the damage of each.
    """

    def __init__(self, model_dir: str | None) -> None:
        self._dir = model_dir
        self._known: dict[tuple[str, int], str | None] = {}
        self._reported: set[tuple[object, str]] = set()
        self._unread_since: float | None = None
        self.damaged: dict[str, str] = {}

    def newest(self) -> str | None:
        """Return the path of the newest intact checkpoint, or ``None`` if there is none."""
        self.damaged, before = {}, self._unread_since
        self._unread_since = None
        for path in reversed(list_checkpoints(self._dir)):
            why = self._problem(path)
            if why is None:
                return path
            self.damaged[path] = why
            if (path, _written(path)) not in self._known:
                self._unread_since = before or time.monotonic()
        return None

    def may_read_more(self, patience_secs: float) -> bool:
        """Return whether ``newest`` may soon find a newer one, which it could not read, for less than this long."""
        return self._unread_since is not None and time.monotonic() - self._unread_since < patience_secs

    def _problem(self, path: str) -> str | None:
        key = path, _written(path)
        if key in self._known:
            return self._known[key]
        try:
            why = self._known[key] = damage(path)
        except OSError as error:
            why = unreadable(path, error)
        is_new = why is not None and (key, why) not in self._reported
        if why is not None and is_new and path in list_checkpoints(self._dir):  # else it was deleted while it was read
            self._reported.add((key, why))
            warn_about_damage(path, why)
        return why


def _written(path: str) -> int:
    """Return a time in ns that changes when a step is saved again; 0 without an index."""
    try:
        return file_of(path, INDEX).stat().st_mtime_ns
    except OSError:
        return 0


def warn_about_damage(path: str, why: str) -> None:
    """Log that a damaged checkpoint is skipped."""
    log.warning("checkpoint %s is damaged: %s. Trying the previous one.", path, why)


def warn_about_state_file(model_dir: str | None) -> None:
    """Log a warning if the ``checkpoint`` state file is damaged; nothing here depends on it."""
    if not model_dir or not os.path.isfile(path := JobDirectory(model_dir).state_file):
        return
    if why := _state_problem(path):
        log.warning("%s %s: the newest checkpoint is found by the file names.", path, why)


def _state_problem(path: Path) -> str | None:
    try:
        text = read_file(path).decode()
    except ValueError:
        return "is garbled"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    newest = re.search(r'^model_checkpoint_path: "(.+)"$', text, re.MULTILINE)
    if not newest:
        return "is garbled" if text else "is empty"
    name = Path(newest[1]).name
    return None if os.path.isfile(file_of(path.parent / name, INDEX)) else f"names {name}, which does not exist"


def no_intact_checkpoint(model_dir: str | None, damaged: Mapping[str, str]) -> CheckpointError:
    """Return the error that there are checkpoints but none can be used."""
    checkpoints = ", ".join(f"{Path(path).name} ({why})" for path, why in damaged.items())
    return CheckpointError(
        f"--model_dir={show(model_dir or '', 200)} holds no complete checkpoint: {checkpoints}. "
        "Restore a copy, or move these files away to start at step 0."
    )
