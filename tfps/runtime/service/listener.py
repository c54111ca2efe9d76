"""The connections of a server: a thread each. Whatever arrives, the server goes on."""

import contextlib
import errno
import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping

from tfps.client import message as messages
from tfps.client import receive
from tfps.client.buffers import Buffers
from tfps.client.connection import LEAVE, PROTOCOL, prepare
from tfps.client.message import Message
from tfps.client.sources import Buffered, Hurried, Source
from tfps.errors import ProtocolError, ServiceError, TfpsError
from tfps.runtime.service.server import Server
from tfps.runtime.service.session import FIRST_SERVER, Session
from tfps.text import one_line

_HELLO_SECS, _MOST_HELLO_BYTES = 10.0, 64 << 10
_BACKLOG = 1024
_STACK_BYTES = 512 << 10
_PAUSE_SECS = 0.2
_TLS = b"\x16\x03\x01", b"\x16\x03\x02", b"\x16\x03\x03"  # handshakes; no header of a hello has such a size
_MOST_FIRST_BYTES = 64 << 10
_HAS_NO_TLS = "this service has no TLS: connect without it, or give the servers --tls_cert and --tls_key."
_NEEDS_TLS = "this service has TLS: set TFPS_TLS_CA to the authority's certificate, or give tls=."
_MOST_DIGITS = 9  # of the index of a worker
_CLOSED = (errno.EBADF, errno.EINVAL)

log = logging.getLogger(__name__)


