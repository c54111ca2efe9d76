"""Arrow Flight: a message is a record batch of one column, exchanged on a stream that stays open."""

import pyarrow as pa
from pyarrow import flight

from wires.security import Security
from wires.store import Array, Store


def _batch(array: Array) -> pa.RecordBatch:
    return pa.record_batch([pa.array(array)], names=["values"])


def _address(port: int, security: Security) -> str:
    return f"grpc{'+tls' if security.is_encrypted else ''}://127.0.0.1:{port}"


class _Check(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        self._token = token

    def start_call(self, info, headers) -> None:  # type: ignore[no-untyped-def]
        """Refuse a call with another token."""
        del info
        if headers.get("authorization") != [self._token]:
            raise flight.FlightUnauthenticatedError("token")


class _Server(flight.FlightServerBase):
    def __init__(self, port: int, security: Security) -> None:
        pair = [(security.cert.read_bytes(), security.key.read_bytes())] if security.is_encrypted else None
        check = {"token": _Check(security.token)}
        super().__init__(_address(port, security), tls_certificates=pair, middleware=check)
        self._store = Store()

    def do_exchange(self, context, descriptor, reader, writer) -> None:  # type: ignore[no-untyped-def]
        """Answer each batch with the sum."""
        del context
        name, begun = descriptor.command.decode(), False
        for chunk in reader:
            total = _batch(self._store.push_pull(name, chunk.data.column(0).to_numpy()))
            if not begun:
                writer.begin(total.schema)
                begun = True
            writer.write_batch(total)


def serve(port: int, security: Security) -> None:
    """Serve for ever."""
    _Server(port, security).serve()


class Client:
    """One connection, with a stream for each name."""

    def __init__(self, port: int, security: Security) -> None:
        roots = security.cert.read_bytes() if security.is_encrypted else None
        self._client = flight.connect(_address(port, security), tls_root_certs=roots)
        self._options = flight.FlightCallOptions(headers=[(b"authorization", security.token.encode())])
        self._streams: dict[str, tuple[flight.FlightStreamWriter, flight.FlightStreamReader]] = {}

    def push_pull(self, name: str, array: Array) -> Array:
        """Send an array, and return the sum."""
        batch = _batch(array)
        if name not in self._streams:
            descriptor = flight.FlightDescriptor.for_command(name.encode())
            writer, reader = self._client.do_exchange(descriptor, self._options)
            writer.begin(batch.schema)
            self._streams[name] = writer, reader
        writer, reader = self._streams[name]
        writer.write_batch(batch)
        total: Array = reader.read_chunk().data.column(0).to_numpy()
        return total
