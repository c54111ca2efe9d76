"""Accumulators on the PS, which add up the gradients of the workers as they arrive.

A mean is always the sum of one gradient per worker, divided by the number of workers. This holds for both kinds::

    dense                             sparse, summed by row index first
    worker/0: [1, 3]                  worker/0: row 0: 2
    worker/1: [3, 5]                  worker/1: row 0: 4, row 7: 6
    mean:     [2, 4]                  mean:     row 0: 3, row 7: 3
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.sync.collector import Collector, Held
from tfps.tf_types import DType, Gradient, Operation, Tensor, Variable

NEVER_STALE = 1 << 62


@dataclass(frozen=True)
class Sample:
    """The part of the workers that sends gradients for an update. The others send none, not even zeros.

    Attributes:
        size: The number of workers in it.
        is_in: Scalar bool: whether this worker is in it.
        sent_by_all: Variables whose gradients all workers send nevertheless. An update is complete only with these.
    """

    size: int
    is_in: Tensor
    sent_by_all: Sequence[Variable]


class Accumulators(Collector):
    """An accumulator per gradient, on the PS of its variable. All workers share it by name.

    Args:
        gradients: Pairs as ``compute_gradients`` returns them, without those that have no gradient.
        stamp: int64 scalar: the step at which the gradients are computed.
        num_workers: The number of gradients in an update.
        is_mean: Whether the sum is divided by the number of gradients.
        sample: The workers that send gradients. ``None`` if all do.
    """

    def __init__(
        self,
        gradients: Sequence[tuple[Gradient, Variable]],
        stamp: Tensor,
        num_workers: int,
        is_mean: bool = True,
        sample: Sample | None = None,
    ) -> None:
        names = _distinct([f"{variable.op.name}/gradients" for _, variable in gradients])
        of_all = _Senders(stamp, num_workers, is_mean)
        of_some = _Senders(stamp, sample.size, is_mean, sample.is_in) if sample else of_all
        sent_by_all = {variable.ref() for variable in sample.sent_by_all} if sample else set()
        self._each = [
            _accumulator(gradient, variable, of_all if variable.ref() in sent_by_all else of_some, name)
            for (gradient, variable), name in zip(gradients, names, strict=True)
        ]
        self.devices = sorted({each.variable.device for each in self._each})
        self.pushes = [each.push for each in self._each]
        self.held = [Held(each.accumulator.num_accumulated(), each.unblock, each.drop) for each in self._each]

    def begin(self, first: Tensor) -> Operation:
        """Let each accumulator drop gradients whose stamp is less than ``first``."""
        return tf.group(*(each.accumulator.set_global_step(first) for each in self._each))

    def arrived(self, device: str) -> Sequence[Operation]:
        """Return operations that end when each accumulator of a PS has given its result."""
        return [values_of(each.result).op for each in self._each if each.variable.device == device]

    def combined(self, starts: Mapping[str, Operation]) -> Sequence[tuple[Gradient, Variable]]:
        """Return the results, by PS."""
        pairs: list[tuple[Gradient, Variable]] = []
        for device in self.devices:
            with tf.device(device), tf.control_dependencies([starts[device]]):
                own = [each for each in self._each if each.variable.device == device]
                pairs += [(copied(each.result), each.variable) for each in own]
        return pairs


@dataclass(frozen=True)
class _Senders:
    """The workers that send gradients of a variable.

    Attributes:
        stamp: int64 scalar: the step at which this worker's gradient is computed.
        number: How many workers send one.
        is_mean: Whether their sum is divided by ``number``.
        sends: Scalar bool: whether this worker sends one. ``None`` if it always does.
    """

    stamp: Tensor
    number: int
    is_mean: bool
    sends: Tensor | None = None

    def push(self, send: Callable[[], Operation]) -> Operation:
        """Return an operation that sends this worker's gradient, if it is one that sends.

        Args:
            send: Adds an operation that sends it. What this uses from outside is not sent to the PS otherwise.
        """
        if self.sends is None:
            return send()

        def is_sent() -> Tensor:
            with tf.control_dependencies([send()]):
                return tf.constant(True)

        return tf.cond(self.sends, is_sent, lambda: tf.constant(False)).op


@dataclass(frozen=True)
class _Accumulator:
    """The accumulator of one variable's gradients.

    Attributes:
        variable: The variable.
        accumulator: ``tf.ConditionalAccumulator`` or ``tf.SparseConditionalAccumulator``.
        push: Operation that adds this worker's gradient, unless its stamp is stale or the worker sends none.
        result: The mean or the sum, available when the gradients of all senders have arrived. Taking it empties the
            accumulator.
        unblock: Operation that adds zeros, whatever the stamp.
        drop: Operation that removes the content. It waits if the accumulator is empty.
    """

    variable: Variable
    accumulator: Any
    push: Operation
    result: Gradient
    unblock: Operation
    drop: Operation


def values_of(gradient: Gradient) -> Tensor:
    """Return a dense gradient, or the values of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _distinct(names: Sequence[str]) -> Sequence[str]:
    """Return unique names. A variable may have several gradients, so its name may occur more than once."""
    return [
        f"{name}_{names[:index].count(name)}" if name in names[:index] else name for index, name in enumerate(names)
    ]


