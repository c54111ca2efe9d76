"""A proxy that records what is sent through it, in both directions."""

import contextlib
import socket
import threading

_PART_BYTES = 1 << 16


class Recorder:
    """Stands between clients and a server.

    Args:
        target: The address of the server, ``host:port``.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._parts, self._open = (host, int(port)), list[bytes](), list[socket.socket]()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def recorded(self) -> bytes:
        """What was sent so far, of all connections."""
        return b"".join(self._parts)

    def close(self) -> None:
        """Close all connections."""
        for each in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(_PART_BYTES):
                self._parts.append(part)
                to.sendall(part)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)
