"""Delay compensation: correct a stale gradient for how the parameters have changed since.

Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation" (DC-ASGD), with a constant
lambda::

    applied gradient = g + lambda * g * g * (w_now - w_read)        element by element

``g * g`` approximates the diagonal of the Hessian. The PS keeps ``w_read``, as in the paper::

    worker                                  PS
    1. starts a step                        w_read = reads of parameters, which it sends and keeps for the step
    2. computes g, sends it
    3.                                      lock, w_now = reads of parameters
    4.                                      apply the compensated gradient, unlock

``w_read`` is the tensor that the PS sends to the worker, before ``--wire=bfloat16`` rounds it. It is a tensor of the
step. So each step of a run, and each run in flight, has its own, and nothing more crosses the wire. A tensor of a dense
variable refers to the variable's memory, of which TensorFlow makes a copy for the next update.

An element of ``g`` stays as it is, to the bit, if its parameter has not changed, and if the compensated element would
not be finite: NaN and Inf are never applied.

For a sparse gradient, ``g`` is the sum of all its rows with the same index. The correction is added to the first of
them, so that an optimizer gets the other rows as they are. A row that a step looks up in several operations is that of
the first one.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.staleness import reads
from tfps.modes.updates.update_ops import place_of
from tfps.runtime.graph import graph_editor
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable


class DelayCompensation:
    """Applies compensated gradients with an optimizer.

    Args:
        optimizer: Applies the compensated gradients.
        strength: lambda.
    """

    def __init__(self, optimizer: Optimizer, strength: float) -> None:
        self._optimizer, self._strength = optimizer, strength
        self._kept: list[tuple[Variable, Sequence[Tensor]]] = []

    def apply_gradients(self, pairs: Sequence[tuple[Gradient, Variable]], global_step: Variable) -> Operation:
        """Compensate gradients, and apply them as the optimizer does."""
        return self._optimizer.apply_gradients([(self._compensated(*pair), pair[1]) for pair in pairs], global_step)

    def finish(self, gates: Sequence[Operation]) -> None:
        """Keep what the step reads. Call this when all graph passes are done.

        Args:
            gates: The operations that return the gradients.

        Raises:
            ValueError: If it is not certain which values of a variable the gradient belongs to.
        """
        found = reads.of_gradients(gates, [variable for variable, _ in self._kept])
        for variable, placeholders in self._kept:
            with tf.control_dependencies(None), tf.device(place_of(variable.handle.op)):
                kept = _kept(variable, found[variable.handle.op], is_sparse=len(placeholders) > 1)
                for placeholder, tensor in zip(placeholders, kept, strict=True):
                    graph_editor.replace(placeholder, tensor, lambda _user: True)

    def _compensated(self, gradient: Gradient, variable: Variable) -> Gradient:
        with tf.control_dependencies(None), tf.device(place_of(variable.handle.op)):
            if isinstance(gradient, tf.IndexedSlices):
                return self._rows(gradient, variable)
            read = tf.placeholder(variable.dtype.base_dtype, variable.shape, "tfps/read")
            self._kept.append((variable, [read]))
            return _corrected(gradient, gradient, self._strength, variable.read_value(), read)

    def _rows(self, gradient: Gradient, variable: Variable) -> Gradient:
        """Return a sparse gradient with corrections in the first of the rows with the same index."""
        read = tf.placeholder(variable.dtype.base_dtype, [None, *variable.shape[1:]], "tfps/read")
        ids = tf.placeholder(tf.int64, [None], "tfps/ids")
        self._kept.append((variable, [ids, read]))
        values, indices = tf.identity(gradient.values), tf.identity(gradient.indices)
        rows, place = tf.unique(indices)
        count = tf.size(rows)
        total = tf.unsorted_segment_sum(values, place, count)
        first = tf.unsorted_segment_min(tf.range(tf.size(indices)), place, count)
        then = tf.gather(read, _first_places(ids, tf.cast(rows, tf.int64)))
        own = tf.gather(values, first)
        corrected = _corrected(own, total, self._strength, variable.sparse_read(rows), then)
        values = tf.tensor_scatter_nd_update(values, first[:, tf.newaxis], corrected)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _corrected(own: Tensor, total: Tensor, strength: float, now: Tensor, read: Tensor) -> Tensor:
    """Return ``own`` with the correction of ``total`` added, where the parameters have changed."""
    now, read = tf.cast(now, total.dtype), tf.cast(read, total.dtype)
    correction = strength * total * (total * (now - read))
    is_used = tf.not_equal(now, read) & tf.is_finite(total + correction) & tf.is_finite(own + correction)
    return tf.where_v2(is_used, own + correction, own)


def _first_places(ids: Tensor, wanted: Tensor) -> Tensor:
    """Return where wanted ids occur first; an operation that uses the places fails where one does not occur.

    Args:
        ids: int64 [n].
        wanted: int64 [m].
    """
    every, place = tf.unique(tf.concat([ids, wanted], 0))
    count = tf.size(ids)
    first = tf.unsorted_segment_min(tf.range(count), place[:count], tf.size(every))
    return tf.gather(first, place[count:])


def _kept(variable: Variable, found: Sequence[Operation], is_sparse: bool) -> Sequence[Tensor]:
    """Return the value of a variable that a step has read, or for a sparse gradient the ids and rows of all lookups."""
    every_step = all(map(graph_editor.is_in_every_step, found))
    if found and every_step and all(op.type == "ReadVariableOp" for op in found):
        value = _only(variable, found)
        return [tf.range(tf.shape(value, out_type=tf.int64)[0]), value] if is_sparse else [value]
    if found and every_step and is_sparse and all(map(_is_lookup, found)):
        ids = [tf.cast(tf.reshape(op.inputs[1], [-1]), tf.int64) for op in found]
        rows = [tf.reshape(op.outputs[0], [-1, *variable.shape[1:]]) for op in found]
        return [tf.concat(ids, 0), tf.concat(rows, 0)]
    kinds = ", ".join(sorted({op.type for op in found})) or "no operation"
    raise ValueError(
        f"--delay_compensation: the gradient of {variable.op.name} comes from {kinds}: it is not certain which values "
        "were read. Read it outside tf.cond, loops and tf.function, or leave the flag out."
    )


def _only(variable: Variable, found: Sequence[Operation]) -> Tensor:
    """Make all reads of a variable one, and return its value."""
    first = found[0]
    if any(set(op.control_inputs) != set(first.control_inputs) for op in found):
        raise ValueError(
            f"--delay_compensation: a step reads {variable.op.name} several times, after different operations, so the "
            "gradient belongs to no single value. Read it once, or leave the flag out."
        )
    for op in found[1:]:
        graph_editor.replace(op.outputs[0], first.outputs[0], lambda _user: True)
    return first.outputs[0]


def _is_lookup(op: Operation) -> bool:
    return op.type == "ResourceGather" and not op.get_attr("batch_dims")
