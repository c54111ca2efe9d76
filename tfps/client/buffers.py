"""Memory for large arrays that arrive again and again: used another time when nobody has the array any more.

New memory costs about as much as what it receives: the system clears each page at its first use. An array is free when
its memory has no other reference, so this needs CPython's reference counts; elsewhere, each array has new memory.
"""

import sys
import threading
from collections.abc import Sequence

import numpy as np

from tfps.client.message import Array

_LEAST_BYTES = 1 << 18  # smaller memory is reused by the allocator
_MOST_BYTES = 256 << 20  # that is kept
_ALIGNED = 64  # TensorFlow shares no other memory


class Buffers:
    """Memory for the arrays of one side of a connection, or of all connections of a server. Threads may share it."""

    def __init__(self) -> None:
        self._kept: list[Array] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Array:
        """Return memory of so many bytes, uint8 [num_bytes], with any content."""
        if num_bytes < _LEAST_BYTES:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            memory = self._free(num_bytes)
            if memory is None:
                memory = np.empty(num_bytes + _ALIGNED, np.uint8)
                self._keep(memory)
        start = -memory.ctypes.data % _ALIGNED
        return memory[start : start + num_bytes]

    def _free(self, num_bytes: int) -> Array | None:
        """Return memory of that size that nobody uses."""
        counts = zip(self._kept, _references(self._kept), strict=True)
        size = num_bytes + _ALIGNED
        return next((memory for memory, count in counts if memory.nbytes == size and count == _FREE), None)

    def _keep(self, memory: Array) -> None:
        """Keep new memory, instead of what is free of other sizes if there is too much."""
        if sum(each.nbytes for each in self._kept) + memory.nbytes > _MOST_BYTES:
            counts = _references(self._kept)
            self._kept = [each for each, count in zip(self._kept, counts, strict=True) if count != _FREE]
        if sum(each.nbytes for each in self._kept) + memory.nbytes <= _MOST_BYTES:
            self._kept.append(memory)


def _references(kept: Sequence[Array]) -> list[int]:
    """Return how many references there are to each memory; an array that is a part of it is one."""
    return [sys.getrefcount(memory) for memory in kept]


[_FREE] = _references([np.empty(1, np.uint8)])  # by nothing but the list
