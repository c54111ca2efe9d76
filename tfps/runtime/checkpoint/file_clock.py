"""The clock of the file system that holds a directory; a host's may differ from it. Does not import TensorFlow."""

import contextlib
import os
import time
import uuid
from pathlib import Path

_PREFIX = ".tfps-clock-"


def now(directory: str | Path) -> float:
    """Return the present time by which files in a directory are stamped, or this host's if nothing can be written.

    Returns:
        Seconds since 1970.
    """
    path = Path(directory) / f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        with open(path, "xb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
