"""A proxy that resets each connection after a random number of bytes of what is sent or of what is answered."""

import contextlib
import math
import random
import socket
import struct
import threading

_LONGEST = 20_000  # bytes
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset, and forgets what was not delivered


class CuttingProxy:
    """A proxy in front of a server.

    Args:
        port: The server's, on this machine.
        seed: Of the numbers of bytes.

    Attributes:
        port: Its own port.
        cuts: How many connections were reset in the middle.
    """

    def __init__(self, port: int, seed: int) -> None:
        self._server, self._random = port, random.Random(seed)
        self.is_cutting, self.cuts, self._lock = True, 0, threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                try:
                    self._pass_on(client)
                except OSError:  # the server is not there yet, or the client is gone
                    client.close()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._server), 30)
        server.settimeout(None)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        budgets = [math.inf, math.exp(self._random.uniform(0, math.log(_LONGEST)))]
        self._random.shuffle(budgets)
        for source, sink, budget in ((client, server, budgets[0]), (server, client, budgets[1])):
            threading.Thread(target=self._pump, args=(source, sink, budget), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, budget: float) -> None:
        """Pass on bytes, and so many at most; then reset both."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.is_cutting and len(data) > budget:
                    sink.sendall(data[: int(budget)])
                    self._cut(source, sink)
                    return
                sink.sendall(data)
                budget -= len(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _cut(self, *ends: socket.socket) -> None:
        with self._lock:
            self.cuts += 1
        for each in ends:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            each.close()
