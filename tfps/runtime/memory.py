"""Freed memory is kept for the next step, on Linux with glibc.

Each step takes and frees the same tensors. By default glibc gives large ones back to the system at once and asks for
them anew, and the system clears every page again: for a large model that costs nearly as much as sending it. It also
keeps a heap for each of many threads, whose free parts do not serve the others. Does not import TensorFlow.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = 2**31 - 1  # bytes
_MOST = 2**25  # bytes: what an old glibc takes as _MMAP_THRESHOLD at most


def keep_freed(heaps: int) -> bool:
    """Let this process keep what it frees, in at most so many heaps for its threads; tell whether that was done.

    Not where the user has set glibc's own variables (``MALLOC_ARENA_MAX`` and the like), nor with another allocator.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    large = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _MOST)
    return bool(large and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_ARENA_MAX, heaps))
