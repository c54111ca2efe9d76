"""Keep a model's output apart from its task's own lines. Does not import TensorFlow.

A follower of a task reads its output line by line (``tfps.progress``). So a model's line that begins like one of the
task's own is marked. The task's own lines start at the left, even if the model left a line unfinished.
"""

import contextlib
import logging
from typing import TextIO

from tfps.progress import is_reserved

_MARK = "model: "


class Printed:
    """A text stream that passes a model's output to another stream.

    Attributes:
        stream: The other stream, for the task's own lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._is_open = False  # the last line is unfinished

    def write(self, text: str) -> int:
        """Write a text; mark each line that begins like one of the task's own."""
        lines = text.splitlines(keepends=True)
        marked = [_MARK + line if is_reserved(line) else line for line in lines]
        if lines and self._is_open:
            marked[0] = lines[0]
        if lines:
            self._is_open = not lines[-1].endswith("\n")
        self.stream.write("".join(marked))
        return len(text)

    def end_line(self) -> None:
        """End the model's unfinished line, if there is one."""
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
    """A text stream for a task's final errors, on separate lines.

    Args:
        stream: The stream to write to.
        printed: The model's output, which may be shown before the errors.
    """

    def __init__(self, stream: TextIO, printed: Printed) -> None:
        self._stream, self._printed = stream, printed

    def write(self, text: str) -> int:
        """Write a text, after ending the model's unfinished line."""
        with contextlib.suppress(OSError, ValueError):
            self._printed.end_line()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class OwnLines(logging.StreamHandler[TextIO]):
    """A log handler that writes the task's own lines to the stream of the model's output."""

    def __init__(self, printed: Printed) -> None:
        super().__init__(printed.stream)
        self._printed = printed

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on a separate line."""
        with contextlib.suppress(OSError, ValueError):  # the next call reports it
            self._printed.end_line()
        super().emit(record)
