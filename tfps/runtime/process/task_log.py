"""Route a task's output: important lines to its user, everything to ``MODEL_DIR/logs/<job>-<index>.log``.

TensorFlow writes to file descriptor 2 from C++. So that descriptor becomes the log before TensorFlow is imported. Does
not import TensorFlow.
"""

import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import TextIO, cast

from tfps.runtime.process.model_output import Errors, OwnLines, Printed
from tfps.storage import JobDirectory, open_to_append

_log = logging.getLogger("tfps")


class _Tee:
    """A text stream that writes to two others, if it can: no model fails because it prints.

    The log gets all of it, even if nobody reads the console any more. The console gets it even if the disk is full.
    """

    def __init__(self, console: TextIO, log: TextIO) -> None:
        self._console, self._log = console, log

    def write(self, text: str) -> int:
        for stream in (self._log, self._console):
            with contextlib.suppress(OSError, ValueError):  # the disk is full, or a model has closed the stream
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in (self._log, self._console):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._console, name)


def log_file(model_dir: str | None, task: str) -> Path | None:
    """Return the path of the log of a task, like ``worker/0``; ``None`` without a ``--model_dir``."""
    return JobDirectory(model_dir).log(task) if model_dir else None


def open_log(path: Path | None) -> TextIO:
    """Route this task's output; call it once, before TensorFlow is imported.

    Standard output is shown and logged, as are errors. Standard error (TensorFlow's noise, warnings, tracebacks) is
    only logged. Without a log, Python's output is shown, and TensorFlow's noise is dropped.

    Args:
        path: The task's log, which is appended to, or ``None``.

    Returns:
        The stream for errors that the user must see; it is logged, too.

    Raises:
        StorageError: If the log cannot be written.
    """
    printed = Printed(sys.stdout)
    shown = OwnLines(printed)
    if path is None:
        errors = _drop_noise()
        sys.stdout, sys.stderr = cast(TextIO, printed), cast(TextIO, Printed(errors))
        _log_to(_formatted(shown, "%(message)s", logging.INFO))
        return cast(TextIO, Errors(errors, printed))
    errors, file = os.fdopen(os.dup(2), "w", buffering=1), _opened(path)
    os.dup2(file.fileno(), 2)
    to_file = logging.StreamHandler(file)
    _log_to(_formatted(shown, "%(message)s", logging.INFO), _formatted(to_file, "%(asctime)s %(message)s"))
    sys.stdout = cast(TextIO, _Tee(cast(TextIO, printed), file))
    return cast(TextIO, _Tee(cast(TextIO, Errors(errors, printed)), file))


def show() -> None:
    """Show log messages on standard output, for a command that is not a task; drop TensorFlow's noise."""
    _drop_noise()
    _log_to(_formatted(logging.StreamHandler(sys.stdout), "%(message)s", logging.INFO))


def _drop_noise() -> TextIO:
    """Discard TensorFlow's output from C++; returns standard error, for Python's output."""
    sys.stderr = errors = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return errors


def _opened(path: Path) -> TextIO:
    buffered = io.BufferedWriter(open_to_append(path))
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _formatted(handler: logging.Handler, line: str, level: int = logging.DEBUG) -> logging.Handler:
    handler.setFormatter(logging.Formatter(line))
    handler.setLevel(level)
    return handler


def enable() -> None:
    """Enable the loggers of tfps again, because ``logging.config`` in a model disables other loggers."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == _log.name:
            logger.disabled = False


def _log_to(*handlers: logging.Handler) -> None:
    logging.raiseExceptions = False  # no tracebacks in the log if the console is gone
    _log.handlers[:] = handlers
    _log.setLevel(logging.DEBUG)  # debug lines are for the log only
    _log.propagate = False
