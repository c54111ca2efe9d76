"""Freed memory is kept for the next step, in large pages, on Linux with glibc.

Each step takes and frees the same tensors. By default glibc gives large ones back to the system at once and asks for
them anew, and the system clears every page again: for a large model that costs nearly as much as sending it. It also
keeps a heap for each of many threads, whose free parts do not serve the others.

A large model has many pages of 4 kB, each of which is cleared and looked up by itself. Where the system gives pages of
2 MB to who asks for them (``transparent_hugepage`` is ``madvise``), the heap asks.

Does not import TensorFlow.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = -1  # as a size: the largest
_MOST = 2**25  # bytes: what an old glibc takes as _MMAP_THRESHOLD at most
_MADV_HUGEPAGE, _LARGE = 14, 2**21  # sys/mman.h
_TUNABLES = "GLIBC_TUNABLES"
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def keep_freed(heaps: int) -> bool:
    """Let this process keep what it frees, in at most so many heaps for its threads; return whether that was done.

    Call it from the main thread, whose heap it is, before there are others. Not where the user has set glibc's own
    variables (``MALLOC_ARENA_MAX``, ``GLIBC_TUNABLES``), nor with another allocator.
    """
    libc = _libc()
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    large = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _MOST)
    return bool(large and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_ARENA_MAX, heaps))


def ask_for_large_pages() -> None:
    """Ask for large pages where the heap will grow; again when protobuf, which trims the heap, has freed much.

    The heap grows by half of the machine's memory, none of which is used, and is told what to take when it is.
    """
    libc = _libc()
    if libc is None or _is_counted():
        return
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if room := libc.malloc(size):
        first = -(-room // _LARGE) * _LARGE
        libc.madvise(first, room + size - first, _MADV_HUGEPAGE)
        libc.free(room)


def _libc() -> Any:
    """Return the C library, or ``None`` where there is none, or the user has told it how to keep memory."""
    told = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get(_TUNABLES, "")
    return ctypes.CDLL(None) if os.name == "posix" and not told else None


def _is_counted() -> bool:
    """Return whether memory that is asked for and not used counts: for the system, or for a limit of this process."""
    if not _OVERCOMMIT.exists() or _OVERCOMMIT.read_text().strip() == "2":
        return True
    import resource  # noqa: PLC0415  not on Windows

    limits = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_DATA)
    return any(soft != resource.RLIM_INFINITY for soft, _ in limits)
