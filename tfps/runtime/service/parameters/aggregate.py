"""What an update does to one parameter: the gradients of its pushes combined, or the values of a buffer.

The sum is that of the pushes in their order, which is that of the workers, whatever the order is in which they came.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.client.arrays import Rows
from tfps.client.message import Array
from tfps.modes.sync import aggregation

_ROBUST = ("median", "trimmed_mean")
_SMALL = 4 << 20  # bytes, up to which a look at each number is faster than their sum


@dataclass(frozen=True)
class BufferValue:
    """The value that a worker has of a buffer: what no optimizer changes, such as the averages of batch norm.

    Attributes:
        value: The value.
    """

    value: Array


Gradient = Array | Rows
Change = Gradient | BufferValue


def combined(given: Sequence[Gradient], count: int, aggregate: str, shape: Sequence[int]) -> Gradient:
    """Return the gradient of an update.

    Args:
        given: The gradients of the pushes that have one.
        count: The number of pushes; the others count as a gradient of 0.
        aggregate: How they are combined.
        shape: The shape of the parameter.
    """
    if aggregate in _ROBUST:
        dense = [_dense(one, shape) for one in given]
        dense += [np.zeros_like(dense[0])] * (count - len(given))
        return _robust(dense, aggregate)
    if count == 1:
        return given[0]
    divisor = 1 if aggregate == "sum" else count
    rows = [one for one in given if isinstance(one, Rows)]
    if len(rows) < len(given):
        return _sum([_dense(one, shape) for one in given], divisor)
    return _sum_of_rows(rows, divisor)


def combined_buffer(given: Sequence[BufferValue], aggregate: str) -> Array:
    """Return the value of a buffer after an update: the mean of those pushes that have one, or what is robust.

    What is no floating-point number, such as a count of batches, gets the value of the first of these pushes.
    """
    values = [one.value for one in given]
    if len(values) == 1 or values[0].dtype.kind != "f":
        return values[0]
    if aggregate in _ROBUST:
        return _robust(values, aggregate)
    return _sum(values, len(values))


def is_finite(array: Array) -> bool:
    """Return whether no number is NaN or Inf: such a sum has none, and only one that overflows needs a second look."""
    if array.nbytes <= _SMALL:
        return bool(np.isfinite(array).all())
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def _robust(arrays: Sequence[Array], aggregate: str) -> Array:
    """Combine arrays in float64: their sum may be too large for their dtype where what comes of it is not."""
    stack = np.stack(arrays)
    found: Array = aggregation.ELEMENTWISE[aggregate](tf.constant(stack, tf.float64)).numpy()
    return found.astype(stack.dtype)


def _sum(arrays: Sequence[Array], divisor: int) -> Array:
    """Return the sum in the arrays' dtype, divided."""
    first, *others = arrays
    total = first.copy()
    with np.errstate(over="ignore"):
        for one in others:
            total += one
    mean: Array = total / total.dtype.type(divisor) if divisor > 1 else total
    if not is_finite(mean):  # the sum is too large for its dtype, and the mean may not be
        mean = np.sum([one.astype(np.float64) / divisor for one in arrays], axis=0).astype(total.dtype)
    return mean


def _sum_of_rows(given: Sequence[Rows], divisor: int) -> Rows:
    """Return the sum of rows in their dtype, divided; each row once."""
    ids, places = np.unique(np.concatenate([one.ids for one in given]), return_inverse=True)
    values = np.concatenate([one.values for one in given])
    total = np.zeros((len(ids), *values.shape[1:]), values.dtype)
    with np.errstate(over="ignore"):
        np.add.at(total, places, values)
    mean: Array = total / total.dtype.type(divisor) if divisor > 1 else total
    if not is_finite(mean):  # the sum is too large for its dtype, and the mean may not be
        exact = np.zeros(total.shape, np.float64)
        np.add.at(exact, places, values.astype(np.float64) / divisor)
        mean = exact.astype(total.dtype)
    return Rows(ids, mean)


def _dense(gradient: Gradient, shape: Sequence[int]) -> Array:
    if not isinstance(gradient, Rows):
        return gradient
    found = np.zeros(shape, gradient.values.dtype)
    np.add.at(found, gradient.ids, gradient.values)
    return found
