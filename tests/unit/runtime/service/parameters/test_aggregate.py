"""The gradients of an update, and the values of a buffer, against NumPy."""

from typing import Any

import numpy as np
import pytest

from tfps.client.arrays import Rows
from tfps.runtime.service.parameters.aggregate import BufferValue, combined, combined_buffer, is_finite


def values(*given: Any, dtype: Any = np.float32) -> list[BufferValue]:
    """Return values of a buffer."""
    return [BufferValue(np.asarray(one, dtype)) for one in given]


@pytest.mark.parametrize("aggregate", ["mean", "sum"])
def test_a_buffer_is_the_mean_of_those_that_have_it(aggregate: str) -> None:
    """A sum of averages would be none."""
    found = combined_buffer(values([1, 2], [2, 4], [6, 0]), aggregate)
    np.testing.assert_array_equal(found, np.float32([3, 2]))
    assert found.dtype == np.float32


def test_a_buffer_of_whole_numbers_is_that_of_the_first() -> None:
    """A mean of counts need not be a count."""
    assert combined_buffer(values(7, 8, dtype=np.int64), "mean") == 7
    assert combined_buffer(values(True, False, dtype=bool), "median").dtype == bool


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_what_is_robust_for_gradients_is_so_for_buffers(aggregate: str) -> None:
    """One worker of five cannot spoil it."""
    assert combined_buffer(values(1, 2, 3, 4, 1e30), aggregate) == 3


def test_two_workers_are_too_few_to_trim() -> None:
    """Then it is the mean, and not the mean of nothing."""
    assert combined_buffer(values(1, 2), "trimmed_mean") == np.float32(1.5)


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean", "mean"])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_is_equal_stays_what_it_is(aggregate: str, count: int, dtype: Any) -> None:
    """Also if a sum of it is too large for the dtype."""
    largest = np.finfo(dtype).max
    assert combined_buffer(values(*[largest] * count, dtype=dtype), aggregate) == largest
    found = combined([np.full(2, largest, dtype)] * count, count, aggregate, [2])
    np.testing.assert_array_equal(np.asarray(found), np.full(2, largest, dtype))
    assert np.asarray(found).dtype == dtype


def test_a_mean_whose_sum_overflows() -> None:
    """Is what it should be."""
    assert combined_buffer(values(3e38, 3e38), "mean") == np.float32(3e38)


def test_rows_and_a_dense_gradient_add_up() -> None:
    """Ids that repeat count as often; a push that has none counts as zero."""
    rows = Rows(np.array([1, 1]), np.float32([[1, 2], [3, 4]]))
    found = combined([np.ones([3, 2], np.float32), rows], 4, "mean", [3, 2])
    np.testing.assert_array_equal(np.asarray(found), np.float32([[1, 1], [5, 7], [1, 1]]) / 4)


def test_what_is_finite() -> None:
    """A sum that overflows is none of NaN or Inf."""
    assert is_finite(np.float32([3e38, 3e38]))
    assert not is_finite(np.float32([1, np.nan]))
    assert not is_finite(np.float32([np.inf, -np.inf]))
