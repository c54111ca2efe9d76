"""TensorFlow's requests have ids of their own."""

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow.compat.v1 as tf

from tfps.runtime.process import request_ids
from tfps.runtime.process.tf_rendezvous import CC, FRAMEWORK, loaded

NAME = "_ZN3tsl6random16ThreadLocalNew64Ev"


def test_a_request_takes_its_id_from_where_it_is_reported() -> None:
    """What ``make_unique`` changes is what gives requests their ids: it can be anything, and is one of a process."""
    assert tf.__version__
    library = loaded(ctypes.CDLL, CC)
    give = library["_ZN10tensorflow18GetUniqueRequestIdEv"]
    give.restype = ctypes.c_int64
    slot, numbers = request_ids.slot_of(library, NAME), itertools.count(10**15)
    before, mine = slot.value, ctypes.CFUNCTYPE(ctypes.c_uint64)(lambda: next(numbers))
    try:
        slot.value = ctypes.cast(mine, ctypes.c_void_p).value
        first = give()
    finally:
        slot.value = before
    assert 10**15 <= first <= 10**15 + 100, "another thread may have asked, too"
    request_ids.make_unique()
    assert slot.value == ctypes.cast(loaded(ctypes.CDLL, FRAMEWORK)["_ZN3tsl6random5New64Ev"], ctypes.c_void_p).value
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: give(), range(10_000)))) == 10_000


def test_where_there_is_no_such_call_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that has it otherwise is left alone."""
    assert tf.__version__
    with pytest.raises(ValueError, match="0 calls of nothing"):
        request_ids.slot_of(loaded(ctypes.CDLL, CC), "nothing")
    monkeypatch.setattr(request_ids, "_DOES_NOT", "nothing")
    slot = request_ids.slot_of(loaded(ctypes.CDLL, CC), NAME)
    before, plain = slot.value, ctypes.cast(loaded(ctypes.CDLL, FRAMEWORK)[NAME], ctypes.c_void_p).value
    try:
        slot.value = plain
        request_ids.make_unique()
        assert slot.value == plain
    finally:
        slot.value = before
