"""The lock under which the owner's file of a ``--model_dir`` is written; see ``ownership``.

It is a file that only one process can create. Does not import TensorFlow.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tfps.errors import StorageError
from tfps.runtime.checkpoint.lock_holder import GONE
from tfps.storage import JobDirectory

_ABANDONED_SECS = 5.0


@contextlib.contextmanager
def locked(model_dir: str) -> Iterator[None]:
    """Hold the lock under which the holder of a directory is written.

    Raises:
        StorageError: If nothing can be written there, or an abandoned lock cannot be deleted.
    """
    path, since, found = JobDirectory(model_dir).owner_lock, time.monotonic(), None
    while not _create(path):
        with contextlib.suppress(OSError):
            if (now := path.lstat().st_ino) != found:
                found, since = now, time.monotonic()
            elif time.monotonic() - since > _ABANDONED_SECS:  # the process that made it was killed
                _unlock(path)
        time.sleep(0.01)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _unlock(path: Path) -> None:
    """Delete an abandoned lock; raise if it stays, as a directory does, because the wait for it would never end."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in GONE:
            raise StorageError(
                f"--model_dir: {path} is abandoned, but this job cannot delete it: {error.strerror}. Delete it."
            ) from None


def _create(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be written: {error.strerror}.") from None
    return True
