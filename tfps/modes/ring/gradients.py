"""The mean of all workers' gradients, with the same bits on each worker.

Dense gradients of one type travel as one vector. The rows of sparse gradients, whose number differs between workers,
go around the ring as they are; the mean is their sum by row, in the order of the workers, divided by the number of
workers. Gradients of 16 bits are summed as float32.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.ring.ring import Ring
from tfps.modes.sync.accumulators import sum_dtype, summed_by_row
from tfps.tf_types import DType, Gradient, Tensor, Variable

Pairs = Sequence[tuple[Gradient, Variable]]


def mean(pairs: Pairs, ring: Ring) -> Pairs:
    """Return the mean gradients with their variables, in the same order.

    Args:
        pairs: This worker's gradients, each with its variable.
        ring: The workers.

    Raises:
        ValueError: If the shape of a variable with a dense gradient is not known.
    """
    found: dict[int, Gradient] = {}
    types = dict.fromkeys(sum_dtype(one.dtype) for one, _ in pairs if not isinstance(one, tf.IndexedSlices))
    for dtype in types:
        found |= _dense(pairs, dtype, ring)
    found |= _sparse(pairs, ring)
    return [(found[index], variable) for index, (_, variable) in enumerate(pairs)]


def _dense(pairs: Pairs, dtype: DType, ring: Ring) -> dict[int, Tensor]:
    """Return the means of the dense gradients that are summed as one type, by position."""
    chosen = {
        index: (gradient, variable)
        for index, (gradient, variable) in enumerate(pairs)
        if not isinstance(gradient, tf.IndexedSlices) and sum_dtype(gradient.dtype) == dtype
    }
    for _, variable in chosen.values():
        if not variable.shape.is_fully_defined():
            raise ValueError(f"the shape of {variable.op.name} is not known: the ring needs it. Give it a shape.")
    sizes = [variable.shape.num_elements() for _, variable in chosen.values()]
    flat = [tf.reshape(tf.cast(given, dtype), [size]) for (given, _), size in zip(chosen.values(), sizes, strict=True)]
    parts = tf.split(ring.sum(tf.concat(flat, axis=0)) / ring.size, sizes)
    return {
        index: tf.cast(tf.reshape(part, variable.shape), gradient.dtype)
        for part, (index, (gradient, variable)) in zip(parts, chosen.items(), strict=True)
    }


def _sparse(pairs: Pairs, ring: Ring) -> dict[int, Gradient]:
    """Return the means of the sparse gradients, by position."""
    own = {index: summed_by_row(one) for index, (one, _) in enumerate(pairs) if isinstance(one, tf.IndexedSlices)}
    if not own:
        return {}
    sent = [tensor for one in own.values() for tensor in (tf.cast(one.values, sum_dtype(one.dtype)), one.indices)]
    by_worker = ring.gather(sent)
    joined = [tf.concat(of_all, axis=0) for of_all in zip(*by_worker, strict=True)]
    means: dict[int, Gradient] = {}
    for index, values, rows in zip(own, joined[::2], joined[1::2], strict=True):
        gradient, variable = pairs[index]
        total = summed_by_row(tf.IndexedSlices(values, rows))
        shape = tf.constant(variable.shape.as_list(), tf.int64)
        means[index] = tf.IndexedSlices(tf.cast(total.values / ring.size, gradient.dtype), total.indices, shape)
    return means
