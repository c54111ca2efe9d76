"""Where a task's words go: to its user what matters, to ``MODEL_DIR/logs/<job>-<index>.log`` everything.

TensorFlow writes to file descriptor 2 from C++, so the log is put there, before TensorFlow is imported. Does not
import TensorFlow.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TextIO, cast

from tfps.errors import StorageError
from tfps.report import LOGS, make_dir

_log = logging.getLogger("tfps")


class _Tee:
    """A text stream that writes to two others, if it can: no model fails for what it prints.

    The log has all of it, also where nobody reads the console any more; and the console, where the disk is full.
    """

    def __init__(self, console: TextIO, log: TextIO) -> None:
        self._console, self._log = console, log

    def write(self, text: str) -> int:
        for stream in (self._log, self._console):
            with contextlib.suppress(OSError, ValueError):  # it is full, or a model has closed it
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in (self._log, self._console):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._console, name)


def log_file(model_dir: str | None, task: str) -> Path | None:
    """Return the log of a task (``worker/0``), or ``None`` without a ``--model_dir``."""
    return Path(model_dir) / LOGS / f"{task.replace('/', '-')}.log" if model_dir else None


def open_log(path: Path | None) -> TextIO:
    """Send this process's words to where they belong; call it once, before TensorFlow is imported.

    Standard output is shown and logged, as are errors; standard error (TensorFlow's noise, warnings, tracebacks) is
    only logged. Without a log, what Python writes is shown, and TensorFlow's noise is dropped.

    Args:
        path: The task's log, which is appended to, or ``None``.

    Returns:
        The stream on which an error can be shown to the user; it is logged, too.

    Raises:
        StorageError: If the log cannot be written.
    """
    console = os.fdopen(os.dup(2), "w", buffering=1)
    shown = _handler(sys.stdout, "%(message)s")
    shown.setLevel(logging.INFO)
    if path is None:
        sys.stderr = console
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        _log_to(shown)
        return console
    file = _opened(path)
    os.dup2(file.fileno(), 2)
    _log_to(shown, _handler(file, "%(asctime)s %(message)s"))
    sys.stdout = cast(TextIO, _Tee(sys.stdout, file))
    return cast(TextIO, _Tee(console, file))


def _opened(path: Path) -> TextIO:
    make_dir(path.parent)
    try:
        return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be written: {error.strerror}.") from None


def _handler(stream: TextIO, line: str) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(line))
    return handler


def _log_to(*handlers: logging.Handler) -> None:
    logging.raiseExceptions = False  # a console that nobody reads any more is no reason for a traceback in the log
    _log.handlers[:] = handlers
    _log.setLevel(logging.DEBUG)  # what is for the log alone
    _log.propagate = False
