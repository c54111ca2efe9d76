"""What a model prints, kept apart from what its task says of itself. Does not import TensorFlow.

Whoever follows a task reads its output, line by line (``tfps.report``). So a line that a model prints, and that begins
as one of the task's own, is marked; and the task's own lines begin at the left, whatever the model left unended.
"""

import contextlib
import logging
from typing import TextIO

from tfps.report import is_reserved

_MARK = "model: "


class Printed:
    """A text stream that takes a model's words to another one.

    Attributes:
        stream: That other one, for the task's own lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._is_open = False  # a line has begun and not ended

    def write(self, text: str) -> int:
        """Write a text, in which each line that begins as one of the task's own is marked."""
        lines = text.splitlines(keepends=True)
        marked = [_MARK + line if is_reserved(line) else line for line in lines]
        if lines and self._is_open:
            marked[0] = lines[0]
        if lines:
            self._is_open = not lines[-1].endswith("\n")
        self.stream.write("".join(marked))
        return len(text)

    def end_line(self) -> None:
        """End the line that the model has begun, if it has."""
        if self._is_open:
            self._is_open = False
            self.stream.write("\n")
            self.stream.flush()

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


class Errors:
    """A text stream for what a task says of why it ends, on lines of its own.

    Args:
        stream: The stream that takes it.
        printed: What the model has printed may be shown before it.
    """

    def __init__(self, stream: TextIO, printed: Printed) -> None:
        self._stream, self._printed = stream, printed

    def write(self, text: str) -> int:
        """Write a text, after the line that the model has begun."""
        with contextlib.suppress(OSError, ValueError):
            self._printed.end_line()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class OwnLines(logging.StreamHandler[TextIO]):
    """A log handler that writes the task's own lines to where a model prints."""

    def __init__(self, printed: Printed) -> None:
        super().__init__(printed.stream)
        self._printed = printed

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on a line of its own."""
        with contextlib.suppress(OSError, ValueError):  # the next line tells
            self._printed.end_line()
        super().emit(record)