class Listener:
    """Listens on an address.

    Args:
        server: What answers.
        listening: The socket, which listens.
        token: The secret that clients must know; empty for none.
        tls: How to encrypt; ``None`` for not at all.
    """

    def __init__(
        self, server: Server, listening: socket.socket, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._server, self._listening, self._token, self._tls = server, listening, token, tls
        self._open: set[socket.socket] = set()
        self._lock, self._is_over, self._buffers = threading.Lock(), False, Buffers()

    @property
    def has_connections(self) -> bool:
        """Whether a connection is open."""
        return bool(self._open)

    def start(self) -> None:
        """Accept connections, in the background."""
        threading.stack_size(_STACK_BYTES)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Close all connections, and accept no more."""
        self._is_over = True
        self._server.stop()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would change what a thread reads

    def _accept(self) -> None:
        while not self._is_over:
            try:
                connection, address = self._listening.accept()
            except OSError as error:
                if self._is_over or error.errno in _CLOSED:
                    return
                time.sleep(_PAUSE_SECS)  # as without a free file handle, or if the client is gone
                continue
            thread = threading.Thread(target=self._serve, args=(connection, f"{address[0]}:{address[1]}"), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no further thread
                connection.close()

    def _serve(self, raw: socket.socket, who: str) -> None:
        """Serve one connection to its end."""
        connection = raw
        try:
            prepare(raw)
            raw.settimeout(_HELLO_SECS)
            connection = self._secured(raw)
            with self._lock:
                self._open.add(connection)
            session = self._greet(connection)
            if session:
                connection.settimeout(None)
                self._talk(connection, session)
        except (OSError, ProtocolError) as error:
            log.info("a connection from %s ended: %s", who, error)
        except Exception:
            log.exception("a connection from %s ended", who)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _secured(self, raw: socket.socket) -> socket.socket:
        """Return a new connection, encrypted if the service is.

        Raises:
            ProtocolError: If only one of client and service has TLS; the client gets an answer that says so.
            OSError: If the connection fails, or the client does not accept the certificate.
        """
        first = _first_bytes(raw)
        if first and first.startswith(_TLS) != (self._tls is not None):
            _refuse(raw, _NEEDS_TLS if self._tls else _HAS_NO_TLS)
            raise ProtocolError("the client speaks no TLS" if self._tls else "the client speaks TLS")
        return self._tls.wrap_socket(raw, server_side=True) if self._tls else raw

    def _greet(self, connection: socket.socket) -> Session | None:
        """Exchange what both say of themselves; return ``None`` if the client is refused."""
        header = receive.receive_header(Hurried(connection, _HELLO_SECS), _MOST_HELLO_BYTES)
        if header is None:
            return None
        _check_hello(header)
        said = header.metadata
        if problem := self._problem(said):
            messages.send(connection, _refusal(ServiceError(problem)))
            return None
        messages.send(connection, Message({**self._server.about(), "protocol": PROTOCOL}))
        return Session(said["client"], int(said["worker"]), connection)

    def _problem(self, said: Mapping[str, str]) -> str:
        if said.get("protocol") != PROTOCOL:
            given = f"the client speaks protocol {said.get('protocol')} (tfps {said.get('release')})"
            return f"{given}, and this service {PROTOCOL}: use the same release."
        token = said.get("token", "").encode(errors="surrogatepass")
        if not hmac.compare_digest(token, self._token.encode()):
            return "the token is wrong: give that of the service (TFPS_TOKEN)."
        worker = said.get("worker", "")
        if not said.get("client") or not (worker.isascii() and worker.isdecimal() and len(worker) <= _MOST_DIGITS):
            return "a client has a name, and the index of a worker."
        if said["client"] == FIRST_SERVER and not self._server.index:
            return f"a client cannot have the name of the first server, {FIRST_SERVER}."
        return ""

    def _talk(self, connection: socket.socket, session: Session) -> None:
        self._server.joined(session)
        source = Buffered(connection)
        try:
            while (header := receive.receive_header(source)) is not None:
                if header.metadata.get("method") == LEAVE:
                    session.has_left = True
                    return
                messages.send(connection, self._answer(connection, source, header, session))
        finally:
            self._server.left(session)

    def _answer(self, connection: socket.socket, source: Source, header: messages.Header, session: Session) -> Message:
        try:
            self._server.accept(header, session)
        except TfpsError as error:
            if header.num_bytes > _SKIPPED_BYTES:
                messages.send(connection, _refusal(error))
                raise ProtocolError(f"{header.num_bytes:,} bytes were announced and refused") from None
            receive.skip_tensors(source, header)
            return _refusal(error)
        request = Message(header.metadata, receive.receive_tensors(source, header, self._buffers.take))
        try:
            return self._server.answer(request, session)
        except TfpsError as error:
            return _refusal(error)
        except ConnectionError:  # the client is gone
            raise
        except KeyError as error:
            return _refusal(ProtocolError(f"{request.metadata.get('method')}: {error} is missing."))
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            log.debug("a request cannot be read", exc_info=True)
            return _refusal(ProtocolError(f"{type(error).__name__}: {error}: the request cannot be read."))
        except Exception as error:
            log.exception("a request failed")
            return _refusal(ServiceError(f"the server failed: {type(error).__name__}: {one_line(str(error))}."))


_SKIPPED_BYTES = 256 << 20  # more is not read to its end when it is refused: the connection ends instead


def _first_bytes(raw: socket.socket) -> bytes:
    """Return the first bytes of a connection, which stay to be read; fewer if it ends, or they come too slowly."""
    deadline = time.monotonic() + _HELLO_SECS
    while 0 < len(first := raw.recv(3, socket.MSG_PEEK)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return first


def _refuse(raw: socket.socket, why: str) -> None:
    """Say why a client is refused that speaks something else, in this service's own format, and without TLS."""
    raw.recv(_MOST_FIRST_BYTES)
    messages.send(raw, _refusal(ServiceError(why)))
    raw.shutdown(socket.SHUT_WR)
    raw.settimeout(1.0)
    raw.recv(_MOST_FIRST_BYTES)  # to close a connection with bytes to read would take back what was sent


def _check_hello(header: messages.Header) -> None:
    if header.metadata.get("method") != "hello" or header.tensors:
        raise ProtocolError("the first message is no hello")


def _refusal(error: Exception) -> Message:
    return Message({"error": type(error).__name__, "message": str(error)})
