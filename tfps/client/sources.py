"""What messages are received from: sockets with limits, and with fewer calls of the system."""

import socket
import time
from collections.abc import Callable
from typing import Protocol

_LARGE = 64 << 10  # bytes that are received into their place, without a copy


class Source(Protocol):
    """What messages are received from: a socket, or what looks like one."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive some bytes; return how many, 0 at the end."""


class Buffered:
    """What ``message`` receives from, for a connection with small messages: one call of the system for each.

    Args:
        source: What it receives from.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._memory = source, memoryview(bytearray(_LARGE))
        self._begin = self._end = 0

    def recv_into(self, buffer: memoryview) -> int:
        """Receive some bytes; return how many, 0 at the end of the connection.

        Raises:
            OSError: If the connection fails.
        """
        if self._begin == self._end:
            if len(buffer) >= _LARGE:
                return self._source.recv_into(buffer)
            self._begin, self._end = 0, self._source.recv_into(self._memory)
        count = min(len(buffer), self._end - self._begin)
        buffer[:count] = self._memory[self._begin : self._begin + count]
        self._begin += count
        return count


class Attentive:
    """What ``message`` receives from, for a socket whose other side may be silent for long, or for good.

    Args:
        connection: The socket.
        every_secs: After how long without a byte ``check`` is called.
        check: Raises an error if it is of no use to wait any longer.
    """

    def __init__(self, connection: socket.socket, every_secs: float, check: Callable[[], None]) -> None:
        self._connection, self._every_secs, self._check = connection, every_secs, check

    def recv_into(self, buffer: memoryview) -> int:
        """Receive some bytes; return how many, 0 at the end of the connection.

        Raises:
            OSError: If the connection fails.
            Exception: That of ``check``.
        """
        while True:
            self._connection.settimeout(self._every_secs)
            try:
                return self._connection.recv_into(buffer)
            except TimeoutError:
                self._check()
            finally:
                self._connection.settimeout(None)


class Hurried:
    """What ``message`` receives from, for a socket whose other side has so many seconds for all that it sends.

    Args:
        connection: The socket.
        secs: How long it has, from now on.
    """

    def __init__(self, connection: socket.socket, secs: float) -> None:
        self._connection, self._secs, self._deadline = connection, secs, time.monotonic() + secs

    def recv_into(self, buffer: memoryview) -> int:
        """Receive some bytes; return how many, 0 at the end of the connection.

        Raises:
            TimeoutError: If the time is over.
            OSError: If the connection fails.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the first message has not arrived within {self._secs:g} s")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
