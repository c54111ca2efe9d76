"""HTTP/1.1 of Python's standard library, connections kept open; the body of a message is the array."""

import http.client
import http.server
import socket

import numpy as np

from wires.security import Security
from wires.store import Array, Store


def serve(port: int, security: Security) -> None:
    """Serve for ever."""
    store, tls = Store(), security.server_context()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def setup(self) -> None:
            if tls:
                self.request = tls.wrap_socket(self.request, server_side=True)
            super().setup()

        def do_POST(self) -> None:
            assert self.headers["Authorization"] == security.token
            array = np.empty(int(self.headers["Content-Length"]) // 4, np.float32)
            self.rfile.readinto(memoryview(array).cast("B"))  # type: ignore[attr-defined]
            total = store.push_pull(self.path, array)
            self.send_response(200)
            self.send_header("Content-Length", str(total.nbytes))
            self.end_headers()
            self.wfile.write(memoryview(total).cast("B"))

        def log_message(self, *_: object) -> None:
            pass

    http.server.ThreadingHTTPServer.request_queue_size = 128
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


class Client:
    """One connection."""

    def __init__(self, port: int, security: Security) -> None:
        self._token = security.token
        if tls := security.client_context():
            self._connection = http.client.HTTPSConnection("127.0.0.1", port, context=tls)
        else:
            self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def push_pull(self, name: str, array: Array) -> Array:
        """Send an array, and return the sum."""
        said = {"Content-Length": str(array.nbytes), "Authorization": self._token}
        self._connection.request("POST", f"/{name}", memoryview(array).cast("B"), said)
        answer = self._connection.getresponse()
        total = np.empty_like(array)
        answer.readinto(memoryview(total).cast("B"))
        answer.read()
        return total
