"""Accumulators on the PS, which average the gradients of the workers.

A mean is always the sum of one gradient per worker, divided by the number of workers. This holds for both kinds::

    dense                             sparse, summed by row index first
    worker/0: [1, 3]                  worker/0: row 0: 2
    worker/1: [3, 5]                  worker/1: row 0: 4, row 7: 6
    mean:     [2, 4]                  mean:     row 0: 3, row 7: 3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.tf_types import DType, Gradient, Operation, Tensor, Variable

_NEVER_STALE = 1 << 62


@dataclass(frozen=True)
class MeanAccumulator:
    """The accumulator of one variable's gradients.

    Attributes:
        variable: The variable.
        accumulator: ``tf.ConditionalAccumulator`` or ``tf.SparseConditionalAccumulator``.
        push: Operation that adds this worker's gradient, unless its stamp is stale.
        mean: The mean, available when the gradients of all workers have arrived. Taking it empties the accumulator.
        unblock: Operation that adds zeros, whatever the stamp.
        drop: Operation that removes the content. It waits if the accumulator is empty.
    """

    variable: Variable
    accumulator: Any
    push: Operation
    mean: Gradient
    unblock: Operation
    drop: Operation


def accumulate(
    gradients: Sequence[tuple[Gradient, Variable]], stamp: Tensor, num_workers: int
) -> Sequence[MeanAccumulator]:
    """Add an accumulator per gradient to the graph, on the PS of its variable. All workers share it by name.

    Args:
        gradients: Pairs as ``compute_gradients`` returns them, without those that have no gradient.
        stamp: int64 scalar: the step at which the gradients are computed.
        num_workers: The number of gradients in a mean.
    """
    names = _distinct([f"{variable.op.name}/mean" for _, variable in gradients])
    return [
        _accumulator(gradient, variable, stamp, num_workers, name)
        for (gradient, variable), name in zip(gradients, names, strict=True)
    ]


def values_of(gradient: Gradient) -> Tensor:
    """Return a dense gradient, or the values of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _distinct(names: Sequence[str]) -> Sequence[str]:
    """Return unique names. A variable may have several gradients, so its name may occur more than once."""
    return [
        f"{name}_{names[:index].count(name)}" if name in names[:index] else name for index, name in enumerate(names)
    ]


def _accumulator(gradient: Gradient, variable: Variable, stamp: Tensor, num_workers: int, name: str) -> MeanAccumulator:
    gradient = _summed_by_row(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
    make = _sparse if isinstance(gradient, tf.IndexedSlices) else _dense
    with tf.device(variable.device):
        return make(gradient, variable, stamp, num_workers, name)


def _dense(gradient: Tensor, variable: Variable, stamp: Tensor, num_workers: int, name: str) -> MeanAccumulator:
    dtype = _sum_dtype(gradient.dtype)
    sums = tf.ConditionalAccumulator(dtype, variable.shape, shared_name=name)
    zeros = tf.zeros_like(variable.read_value(), dtype)
    return MeanAccumulator(
        variable=variable,
        accumulator=sums,
        push=sums.apply_grad(tf.cast(gradient, dtype), stamp),
        mean=tf.cast(sums.take_grad(num_workers), gradient.dtype),
        unblock=sums.apply_grad(zeros, _NEVER_STALE),
        drop=sums.take_grad(1).op,
    )


def _sparse(gradient: Gradient, variable: Variable, stamp: Tensor, num_workers: int, name: str) -> MeanAccumulator:
    dtype = _sum_dtype(gradient.dtype)
    sums = tf.SparseConditionalAccumulator(dtype, shape=[], shared_name=name, reduction_type="SUM")
    total = _summed_by_row(sums.take_indexed_slices_grad(num_workers))
    mean = tf.cast(total.values / num_workers, gradient.dtype)
    zeros = tf.IndexedSlices(tf.zeros([1, *variable.shape[1:]], dtype), tf.zeros([1], gradient.indices.dtype))
    pushed = tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices)
    return MeanAccumulator(
        variable=variable,
        accumulator=sums,
        push=sums.apply_indexed_slices_grad(pushed, stamp),
        mean=tf.IndexedSlices(mean, total.indices, tf.constant(variable.shape.as_list(), tf.int64)),
        unblock=sums.apply_indexed_slices_grad(zeros, _NEVER_STALE),
        drop=sums.take_indexed_slices_grad(1).indices.op,
    )


def _sum_dtype(dtype: DType) -> DType:
    """Return the type in which gradients are summed. A sum of finite 16-bit numbers can overflow."""
    return dtype if dtype.size > 2 else tf.float32


def _summed_by_row(gradient: Gradient) -> Gradient:
    """Return a sparse gradient in which each row occurs once."""
    rows, place = tf.unique(gradient.indices)
    sums = tf.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)
