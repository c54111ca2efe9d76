"""Give TensorFlow's requests ids that do not repeat.

Each request between tasks carries a random id. A task rejects an id that is among the last 100,000 it has seen, as a
repeated request (tensorflow/core/distributed_runtime/recent_request_ids.cc). But the id of a run is the first number of
a generator. Each of the master's short-lived threads seeds its generator again, with 32 bits (``ThreadLocalNew64`` in
tsl's random.cc). So one of 43,000 runs is rejected although it is new. A worker may thus reject its own part of a run
before the master has asked a PS for the others. That PS then waits without end, because a part that is requested after
the rejection is never canceled (``RunManyGraphs`` in master_session.cc). In a job with 100 runs a second that happened
within an hour.

So this module redirects the calls of that function to ``New64`` beside it, the one generator of a process. It changes
the entry in the table of procedures that libtensorflow_cc calls in other libraries (ELF's ``DT_JMPREL``). On a release
or machine with another layout it does nothing.
"""

import ctypes
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfps.runtime.process.tf_rendezvous import CC, FRAMEWORK, loaded

_REPEATS, _DOES_NOT = "_ZN3tsl6random16ThreadLocalNew64Ev", "_ZN3tsl6random5New64Ev"
_PLTRELSZ, _STRTAB, _SYMTAB, _STRSZ, _JMPREL = 2, 5, 6, 10, 23  # tags of a dynamic section
_RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SYMBOL_SIZE, _SYMBOL_SHIFT = 24, 32

log = logging.getLogger(__name__)


class _Dynamic(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


class _LinkMap(ctypes.Structure):
    """The beginning of ``struct link_map``, which a handle of ``dlopen`` points to."""

    _fields_ = (("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("dynamic", ctypes.POINTER(_Dynamic)))


def make_unique() -> None:
    """Make the ids of this process's requests unique; TensorFlow must be loaded."""
    try:
        framework = loaded(ctypes.CDLL, FRAMEWORK)
        old, new = (ctypes.cast(framework[name], ctypes.c_void_p).value for name in (_REPEATS, _DOES_NOT))
        slot = slot_of(loaded(ctypes.CDLL, CC), _REPEATS)
    except (OSError, AttributeError, KeyError, ValueError) as error:
        log.debug("TensorFlow may reject requests as duplicates: %s", error)
        return
    log.debug("requests have unique ids instead of the ids of %#x", old or 0)
    slot.value = new


def slot_of(library: Any, name: str) -> Any:
    """Return where a library keeps the address of another library's function that it calls: a ``ctypes.c_void_p``.

    Raises:
        KeyError, ValueError: If it does not call the function, or the address cannot be changed.
    """
    link = ctypes.cast(library._handle, ctypes.POINTER(_LinkMap)).contents
    tags = _tags(link)
    calls = _array(tags[_JMPREL], tags[_PLTRELSZ] // _RELOCATION.itemsize, _RELOCATION)
    symbols = (calls["info"] >> _SYMBOL_SHIFT).astype(np.int64)
    last = int(symbols.max()) + 1
    starts = _array(tags[_SYMTAB], last * _SYMBOL_SIZE // 4, np.dtype("<u4"))[:: _SYMBOL_SIZE // 4]
    names = starts[symbols].astype(np.int64)
    text = _array(tags[_STRTAB], tags[_STRSZ], np.dtype("u1"))
    found = np.arange(len(names))
    for place, letter in enumerate(name.encode() + b"\0"):
        found = found[text[np.minimum(names[found] + place, len(text) - 1)] == letter]
    if len(found) != 1:
        raise ValueError(f"{len(found)} calls of {name}")
    address = link.base + int(calls["offset"][found[0]])
    if not _is_writable(address):
        raise ValueError(f"the call of {name} cannot be changed")
    return ctypes.c_void_p.from_address(address)


def _tags(link: _LinkMap) -> Mapping[int, int]:
    """Return a library's dynamic section, with absolute addresses."""
    found: dict[int, int] = {}
    for entry in iter(_entries(link.dynamic)):
        moved = entry.tag in (_STRTAB, _SYMTAB, _JMPREL) and entry.value < link.base
        found[entry.tag] = entry.value + (link.base if moved else 0)
    return found


def _entries(dynamic: Any) -> Any:
    index = 0
    while dynamic[index].tag:
        yield dynamic[index]
        index += 1


def _array(address: int, count: int, dtype: Any) -> Any:
    """Return memory of this process as an array, without a copy."""
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, _, end = span.partition("-")
        if int(first, 16) <= address < int(end, 16):
            return "w" in rights
    return False
