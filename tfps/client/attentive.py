"""Waiting for bytes with a limit: a socket that asks now and then whether to go on."""

import socket
import time
from collections.abc import Callable


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
