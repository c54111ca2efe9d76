"""A client's connection to one server of a service: requests and answers, and a new connection where one is lost."""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfps.client import message as messages
from tfps.client import receive
from tfps.client.buffers import Buffers
from tfps.client.message import Array, Message
from tfps.client.sources import Attentive, Buffered, Source
from tfps.cluster.addresses import split
from tfps.errors import (
    ClusterFormError,
    NotReadyError,
    PeerLostError,
    ProtocolError,
    ServiceEndedError,
    ServiceError,
    StoppedError,
    TfpsError,
)
from tfps.text import plural
from tfps.timeouts import TCP_TIMEOUT_SECS

if TYPE_CHECKING:
    import ssl

PROTOCOL, LEAVE = "1", "leave"
_CHANGE = ("push", "stage", "init", "end_init", "apply")  # requests that change something
ERRORS: Mapping[str, type[TfpsError]] = {
    kind.__name__: kind
    for kind in (ServiceError, ProtocolError, NotReadyError, ServiceEndedError, PeerLostError, StoppedError)
}
_CONNECT_SECS = 5.0
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0


@dataclass(frozen=True)
class Identity:
    """What a client says of itself.

    Attributes:
        client: Its name, of which there is no other one.
        worker: The index of its worker.
        token: The secret of the service; empty for none.
        release: The release of tfps.
        checks_run: Whether a server of another run is an error; not for the first server, which gives the run.
    """

    client: str
    worker: int
    token: str
    release: str
    checks_run: bool = True


