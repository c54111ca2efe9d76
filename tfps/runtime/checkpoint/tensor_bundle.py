"""Read from a checkpoint's index how many data files it has, and the least size of each.

The format is TensorFlow's own (tensorflow/core/util/tensor_bundle, tensorflow/core/lib/io/format.cc), read without
TensorFlow, whose import takes seconds. The index is a table like LevelDB's, in blocks with a checksum each. The empty
key holds a BundleHeaderProto, and each other key a BundleEntryProto with the place of a tensor's bytes.
"""

import functools
import struct
from collections.abc import Iterator, Sequence

_FOOTER_BYTES = 48
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_NUM_SHARDS = 1  # field number in BundleHeaderProto
_SHARD_ID, _OFFSET, _SIZE = 3, 4, 5  # field numbers in BundleEntryProto


def data_sizes(index: bytes) -> list[int]:
    """Return for each shard how many bytes of its data file are used; 0 if the file is not needed.

    Args:
        index: The contents of an ``.index`` file.

    Raises:
        ValueError: If it is garbled; the text gives the reason.
    """
    try:
        entries = {key: _numbers(value) for key, value in _entries(index)}
        sizes = [0] * entries.pop(b"")[_NUM_SHARDS]
        for entry in entries.values():
            shard = entry.get(_SHARD_ID, 0)
            sizes[shard] = max(sizes[shard], entry.get(_OFFSET, 0) + entry.get(_SIZE, 0))
    except (LookupError, OverflowError, struct.error):
        raise ValueError("it is truncated, or not an index") from None
    return sizes


def _entries(index: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table; its last block holds the places of the others."""
    footer = index[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise ValueError("it does not end like an index")
    _, at = _varints(footer, 0, 2)  # the place of the meta block, which is empty
    (offset, size), _ = _varints(footer, at, 2)
    for _, place in _block(index, offset, size):
        yield from _block(index, *_varints(place, 0, 2)[0])


def _block(index: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block; a key is stored as its difference from the one before."""
    content = index[offset : offset + size]
    kind, checksum = struct.unpack_from("<BI", index, offset + size)
    if kind or _masked(_crc32c(content + bytes([kind]))) != checksum:
        raise ValueError("a checksum in it does not match")
    [restarts] = struct.unpack_from("<I", content, size - 4)
    key, at = b"", 0
    while at < size - 4 * (restarts + 1):
        (shared, fresh, length), at = _varints(content, at, 3)
        key = key[:shared] + content[at : at + fresh]
        at += fresh + length
        yield key, content[at - length : at]


def _numbers(message: bytes) -> dict[int, int]:
    """Return the integer fields of a protocol buffer, by number."""
    found, at = {}, 0
    while at < len(message):
        [tag], at = _varints(message, at, 1)
        if tag & 7 in (0, 2):
            [value], at = _varints(message, at, 1)
            found[tag >> 3] = value
            at += value if tag & 7 == 2 else 0
        else:
            at += {1: 8, 5: 4}[tag & 7]
    return found


def _varints(data: bytes, at: int, count: int) -> tuple[Sequence[int], int]:
    """Return ``count`` numbers of seven bits per byte, and the position after them."""
    numbers = []
    for _ in range(count):
        number = shift = 0
        while data[at] & 0x80:
            number |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        numbers.append(number | data[at] << shift)
        at += 1
    return numbers, at


@functools.cache
def _table() -> Sequence[int]:
    """Return the CRC-32C (Castagnoli) of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table


def _crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """Return a checksum as it is stored (tensorflow/core/lib/hash/crc32c.h)."""
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
