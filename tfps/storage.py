"""The files of a job: their names, and reads and writes that are complete or not there. Does not import TensorFlow."""

import errno
import io
import json
import math
import os
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tfps.errors import CheckpointError, StorageError

SCHEMA_VERSION = 1  # of job.json and summary.json: within a version, names that exist stay and keep their meaning
CHECKPOINT_NAME = "model.ckpt"  # the first part of the names of a checkpoint's files
STAGING_PREFIX = ".saving-"
_TRIES, _AGAIN_SECS = 5, 0.5  # for reading what cannot be read for a moment
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)  # nothing, or something other than a regular file, is there
_NOT_AGAIN = (*_LASTING, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)  # seconds do not help

_Read = TypeVar("_Read")


class UnreadableError(CheckpointError):
    """A file cannot be read now, for a reason that may pass, such as an error of a network file system."""


class JobDirectory:
    """``--model_dir``: the place of every file of a job.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def job(self) -> Path:
        """``job.json``: the flags of the newest run."""
        return self.path / "job.json"

    @property
    def summary(self) -> Path:
        """``summary.json``: the result of the newest run."""
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        """The directory of the logs."""
        return self.path / "logs"

    def log(self, task: str) -> Path:
        """Return the log of a task, like ``worker/0``."""
        return self.logs / f"{task.replace('/', '-')}.log"

    @property
    def launcher_log(self) -> Path:
        """TensorFlow's output while a launcher on this machine imports it for all tasks."""
        return self.logs / "launch.log"

    @property
    def training_events(self) -> Path:
        """The directory of the chief's event files."""
        return self.path

    @property
    def evaluation_events(self) -> Path:
        """The directory of the event files of evaluations."""
        return self.path / "eval"

    def checkpoint(self, step: int) -> str:
        """Return the path of a step's checkpoint, as TensorFlow takes it: its files have this name and a suffix."""
        return str(self.path / f"{CHECKPOINT_NAME}-{step}")

    def has_run(self) -> bool:
        """Return whether ``job.json`` or a file of a checkpoint is there, or whether that cannot be known."""
        try:
            return self.job.exists() or any(name.startswith(f"{CHECKPOINT_NAME}-") for name in os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    @property
    def state_file(self) -> Path:
        """The file from which TensorFlow's own tools learn which checkpoint is the newest."""
        return self.path / "checkpoint"

    def staging(self, save: str) -> Path:
        """Return the directory in which the save with a given id writes; it has the layout of this one."""
        return self.path / f"{STAGING_PREFIX}{save}"

    def export(self, step: int) -> Path:
        """Return the directory of a step's SavedModel."""
        return self.path / "export" / str(step)

    @property
    def owner(self) -> Path:
        """The file that names the chief that holds the directory."""
        return self.path / ".chief"

    @property
    def owner_lock(self) -> Path:
        """The lock under which ``owner`` is written."""
        return self.path / ".chief.lock"


def place_of(model_dir: str) -> tuple[int, int]:
    """Return a directory's file system (device) and inode; zeros if there is no such directory."""
    try:
        found = os.stat(model_dir)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def make_dir(path: Path) -> None:
    """Create a directory of the job.

    Raises:
        StorageError: If it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "give a directory that you can write"
        why = "a link to what is not there" if path.is_symlink() and not path.exists() else error.strerror
        raise StorageError(f"--model_dir: {path} cannot be made ({why}): {fix}.") from None


def temporary_directory() -> str:
    """Return the directory for temporary files.

    Raises:
        StorageError: If there is none.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise StorageError("no temporary file can be written: set TMPDIR to a directory where one can.") from None


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON file like ``write_text``. NaN and Inf become null.

    Raises:
        StorageError: If it cannot be written.
    """
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, through a temporary file that is renamed.

    It is not flushed to the disk. A loss of power may leave it empty: whoever reads it takes that for damage.

    Raises:
        StorageError: If it cannot be written.
    """
    make_dir(path.parent)
    try:
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "x") as file:  # with the permissions that the umask leaves
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be written: {error.strerror}.") from None


def remove(path: Path) -> None:
    """Delete a file of the job, if it exists.

    Raises:
        StorageError: If it cannot be deleted.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be deleted: {error.strerror}.") from None


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; reading any other, such as a FIFO, might block without end.

    Raises:
        OSError: If the file is not regular, or cannot be read.
    """
    with open_file(path) as file:
        return file.read()


def open_file(path: Path) -> io.FileIO:
    """Open a regular file for reading.

    Raises:
        OSError: If the file is not regular, or cannot be opened.
    """
    try:  # open first, because NFS looks for new files then
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENXIO):  # a directory, a socket
            raise
    else:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_to_append(path: Path) -> io.FileIO:
    """Open a file of the job for appending, and create it and its directory if needed; also a device like /dev/null.

    Raises:
        StorageError: If it is anything else, like a FIFO, or cannot be written.
    """
    make_dir(path.parent)
    try:  # a FIFO that nobody reads would block
        file = io.FileIO(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))
    except OSError as error:
        why = "it is not a regular file" if error.errno in (errno.EISDIR, errno.ENXIO) else error.strerror
        raise StorageError(f"--model_dir: {path} cannot be written: {why}.") from None
    mode = os.fstat(file.fileno()).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        file.close()
        raise StorageError(f"--model_dir: {path} cannot be written: it is not a regular file.")
    os.set_blocking(file.fileno(), True)
    return file


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or ``None`` if there is no such file.

    Raises:
        CheckpointError: If it is not a JSON object: another program wrote it, or it is damaged.
        UnreadableError: If it cannot be read for some seconds, so that its content is not known.
    """
    try:
        value = json.loads(patiently(lambda: read_file(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, NotADirectoryError):
            raise CheckpointError(f"--model_dir={path.parent} is not a directory.") from None
        why = getattr(error, "strerror", None) or error
        why = "it is nested too deeply" if isinstance(error, RecursionError) else why
        kind = UnreadableError if isinstance(error, OSError) and error.errno not in _LASTING else CheckpointError
        raise kind(f"{path} cannot be read: {why}. Move it away, or give another --model_dir.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object. Move it away, or give another --model_dir.")
    return value


def patiently(read: Callable[[], _Read]) -> _Read:
    """Return what ``read`` does; call it again, for some seconds, if a file cannot be read for a moment.

    Raises:
        OSError: If it stays so, or if there is no such file, or no regular one.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except OSError as error:
            if error.errno in _NOT_AGAIN:
                raise
        time.sleep(_AGAIN_SECS)
    return read()