class Connection:
    """A connection. Threads may share it: one request follows the other.

    Args:
        address: The address of the server, ``host:port``.
        identity: What the client says of itself.
        start_timeout_secs: How long to wait for the server at first.
        retry_secs: How long to try to reach it again when it is lost.
        tls: How to encrypt; ``None`` for not at all.

    Attributes:
        address: See there.
        server: What the server has said of itself, by name; empty before the first request.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        start_timeout_secs: float,
        retry_secs: float,
        tls: "ssl.SSLContext | None" = None,
    ) -> None:
        self.address, self._identity, self._tls = address, identity, tls
        self._start_timeout_secs, self._retry_secs = start_timeout_secs, retry_secs
        self._lock, self._is_closed = threading.Lock(), False
        self._socket: socket.socket | None = None
        self._source: Source | None = None
        self._buffers = Buffers()
        self.server: Mapping[str, str] = {}

    def request(
        self,
        method: str,
        tensors: Mapping[str, Array] | None = None,
        into: Mapping[str, Array] | None = None,
        /,
        **metadata: str,
    ) -> Message:
        """Send a request, and return the answer. It is sent again if the connection is lost before the answer came.

        Args:
            method: The request.
            tensors: The arrays that it has.
            into: Arrays by name for those of the answer; see ``receive``. Some are changed if the server is lost.
            metadata: What else belongs to the request.

        Raises:
            ServiceError: If the server refuses it.
            ClusterFormError: If there is no server in time.
            PeerLostError: If the server is lost and does not come back; then it is not known whether it has acted.
        """
        message = Message({"method": method, **metadata}, tensors or {})
        with self._lock:
            if self._is_closed:
                raise ServiceError("the client is closed.")
            try:
                answer = self._answer(message, into)
            except BaseException:  # such as Ctrl-C: the answer may still come, and is none to the next request
                self._drop()
                raise
        return _checked(answer)

    def retry_no_more(self) -> None:
        """Do not try to reach the server again when it is lost: the service has ended."""
        self._retry_secs = 0.0

    def drop(self) -> None:
        """Close the connection; the next request makes another one."""
        with self._lock:
            self._drop()

    def another(self) -> "Connection":
        """Return another connection of the same client to the same server."""
        return Connection(self.address, self._identity, self._start_timeout_secs, self._retry_secs, self._tls)

    def abort(self) -> None:
        """Close the connection, whatever another thread waits for there."""
        self._is_closed, connection = True, self._socket
        if connection:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS changes what another thread reads

    def close(self) -> None:
        """Close the connection, and say that nothing more comes: no other worker has to wait for this one."""
        self._is_closed = True
        with self._lock:
            if self._socket:
                with contextlib.suppress(OSError):
                    messages.send(self._socket, Message({"method": LEAVE}))
            self._drop()

    def _answer(self, message: Message, into: Mapping[str, Array] | None) -> Message:
        began, pause, was_known = time.monotonic(), _FIRST_PAUSE_SECS, bool(self.server)
        while True:
            try:
                return self._once(message, into)
            except OSError as error:
                self._drop()
                if self._is_closed:
                    raise ServiceError("the client was closed while it waited for an answer.") from None
                limit, secs = self._retry_secs if was_known else self._start_timeout_secs, time.monotonic() - began
                if secs + pause > limit:
                    raise self._lost(error, secs, message.metadata["method"] if was_known else "") from None
            time.sleep(_shortened(pause))
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)

    def _lost(self, error: OSError, secs: float, method: str) -> Exception:
        why = f"{self.address}: no answer for {secs:.0f} s ({error.strerror or error})"
        if not method:
            return ClusterFormError(f"{why}: is the service started there?")
        unknown = ": it is not known whether the last request was carried out" if method in _CHANGE else ""
        return PeerLostError(f"{why}{unknown}.")

    def _once(self, message: Message, into: Mapping[str, Array] | None) -> Message:
        connection = self._socket or self._open()
        try:
            messages.send(connection, message)
        except OSError as error:
            return _last_answer(connection, error)
        assert self._source
        return _received(self._source, self._buffers.take, into)

    def _check_alive(self) -> None:
        """Check that the server still answers, on another connection: a frozen one acknowledges, and nothing more.

        Raises:
            OSError: If it does not.
            ServiceError: If it is another one now.
        """
        self._greeted()[0].close()

    def _open(self) -> socket.socket:
        self._socket, self.server = self._greeted()
        self._source = Buffered(Attentive(self._socket, TCP_TIMEOUT_SECS, self._check_alive))
        return self._socket

    def _greeted(self) -> tuple[socket.socket, Mapping[str, str]]:
        """Return a new connection, and what the server says of itself.

        Raises:
            OSError: If that fails.
            ServiceError: If the server refuses this client, or is another one than before.
        """
        raw = made = socket.create_connection(split(self.address), timeout=_CONNECT_SECS)
        try:
            prepare(raw)
            made = self._secured(raw)
            own = self._identity
            said = {"client": own.client, "worker": str(own.worker), "token": own.token, "release": own.release}
            messages.send(made, Message({"method": "hello", "protocol": PROTOCOL, **said}))
            server = _checked(_received(made, Buffers().take)).metadata
            made.settimeout(None)
            return made, {**server, "run": self._same_run(server)}
        except BaseException:
            made.close()
            raise

    def _same_run(self, server: Mapping[str, str]) -> str:
        """Return the run of a server, if it is the one that it was before.

        Raises:
            ServiceError: If it is not.
        """
        if not server.keys() >= {"run", "task", "num_ps"} or not server["num_ps"].isdecimal():
            raise ProtocolError(f"{self.address} has answered, and is no server of a parameter service.")
        before, run, again = self.server.get("run", ""), server["run"], f"{self.address}: the service was started again"
        if before and run and before != run and self._identity.checks_run:
            raise ServiceError(f"{again}, as another run: connect again.")
        if self.server and server["num_ps"] != self.server["num_ps"]:
            raise ServiceError(f"{again}, with {plural(int(server['num_ps']), 'server')}: connect again.")
        if self.server and server["task"] != self.server["task"]:
            raise ServiceError(f"{again}, and this is {server['task']} now, not {self.server['task']}: connect again.")
        return run or before

    def _secured(self, raw: socket.socket) -> socket.socket:
        """Return a new connection, encrypted if that is wanted."""
        if self._tls is None:
            return raw
        from tfps.client import tls  # noqa: PLC0415  slow to import, and only some need it

        return tls.encrypted(raw, self._tls, self.address)

    def _drop(self) -> None:
        if self._socket:
            self._socket.close()
        self._socket = None


def _shortened(pause: float) -> float:
    """Return a pause of a random length, up to a half shorter, so that many clients do not come together."""
    import random  # noqa: PLC0415  slow to import, and seldom needed

    return pause * random.uniform(0.5, 1.0)  # noqa: S311


def prepare(connection: socket.socket) -> None:
    """Let a connection send without delay, and end when the other machine is silent for long."""
    every = int(TCP_TIMEOUT_SECS / 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", every), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * TCP_TIMEOUT_SECS))


def _last_answer(connection: socket.socket, error: OSError) -> Message:
    """Return what the server has answered before it closed the connection, as it wants no more of a message.

    Raises:
        OSError: The error, if there is no answer.
    """
    with contextlib.suppress(OSError, ProtocolError):
        connection.settimeout(_CONNECT_SECS)
        return _received(connection, Buffers().take)
    raise error


def _received(source: Source, take: receive.Take, into: Mapping[str, Array] | None = None) -> Message:
    answer = receive.receive(source, take, into)
    if answer is None:
        raise ConnectionResetError("the connection was closed")
    return answer


def _checked(answer: Message) -> Message:
    """Return an answer, or raise the error that it is."""
    if "error" in answer.metadata:
        raise ERRORS.get(answer.metadata["error"], ServiceError)(answer.metadata.get("message", "refused"))
    return answer
