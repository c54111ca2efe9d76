"""The checkpoints in ``--model_dir``, by the names of their files; see ``publish``. Does not import TensorFlow."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tfps.errors import StorageError
from tfps.runtime.checkpoint.manifest import INDEX
from tfps.storage import CHECKPOINT_NAME, STAGING_PREFIX, JobDirectory

_FILE_NAME = re.compile(re.escape(CHECKPOINT_NAME) + r"-(\d+)\.(index|manifest\.json|data-\d{5}-of-\d{5})")


def list_checkpoints(model_dir: str | None) -> list[str]:
    """Return the paths of a directory's checkpoints in the order of their steps; some may be damaged.

    The files count, not the ``checkpoint`` state file: a damaged one must not send a job back to step 0. Neither must a
    lost index, so the remaining files of its checkpoint count, too.

    Raises:
        StorageError: If the directory exists and cannot be read.
    """
    if not model_dir:
        return []
    found = [(int(match[1]), match[2]) for name in _names(model_dir) if (match := _FILE_NAME.fullmatch(name))]
    unfinished = {step for staged in staging_directories(model_dir) for step in unfinished_steps(staged)}
    steps = {step for step, suffix in found if suffix == INDEX or step not in unfinished}
    return [JobDirectory(model_dir).checkpoint(step) for step in sorted(steps)]


def _names(directory: str | Path) -> Sequence[str]:
    """Return the names in a directory; none if it does not exist, or no longer does."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"--model_dir: {directory} cannot be read: {error.strerror}.") from None


def step_in(path: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.rpartition("-")[2])


def staging_directories(model_dir: str) -> Sequence[Path]:
    """Return the directories in which a checkpoint is saved now, or was when the chief was killed; no links."""
    found = [Path(model_dir) / name for name in _names(model_dir) if name.startswith(STAGING_PREFIX)]
    return [path for path in found if not path.is_symlink()]


def unfinished_steps(staged: Path) -> Sequence[int]:
    """Return the step that is saved in a staging directory, as long as its index has not been renamed."""
    return [int(found[1]) for name in _names(staged) if (found := _FILE_NAME.fullmatch(name)) and found[2] == INDEX]


def sealed_in(staged: Path) -> Sequence[str]:
    """Return the checkpoint in a staging directory that is fully on the disk and not yet published."""
    if not JobDirectory(staged).state_file.exists():
        return []
    return [JobDirectory(staged.parent).checkpoint(step) for step in unfinished_steps(staged)]


def sealed(model_dir: str | None) -> Sequence[str]:
    """Return the checkpoints that are fully on the disk but not in place, because the job was lost as it saved them."""
    if not model_dir:
        return []
    return [path for staged in staging_directories(model_dir) for path in sealed_in(staged)]
