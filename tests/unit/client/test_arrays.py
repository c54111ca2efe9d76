"""What callers give to a client: arrays keep their dtypes, numbers get the parameter's, and all else is refused."""

from typing import Any

import numpy as np
import pytest

from tfps.client.arrays import as_array, as_ids, check_mapping
from tfps.errors import ServiceError

F32 = np.dtype(np.float32)


@pytest.mark.parametrize("given", [1, 1.5, np.float64(1.5), [1, 2], [[1.5], [2.5]], (1.0, 2), np.float32(2)])
def test_numbers_get_the_dtype_of_the_parameter(given: Any) -> None:
    """Also in lists."""
    found = as_array("w", given, F32)
    assert found.dtype == F32
    np.testing.assert_array_equal(found, np.asarray(given, np.float32))


@pytest.mark.parametrize(
    "given", [np.ones(2), np.float16(1), np.complex64(1j), np.ones((), np.int32), np.array([True])]
)
def test_arrays_keep_theirs(given: Any) -> None:
    """The caller finds out that it does not fit."""
    assert as_array("w", given, F32).dtype == given.dtype


@pytest.mark.parametrize("given", ["1.5", True, 1 + 2j, None, "abc", [True]])
def test_what_is_no_number_does_not_become_one(given: Any) -> None:
    """So it fits no parameter."""
    assert as_array("w", given, F32).dtype.kind not in "fiu"


def test_what_is_no_array_is_refused() -> None:
    """With the name."""

    class Stubborn:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("call detach() before")

    for given in ([[1], [1, 2]], Stubborn(), np.ma.masked_array(np.ones(3), mask=[1, 0, 0])):
        with pytest.raises(ServiceError, match="w: "):
            as_array("w", given, F32)


def test_foreign_byte_orders_become_the_own() -> None:
    """With the same numbers."""
    found = as_array("w", np.array([1, 2], ">f4"))
    assert found.dtype == F32
    np.testing.assert_array_equal(found, [1, 2])


def test_ids() -> None:
    """Whole numbers of any width; none that int64 lacks."""
    assert as_ids("t", [1, 2]).dtype == np.int64
    assert as_ids("t", []).dtype == np.int64
    with pytest.raises(ServiceError, match="expected ids as int64"):
        as_ids("t", [1.5])
    with pytest.raises(ServiceError, match="id 18446744073709551615 is no row"):
        as_ids("t", np.array([2**64 - 1], np.uint64))


@pytest.mark.parametrize(
    ("given", "problem"), [([1], "given list"), ({1: 2.0}, "expected names, given 1"), (None, "NoneType")]
)
def test_arrays_come_by_name(given: Any, problem: str) -> None:
    """In a mapping."""
    with pytest.raises(ServiceError, match=problem):
        check_mapping("push", given)
