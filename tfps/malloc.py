"""Keep freed memory for the next step, in large pages, on Linux with glibc.

Each step of training allocates and frees the same tensors. By default glibc returns large ones to the system
immediately and requests them again, and the system clears every page again. For a large model that costs nearly as much
as sending it. glibc also keeps a heap for each of many threads, and the free parts of one heap do not serve other
threads.

A large model has many pages of 4 kB, and each is cleared and looked up separately. If the system gives pages of 2 MB on
request (``transparent_hugepage`` is ``madvise``), this module requests them for the heap.

Does not import TensorFlow.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = -1  # as a size, the largest
_MOST = 2**25  # bytes: the largest _MMAP_THRESHOLD of an old glibc
_MADV_HUGEPAGE, _LARGE = 14, 2**21  # sys/mman.h
_TUNABLES = "GLIBC_TUNABLES"
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@cache
def keep_freed(heaps: int | None = None) -> bool:
    """Keep freed memory in this process from the first call on; return whether that worked.

    Does nothing if the user has set glibc's own variables (``MALLOC_ARENA_MAX``, ``GLIBC_TUNABLES``), or with another
    allocator.

    Args:
        heaps: How many heaps there are for the threads, at most; call it before other threads exist then, from the
            main thread, which owns the main heap. By default, as many as glibc chooses.
    """
    libc = _libc()
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    large = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _MOST)
    return bool(large and mallopt(_TRIM_THRESHOLD, _NEVER) and (heaps is None or mallopt(_ARENA_MAX, heaps)))


def ask_for_large_pages() -> None:
    """Request large pages where the heap will grow; again after protobuf, which trims the heap, has freed much.

    Grow the heap by half of the machine's memory, mark that for large pages, and free it without using any of it.
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
    """Return the C library, or ``None`` if there is none or the user has configured how it keeps memory."""
    is_tuned = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get(
        _TUNABLES, ""
    )
    return ctypes.CDLL(None) if os.name == "posix" and not is_tuned else None


def _is_counted() -> bool:
    """Return whether requested but unused memory counts, for the system or for a limit of this process."""
    if not _OVERCOMMIT.exists() or _OVERCOMMIT.read_text().strip() == "2":
        return True
    import resource  # noqa: PLC0415  not on Windows

    limits = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_DATA)
    return any(soft != resource.RLIM_INFINITY for soft, _ in limits)
