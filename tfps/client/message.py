"""The messages between a client and a parameter service: each is one safetensors file, header and arrays.

A message, in bytes (https://github.com/huggingface/safetensors, "Format")::

    8               the size N of the header: unsigned, little-endian
    N               the header: JSON, padded with blanks to a multiple of 8
    the rest        the arrays, one after the other, in row-major order and little-endian

    {"__metadata__": {"method": "push", "id": "7"},
     "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

All values of ``__metadata__`` are texts. The arrays follow each other without gaps, so the header tells where a message
ends. A receiver may look at the header before it makes room for the arrays. Nothing that is received is executed.
"""

import json
import math
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tfps.errors import ProtocolError

Array = np.ndarray[Any, np.dtype[Any]]  # as in numpy.typing, which is slow to import
DTYPES: Mapping[str, str] = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"},
}
_NATIVE = {name: np.dtype(kind).newbyteorder("=") for name, kind in DTYPES.items()}
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}  # as they are sent
SIZE = struct.Struct("<Q")
"""The size of a header, with which a message begins."""
_MOST_DIMENSIONS, _ALIGNED = 32, 8
_MOST_JOINED = 64 << 10  # a copy of so much is cheaper than a further system call
_METADATA = "__metadata__"
_BEGIN = f'{{"{_METADATA}":'
_MOST_CACHED_BYTES, _ENTRY_BYTES = 32 << 10, 64  # of a header that is kept; of an entry without its name
_as_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_read_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the shape of an array: what is announced of it.

    Attributes:
        dtype: The NumPy dtype, in the machine's byte order.
        shape: The shape.
        is_buffer: Whether it is the value of a buffer, and no parameter that is trained, or gradient of one.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    is_buffer: bool = False

    @cached_property
    def num_bytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]{' of a buffer' if self.is_buffer else ''}"

    def fits(self, array: Array, is_buffer: bool = False) -> bool:
        """Return whether this is what there is to announce of an array."""
        return (array.dtype, array.shape, is_buffer) == (self.dtype, self.shape, self.is_buffer)

    @classmethod
    def of(cls, array: Array, is_buffer: bool = False) -> "TensorSpec":
        """Return what there is to announce of an array."""
        return cls(array.dtype, array.shape, is_buffer)


@dataclass(frozen=True)
class Header:
    """What a message announces.

    Attributes:
        metadata: Texts by name.
        tensors: The arrays that follow, by name, in their order.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorSpec]

    @cached_property
    def num_bytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(spec.num_bytes for spec in self.tensors.values())


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        metadata: Texts by name.
        tensors: Arrays by name; any order, as long as NumPy can make them contiguous.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, Array] = field(default_factory=dict)


def encode(message: Message) -> list[memoryview]:
    """Return a message as buffers to send one after the other: the header, and each array without a copy of it.

    Raises:
        ProtocolError: If an array has a dtype that the format lacks.
    """
    arrays = {name: _little(name, array) for name, array in message.tensors.items()}
    known = _known_entries if sum(len(name) + _ENTRY_BYTES for name in arrays) <= _MOST_CACHED_BYTES else _entries
    entries = known(tuple((name, array.dtype, array.shape) for name, array in arrays.items()))
    try:
        header = (_BEGIN + _as_json(dict(message.metadata)) + entries).encode()
    except UnicodeEncodeError as error:
        wrong = error.object[error.start : error.end]
        raise ProtocolError(f"{wrong!r} cannot be sent: it is no Unicode text.") from None
    header += b" " * (-len(header) % _ALIGNED)
    bodies = [array.reshape(-1).data.cast("B") for array in arrays.values() if array.nbytes]
    return [memoryview(SIZE.pack(len(header)) + header), *bodies]


def _entries(arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> str:
    """Return what a header has after the metadata: the entries of arrays, given as name, dtype and shape."""
    entries, offset = {}, 0
    for name, dtype, shape in arrays:
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return f",{_as_json(entries)[1:]}" if entries else "}"


def _little(name: str, array: Array) -> Array:
    """Return an array as it is sent: contiguous and little-endian; the same one if it is so already."""
    if array.dtype in _NAMES and array.flags.c_contiguous:
        return array
    try:
        kind = DTYPES[_NAMES[array.dtype.newbyteorder("<")]]
    except KeyError:
        known = ", ".join(np.dtype(kind).name for kind in DTYPES.values())
        raise ProtocolError(f"{name}: dtype {array.dtype} cannot be sent; known are {known}.") from None
    little: Array = np.ascontiguousarray(array, np.dtype(kind)).reshape(array.shape)
    return little


def send(to: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: If the connection fails.
        ProtocolError: If an array has a dtype that the format lacks.
    """
    small: list[memoryview] = []
    for buffer in encode(message):
        if len(buffer) > _MOST_JOINED:
            _flush(to, small)
            to.sendall(buffer)
        else:
            small.append(buffer)
    _flush(to, small)


def _flush(to: socket.socket, small: list[memoryview]) -> None:
    """Send some small buffers together, and forget them."""
    if small:
        to.sendall(b"".join(small))
        small.clear()


def parsed(content: bytes) -> Header:
    """Return the header of a message, of whose text this is the UTF-8 form.

    Raises:
        ProtocolError: If it is none.
    """
    try:
        metadata, tensors = _parts(content.decode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a header cannot be read ({type(error).__name__}: {error}): no message of tfps.") from None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ProtocolError("a header cannot be read (metadata): no message of tfps.")
    return Header(metadata, tensors)


def _parts(text: str) -> tuple[Any, Mapping[str, TensorSpec]]:
    """Return the metadata of a header, and what it announces."""
    if len(text) <= _MOST_CACHED_BYTES and text.startswith(_BEGIN + "{") and _METADATA not in text[len(_BEGIN) :]:
        metadata, end = _read_json(text, len(_BEGIN))
        if text.startswith(',"', end):
            return metadata, _known_specs("{" + text[end + 1 :])
    entries = json.loads(text)
    return entries.pop(_METADATA, {}), dict(_specs(entries))


_known_entries = lru_cache(maxsize=16)(_entries)  # a training loop sends the same arrays again and again
_known_specs = lru_cache(maxsize=16)(lambda entries: dict(_specs(json.loads(entries))))


def _specs(entries: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, TensorSpec]]:
    offset = 0
    for name, entry in entries.items():
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not (isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS and _are_sizes(shape)):
            raise ValueError(f"shape of {name}")
        spec = TensorSpec(_NATIVE[str(dtype)], tuple(shape))
        if offsets != [offset, offset + spec.num_bytes]:
            raise ValueError(f"data_offsets of {name}")
        offset += spec.num_bytes
        yield name, spec


def _are_sizes(shape: Sequence[object]) -> bool:
    sizes = [size for size in shape if isinstance(size, int) and not isinstance(size, bool) and size >= 0]
    return len(sizes) == len(shape) and math.prod(size or 1 for size in sizes) < 1 << 59  # as of empty arrays of NumPy
