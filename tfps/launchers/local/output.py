"""The output of a task of this machine, read as lines by a process that waits for several tasks together."""

import os
from multiprocessing.connection import Connection

from tfps.cluster.spec import Task

_LONGEST_LINE = 1 << 18  # bytes; a longer line is shown in parts


class TaskOutput:
    """The output of one task, read as lines without waiting."""

    def __init__(self, task: Task, connection: Connection) -> None:
        self.task, self.connection = task, connection
        self.at_end = False
        self._begun = bytearray()  # the start of an incomplete line
        os.set_blocking(connection.fileno(), False)

    def read(self) -> list[str]:
        """Return the new complete lines and parts of very long ones; at the end, also a last one without a line end."""
        try:
            data = os.read(self.connection.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.at_end = not data
        first, *others = data.split(b"\n")
        self._begun += first
        lines = []
        for other in others:
            lines.append(bytes(self._begun))
            self._begun = bytearray(other)
        if self._begun and (self.at_end or len(self._begun) > _LONGEST_LINE):
            lines.append(bytes(self._begun))
            self._begun = bytearray()
        return [line.decode(errors="replace") for line in lines]
