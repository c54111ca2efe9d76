"""Free the rendezvous of past runs, which TensorFlow never frees.

A run of a distributed session has a rendezvous in every participating task, through which tensors pass. After the run
the master cleans up. Each task aborts that rendezvous if something still refers to it, as the end of the run itself may
for a moment. ``LocalRendezvous::StartAbort`` (tensorflow/core/framework/local_rendezvous.cc) then adds a reference to a
list, ``aborted_rendezs_``, from which nothing is ever removed. Each entry keeps about a kilobyte, and the worker's
session with it. Nothing needs the reference after the run: the rendezvous is destroyed with its last reference.

So this module takes the references out of the list, under the list's own mutex, and drops them as C++ would. It drops
them when they are a minute old, because a callback of a run that is being canceled may still be on its way. It uses the
names that TensorFlow's libraries export. If a release lacks one of them, it does nothing.
"""

import ctypes
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EVERY_SECS = 60.0
FRAMEWORK, CC = "libtensorflow_framework.so.2", "libtensorflow_cc.so.2"
_LIST = "_ZN10tensorflow15LocalRendezvous16aborted_rendezs_E"  # std::vector<RefCountPtr<Rendezvous>>&
_MUTEX = "_ZN10tensorflow15LocalRendezvous19aborted_rendezs_mu_E"  # mutex&
_TRY_LOCK, _UNLOCK = "_ZN4absl12lts_202508145Mutex8try_lockEv", "_ZN4absl12lts_202508145Mutex6unlockEv"
_DROP = "_ZNSt10unique_ptrIN10tensorflow10RendezvousEN3tsl4core15RefCountDeleterEED2Ev"  # ~unique_ptr()

log = logging.getLogger(__name__)


class _Vector(ctypes.Structure):
    """A ``std::vector`` of pointers, as libstdc++ lays it out."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))


class Aborted:
    """The list of aborted rendezvous of this process; TensorFlow must be loaded.

    Raises:
        OSError: If TensorFlow's libraries are missing.
        AttributeError, ValueError: If they do not export the required names.
    """

    def __init__(self) -> None:
        framework, rest = loaded(ctypes.PyDLL, FRAMEWORK), loaded(ctypes.CDLL, CC)
        self._list = ctypes.cast(ctypes.c_void_p.in_dll(framework, _LIST), ctypes.POINTER(_Vector))
        self._mutex = ctypes.c_void_p.in_dll(framework, _MUTEX)
        self._try_lock, self._unlock = _of_pointer(framework, _TRY_LOCK), _of_pointer(framework, _UNLOCK)
        self._try_lock.restype = ctypes.c_bool
        self._drop = _of_pointer(rest, _DROP)

    def __len__(self) -> int:
        """Return the length of the list."""
        kept = self._list.contents
        return ((kept.end or 0) - (kept.begin or 0)) // ctypes.sizeof(ctypes.c_void_p)

    def free(self, most: int) -> int:
        """Drop the oldest references in the list, ``most`` at most; returns how many.

        Drops none if the list is in use right now: the next call takes them.
        """
        taken = self._take(most)
        for pointer in taken:
            self._drop(ctypes.byref(ctypes.c_void_p(pointer)))
        return len(taken)

    def _take(self, most: int) -> Sequence[int]:
        """Take the first references out of the list; the caller then owns them."""
        if not self._try_lock(self._mutex):
            return []
        try:
            kept = self._list.contents
            taken = (ctypes.c_void_p * min(most, len(self)))()
            size = ctypes.sizeof(taken)
            if size:
                ctypes.memmove(taken, kept.begin, size)
                kept.end -= size
                ctypes.memmove(kept.begin, kept.begin + size, kept.end - kept.begin)
            return [pointer for pointer in taken if pointer]
        finally:
            self._unlock(self._mutex)


def keep_freeing() -> None:
    """Free old references every minute while this process lives, if this release of TensorFlow allows it."""
    try:
        aborted = Aborted()
    except (OSError, AttributeError, ValueError) as error:
        log.debug("the rendezvous of past runs stay in memory: %s", error)
        return
    threading.Thread(target=_keep_freeing, args=(aborted,), daemon=True, name="rendezvous").start()


def _keep_freeing(aborted: Aborted) -> None:
    old = 0
    while True:
        time.sleep(_EVERY_SECS)
        aborted.free(old)  # those that were already there a minute ago
        old = len(aborted)


def loaded(kind: Any, name: str) -> Any:
    """Return a library that TensorFlow has loaded; calls into a ``PyDLL`` keep holding Python's lock."""
    found = importlib.util.find_spec("tensorflow")
    places = found.submodule_search_locations if found else None
    return kind(str(Path(next(iter(places or [""])), name)), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


def _of_pointer(library: Any, name: str) -> Any:
    """Return a function that takes a pointer and returns nothing."""
    function = library[name]
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function
