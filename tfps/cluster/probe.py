"""Ask the server at an address which task of a cluster it runs, before any session is opened.

``CreateSession`` waits without end for a listener that is no TensorFlow server. It also trusts the caller's list of
hosts about which task a server is, whatever the server's own list says. But a server returns the names of its devices,
which contain its job and index, to any caller of ``GetStatus`` (tensorflow/core/protobuf/worker_service.proto).

That call is gRPC, which is HTTP/2 (RFC 9113): three frames of fixed bytes, sent on a plain socket. A gRPC library would
add its own threads, the environment's proxies, and state that does not survive a fork. Nothing here imports TensorFlow.
"""

import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfps.cluster.addresses import split
from tfps.cluster.spec import Cluster, Task

PROBE_SECS = 1.0  # the cost of an address that drops all packets

UNKNOWN_HOST = "unknown host"
REFUSED = "no process listens there"
SILENT = "no answer"
UNRESPONSIVE = "the process there does not answer"
OTHER = "another program listens there"
BUSY = "the server there is busy"

_known_places: dict[str, Sequence[Any]] = {}  # by address, where its host was when its name was last looked up

_AT_ONCE = 256  # sockets open at the same time; the limit of a process is often 1,024
_MAX_BYTES = 65536
_NAME = re.compile(rb"/job:(\w{1,100})/replica:0/task:([0-9]{1,9})/")  # of a device
_BORN = re.compile(rb"/device:CPU:0\x12\x03CPU.{3,60}?\x31(.{8})", re.DOTALL)  # device_attributes.proto

_HEADERS_FRAME, _SETTINGS_FRAME, _DATA_FRAME = 1, 4, 0
_UNASKED = (_SETTINGS_FRAME, 6, 8)  # with PING and WINDOW_UPDATE: what gRPC sends while its server does not answer
_END_STREAM, _END_HEADERS = 1, 4
_EMPTY_MESSAGE = bytes(5)  # gRPC's prefix: uncompressed, 0 bytes
_HEADERS = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": b"/tensorflow.WorkerService/GetStatus",
    b":authority": b"tfps",
    b"content-type": b"application/grpc",
    b"te": b"trailers",
}


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing an address.

    Attributes:
        task: The task of its own cluster that the TensorFlow server there runs; ``None`` if there is no such server.
        problem: The reason why there is no server, in a few words.
        born: The number by which TensorFlow distinguishes this server from earlier ones there; empty if unknown.
    """

    task: Task | None = None
    problem: str = ""
    born: bytes = field(default=b"", compare=False)


def connect(address: str, secs: float = PROBE_SECS) -> socket.socket:
    """Open a connection to ``host:port``.

    Raises:
        OSError: If the connection fails.
    """
    connection = _first_of(_places(address), secs)
    if connection.getsockname() == connection.getpeername():  # an unused local port can connect to itself
        connection.close()
        raise ConnectionRefusedError
    return connection


def _places(address: str) -> Sequence[Any]:
    """Look up a host; if the name service fails, return where it was before.

    A name that the service says does not exist is gone: another task may have its place.
    """
    try:
        _known_places[address] = socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == socket.EAI_NONAME or address not in _known_places:
            raise
    return _known_places[address]


def _first_of(places: Sequence[Any], secs: float) -> socket.socket:
    """Connect to the first of a host's addresses that answers. Each gets a share of the time: one may be dead."""
    deadline = time.monotonic() + secs
    for left in range(len(places), 0, -1):
        family, kind, protocol, _, place = places[-left]
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(max(deadline - time.monotonic(), 0.0) / left or 0.001)
        try:
            connection.connect(place)
        except OSError:
            connection.close()
            if left == 1:
                raise
        else:
            return connection
    raise OSError("the host has no address")


def probe_address(address: str, secs: float = PROBE_SECS) -> ProbeResult:
    """Ask the listener at ``host:port`` for its task; takes at most ``secs`` plus the time of the name lookup."""
    deadline = time.monotonic() + secs
    try:
        connection = connect(address, secs)
    except socket.gaierror:
        return ProbeResult(problem=UNKNOWN_HOST)
    except ConnectionRefusedError:
        return ProbeResult(problem=REFUSED)
    except TimeoutError:
        return ProbeResult(problem=SILENT)
    except OSError as error:
        return ProbeResult(problem=error.strerror or str(error))
    with connection:
        return _read(connection, deadline)


def probe_all(cluster: Cluster, tasks: Sequence[Task], secs: float | None = None) -> Mapping[Task, ProbeResult]:
    """Probe the addresses of some tasks concurrently; a task without an answer after ``secs`` is ``SILENT``."""
    answers = dict.fromkeys(tasks, ProbeResult(problem=SILENT))
    waiting = deque(tasks)

    def work() -> None:
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:  # another thread took the last task
                return
            answers[task] = probe_address(cluster.address(task))

    threads = [threading.Thread(target=work, daemon=True) for _ in tasks[:_AT_ONCE]]
    deadline = None if secs is None else time.monotonic() + secs
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _read(connection: socket.socket, deadline: float) -> ProbeResult:
    """Send the call, and read until the answer contains a server's ``born``."""
    received = b""
    try:
        connection.sendall(_CALL)
        while len(received) < _MAX_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            more = connection.recv(4096)
            received += more
            if not more or _BORN.search(received):
                break
    except TimeoutError:
        return _named(received) or ProbeResult(problem=_silence(received))
    except OSError:
        pass  # the peer closed the connection
    return _named(received) or ProbeResult(problem=OTHER)


def _silence(received: bytes) -> str:
    """Return what a listener is that keeps the connection open and does not name itself."""
    if not received:
        return UNRESPONSIVE
    while len(received) > 3:
        if received[3] not in _UNASKED:
            return OTHER
        received = received[9 + int.from_bytes(received[:3], "big") :]
    return BUSY


def _named(received: bytes) -> ProbeResult | None:
    """Return the task that answered, or ``None`` if the answer does not name one."""
    name, born = _NAME.search(received), _BORN.search(received)
    return ProbeResult(Task(name[1].decode(), int(name[2])), born=born[1] if born else b"") if name else None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """Return a header as a literal without a table (RFC 7541, section 6.2.2); name and value are under 127 bytes."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


_CALL = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        _frame(_SETTINGS_FRAME, 0, 0, b""),
        _frame(_HEADERS_FRAME, _END_HEADERS, 1, b"".join(_field(*header) for header in _HEADERS.items())),
        _frame(_DATA_FRAME, _END_STREAM, 1, _EMPTY_MESSAGE),
    )
)
