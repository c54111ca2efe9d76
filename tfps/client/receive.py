"""Messages as they arrive: first the header, so that a receiver may refuse what it announces, then the arrays."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from tfps.client.message import SIZE, Array, Header, Message, parsed
from tfps.client.sources import Source
from tfps.errors import ProtocolError

MOST_HEADER_BYTES = 16 << 20
_SHARED_BYTES = 64 << 10  # arrays of a message up to this size have one memory
_Memory = TypeVar("_Memory", bytearray, memoryview)
Take = Callable[[int], Array]
"""Returns memory of so many bytes, uint8 [n]."""
_new: Take = partial(np.empty, dtype=np.uint8)


def receive_header(source: Source, most_bytes: int = MOST_HEADER_BYTES) -> Header | None:
    """Receive the header of a message; ``None`` if the connection has ended between two messages.

    Args:
        source: The connection.
        most_bytes: How large it may be.

    Raises:
        OSError: If the connection fails, or ends within the header.
        ProtocolError: If what arrives is no such header.
    """
    size = memoryview(bytearray(SIZE.size))
    count = source.recv_into(size)
    if not count:
        return None
    _received(source, size[count:])
    length = SIZE.unpack(size)[0]
    if not 2 <= length <= most_bytes:
        raise ProtocolError(f"a header of {length:,} bytes is announced: this is no message of tfps.")
    content = bytearray()
    while len(content) < length:  # in parts: only what has arrived takes memory
        content += _received(source, bytearray(min(length - len(content), 1 << 20)))
    return parsed(bytes(content))


def receive(source: Source, take: Take = _new, into: Mapping[str, Array] | None = None) -> Message | None:
    """Receive a message; ``None`` if the connection has ended between two messages.

    Args:
        source: The connection.
        take: Returns memory of so many bytes.
        into: Arrays by name, contiguous. If all that are announced are among them, with the same dtypes and shapes,
            they are received there, without a copy.

    Raises:
        OSError: If the connection fails, or ends within a message.
        ProtocolError: If what arrives is no message.
    """
    header = receive_header(source)
    if header is None:
        return None
    if into and _is_among(header, into):
        return Message(header.metadata, {name: _filled(source, into[name]) for name in header.tensors})
    return Message(header.metadata, receive_tensors(source, header, take))


def receive_tensors(source: Source, header: Header, take: Take = _new) -> Mapping[str, Array]:
    """Receive the arrays that a header announces, in memory that ``take`` returns; small ones share it.

    Raises:
        OSError: If the connection fails, or ends within them.
    """
    shared = _received(source, take(header.num_bytes).data) if header.num_bytes <= _SHARED_BYTES else None
    found, end = {}, 0
    for name, spec in header.tensors.items():
        begin, end = end, end + spec.num_bytes
        memory = _received(source, take(spec.num_bytes).data) if shared is None else shared[begin:end]
        array: Array = np.ndarray(spec.shape, spec.dtype.newbyteorder("<"), memory)
        found[name] = array.astype(spec.dtype, copy=not array.flags.aligned)
    return found


def _is_among(header: Header, arrays: Mapping[str, Array]) -> bool:
    """Return whether arrays can take what a header announces, byte by byte."""
    is_native = sys.byteorder == "little"
    return is_native and all(name in arrays and spec.fits(arrays[name]) for name, spec in header.tensors.items())


def _filled(source: Source, array: Array) -> Array:
    """Return an array when it is full of what has arrived."""
    if array.nbytes:
        _received(source, array.reshape(-1).data.cast("B"))
    return array


def skip_tensors(source: Source, header: Header) -> None:
    """Receive the arrays that a header announces, and forget them.

    Raises:
        OSError: If the connection fails, or ends within them.
    """
    left, buffer = header.num_bytes, bytearray(1 << 16)
    while left:
        part = memoryview(buffer)[: min(left, len(buffer))]
        _received(source, part)
        left -= len(part)


def _received(source: Source, buffer: _Memory) -> _Memory:
    """Return memory when it is full of what has arrived."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = source.recv_into(view[done:])
        if not count:
            raise ConnectionResetError("the connection ended within a message")
        done += count
    return buffer
