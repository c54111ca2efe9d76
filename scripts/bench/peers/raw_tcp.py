"""The limit for bytes: as many as a step of the dense ladder moves, each way in turn, over one TCP connection."""

import socket
import time
from typing import Any

import task

BUFFER_BYTES = 4 << 20
PATIENCE_SECS = 60.0


def exactly(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer from a connection."""
    while into:
        count = connection.recv_into(into, min(len(into), BUFFER_BYTES))
        if not count:
            raise ConnectionError("the other side has closed the connection.")
        into = into[count:]


def tuned(connection: socket.socket) -> socket.socket:
    """Set large buffers, and no delay."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def serve(flags: Any, values: memoryview) -> None:
    """Give the values, then take as many, step after step."""
    with tuned(socket.socket()) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", flags.ports[0]))
        listening.listen()
        listening.settimeout(PATIENCE_SECS)
        connection, _ = listening.accept()
        with tuned(connection):
            for _ in range(flags.steps):
                connection.sendall(values)
                exactly(connection, values)
            connection.sendall(b".")


def connected(port: int) -> socket.socket:
    """Connect to the server, which may be on its way."""
    for _ in range(int(PATIENCE_SECS / 0.1)):
        connection = tuned(socket.socket())
        try:
            connection.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            connection.close()
            time.sleep(0.1)
        else:
            return connection
    raise ConnectionError("no server has come.")


def work(flags: Any, values: memoryview) -> None:
    """Take the values, then give as many, step after step."""
    marks = task.Marks(flags.every, flags.steps)
    with connected(flags.ports[0]) as connection:
        for step in range(1, flags.steps + 1):
            exactly(connection, values)
            connection.sendall(values)
            if step == flags.steps:
                exactly(connection, memoryview(bytearray(1)))  # all of it has arrived
            marks.at(step)


def main() -> None:
    """Be one task."""
    flags = task.flags()
    values = memoryview(bytearray(flags.mb * 10**6))
    serve(flags, values) if flags.role == "ps" else work(flags, values)


if __name__ == "__main__":
    main()