def copied(result: Gradient) -> Gradient:
    """Return a gradient in new tensors, which wait for the operations of the present context."""
    if isinstance(result, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(result.values), tf.identity(result.indices), result.dense_shape)
    return tf.identity(result)


def _accumulator(gradient: Gradient, variable: Variable, senders: _Senders, name: str) -> _Accumulator:
    gradient = summed_by_row(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
    make = _sparse if isinstance(gradient, tf.IndexedSlices) else _dense
    with tf.device(variable.device):
        return make(gradient, variable, senders, name)


def _dense(gradient: Tensor, variable: Variable, senders: _Senders, name: str) -> _Accumulator:
    dtype = sum_dtype(gradient.dtype)
    reduction = "MEAN" if senders.is_mean else "SUM"
    sums = tf.ConditionalAccumulator(dtype, variable.shape, shared_name=name, reduction_type=reduction)
    zeros = tf.zeros_like(variable.read_value(), dtype)
    return _Accumulator(
        variable=variable,
        accumulator=sums,
        push=senders.push(lambda: sums.apply_grad(tf.cast(gradient, dtype), senders.stamp)),
        result=tf.cast(sums.take_grad(senders.number), gradient.dtype),
        unblock=sums.apply_grad(zeros, NEVER_STALE),
        drop=sums.take_grad(1).op,
    )


def _sparse(gradient: Gradient, variable: Variable, senders: _Senders, name: str) -> _Accumulator:
    dtype = sum_dtype(gradient.dtype)
    sums = tf.SparseConditionalAccumulator(dtype, shape=[], shared_name=name, reduction_type="SUM")
    total = summed_by_row(sums.take_indexed_slices_grad(senders.number))
    result = tf.cast(total.values / senders.number if senders.is_mean else total.values, gradient.dtype)
    zeros = tf.IndexedSlices(tf.zeros([1, *variable.shape[1:]], dtype), tf.zeros([1], gradient.indices.dtype))

    def send() -> Operation:
        pushed = tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices)
        return sums.apply_indexed_slices_grad(pushed, senders.stamp)

    return _Accumulator(
        variable=variable,
        accumulator=sums,
        push=senders.push(send),
        result=tf.IndexedSlices(result, total.indices, tf.constant(variable.shape.as_list(), tf.int64)),
        unblock=sums.apply_indexed_slices_grad(zeros, NEVER_STALE),
        drop=sums.take_indexed_slices_grad(1).indices.op,
    )


def sum_dtype(dtype: DType) -> DType:
    """Return the type in which gradients are summed. A sum of finite 16-bit numbers can overflow."""
    return dtype if dtype.size > 2 else tf.float32


def summed_by_row(gradient: Gradient) -> Gradient:
    """Return a sparse gradient in which each row occurs once."""
    rows, place = tf.unique(gradient.indices)
    sums = tf.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)
