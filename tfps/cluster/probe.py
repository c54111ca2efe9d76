"""Ask what listens at an address which task of a cluster it is, before any session is opened.

``CreateSession`` waits for ever on what is no TensorFlow server, and takes a server for the task that the caller's list
of hosts says it is, whatever the server's own list says. But a server tells the names of its devices, in which its job
and index are, to whoever calls ``GetStatus`` (tensorflow/core/protobuf/worker_service.proto).

That call is gRPC, which is HTTP/2 (RFC 9113): three frames of fixed bytes, sent on a plain socket. A gRPC library would
do it with threads of its own, the environment's proxies, and state that does not survive a fork. Nothing here imports
TensorFlow.
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
from tfps.cluster.resolver import Cluster, Task

PROBE_SECS = 1.0  # a blackholed address costs this long

UNKNOWN_HOST = "unknown host"
REFUSED = "nobody listens there"
SILENT = "no answer"
MUTE = "what listens there does not answer"
OTHER = "something else listens there"

_AT_ONCE = 256  # open sockets; a process may often have 1,024
_MOST_BYTES = 65536
_NAME = re.compile(rb"/job:(\w{1,100})/replica:0/task:([0-9]{1,9})/")  # of a device
_BORN = re.compile(rb"/device:CPU:0\x12\x03CPU.{3,60}?\x31(.{8})", re.DOTALL)  # device_attributes.proto

_HEADERS_FRAME, _SETTINGS_FRAME, _DATA_FRAME = 1, 4, 0
_END_STREAM, _END_HEADERS = 1, 4
_EMPTY_MESSAGE = bytes(5)  # gRPC's prefix: not compressed, 0 bytes
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
    """What was found at an address.

    Attributes:
        task: Which task of its own cluster the TensorFlow server there is; ``None`` if there is none.
        problem: Why there is none, in a few words.
        born: The number by which TensorFlow tells this server from those before it there; may be unknown.
    """

    task: Task | None = None
    problem: str = ""
    born: bytes = field(default=b"", compare=False)


def connect(address: str, secs: float = PROBE_SECS) -> socket.socket:
    """Open a connection to ``host:port``.

    Raises:
        OSError: If nobody accepts it.
    """
    connection = _first_of(socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM), secs)
    if connection.getsockname() == connection.getpeername():  # a port can connect to itself
        connection.close()
        raise ConnectionRefusedError
    return connection


def _first_of(places: Sequence[Any], secs: float) -> socket.socket:
    """Connect to the first of a host's addresses that answers; each has its share of the time, as one may be dead."""
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
    """Ask what listens at ``host:port`` who it is; takes ``secs`` and what the name service takes, at most."""
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
    """Ask at some tasks' addresses, at the same time; who has not answered after ``secs`` is silent."""
    answers = dict.fromkeys(tasks, ProbeResult(problem=SILENT))
    waiting = deque(tasks)

    def work() -> None:
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:  # another thread was quicker
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
    """Make the call and read until there is a name."""
    told = b""
    try:
        connection.sendall(_CALL)
        while len(told) < _MOST_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            more = connection.recv(4096)
            told += more
            if not more or _BORN.search(told):
                break
    except TimeoutError:
        return _named(told) or ProbeResult(problem=OTHER if told else MUTE)
    except OSError:
        pass  # it has cut the connection
    return _named(told) or ProbeResult(problem=OTHER)


def _named(told: bytes) -> ProbeResult | None:
    """Return who has answered, if that is told."""
    name, born = _NAME.search(told), _BORN.search(told)
    return ProbeResult(Task(name[1].decode(), int(name[2])), born=born[1] if born else b"") if name else None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """Return a header as plain text that needs no table (RFC 7541, section 6.2.2); both are shorter than 127 bytes."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


_CALL = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        _frame(_SETTINGS_FRAME, 0, 0, b""),
        _frame(_HEADERS_FRAME, _END_HEADERS, 1, b"".join(_field(*header) for header in _HEADERS.items())),
        _frame(_DATA_FRAME, _END_STREAM, 1, _EMPTY_MESSAGE),
    )
)
