"""What can be found at an address instead of a TensorFlow server, and something that passes for one."""

import contextlib
import http.server
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tfps.cluster import probe
from tfps.cluster.probe import ProbeResult
from tfps.cluster.spec import Task


def listener() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    return socket.create_server(("127.0.0.1", 0))


def address_of(sock: socket.socket) -> str:
    """Return a socket's ``host:port``."""
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


def patient_probes(monkeypatch: pytest.MonkeyPatch, *mute: str, secs: float = 60.0) -> None:
    """Give probes as long as a slow machine may need; only those of ``mute`` addresses end after a second."""
    really = probe.probe_address

    def probe_address(address: str, given_secs: float = secs) -> ProbeResult:
        return really(address, 1.0 if address in mute else given_secs)

    monkeypatch.setattr(probe.connect, "__defaults__", (secs,))
    monkeypatch.setattr(probe, "probe_address", probe_address)


@contextlib.contextmanager
def blackhole() -> Iterator[str]:
    """Yield an address that swallows what is sent to it: a listener that takes nobody in and whose queue is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(64):
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.2)
            try:
                caller.connect(full.getsockname())
            except TimeoutError:
                yield address_of(full)
                return
        pytest.fail("64 calls to a listener that takes nobody in, and none was swallowed")


@contextlib.contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[str]:
    """Run a server; yield its address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield address_of(server.socket)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def web_server(protocol: str = "HTTP/1.0") -> Iterator[str]:
    """Yield the address of a real HTTP server."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = protocol

        def log_message(self, *args: object) -> None:
            pass

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address


class Speaker(socketserver.ThreadingTCPServer):
    """Says that it is a task, as TensorFlow's servers do, and nothing else; ``close`` it to make it vanish."""

    allow_reuse_address = True
    daemon_threads = True

    class _Call(socketserver.BaseRequestHandler):
        server: "Speaker"

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(self.server.says)
                self.request.recv(4096)

    def __init__(self, task: Task, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), self._Call)
        self.says = f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0".encode()
        self.address = address_of(self.socket)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()
