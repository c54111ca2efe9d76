"""The weighted mean of a worker's copy and those of its neighbors.

With the copies x_j of the neighbors j, and the weights W_ij of ``topology``::

    x = x + sum of W_ij (x_j - x)

So copies that are equal stay equal, to the last bit. The trained variables of one type travel as one vector, and those
of 16 bits are added up as float32.
"""

from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.gossip.links import Links
from tfps.modes.sync.accumulators import sum_dtype
from tfps.modes.worker_queues import device_of, on
from tfps.tf_types import DType, Operation, Tensor, Variable


class Mixing:
    """One worker's part in the exchange of a step.

    Args:
        variables: The trained variables. The builder makes the step use their copies.
        worker: The index of the worker.
        weights: The weights of its neighbors, by index.

    Attributes:
        links: The queues.

    Raises:
        ValueError: If the shape of a variable is not known.
    """

    def __init__(self, variables: Sequence[Variable], worker: int, weights: Mapping[int, float]) -> None:
        for variable in variables:
            if not variable.shape.is_fully_defined():
                raise ValueError(f"the shape of {variable.op.name} is not known: gossip needs it. Give it a shape.")
        self._worker, self._weights = worker, weights
        self._by_type: dict[DType, list[Variable]] = {}
        for variable in variables:
            self._by_type.setdefault(variable.dtype.base_dtype, []).append(variable)
        self.links = Links(worker, list(weights), list(self._by_type))

    def build(self, step: Tensor, after: Sequence[Operation]) -> tuple[Sequence[Operation], Sequence[Operation]]:
        """Return operations that make the copies those means, and operations that end when all has been sent.

        Args:
            step: int64 scalar: the number of the step.
            after: Operations after which it is certain that the worker takes the step.
        """
        if not self._weights:
            return [], []
        read = [[one.read_value() for one in variables] for variables in self._by_type.values()]
        with on(device_of(self._worker)):
            whole = [tf.concat([tf.reshape(value, [-1]) for value in values], axis=0) for values in read]
            with tf.control_dependencies(after):
                own, step = [tf.identity(vector) for vector in whole], tf.identity(step)
            with tf.control_dependencies([step]):
                sent, received = self.links.send(step, own), self.links.receive(step)
            mixed = [self._mean(index, vector, received) for index, vector in enumerate(own)]
            values = [_split(*each) for each in zip(self._by_type.values(), mixed, strict=True)]
        assigned = [
            variable.assign(value, read_value=False)
            for variables, parts in zip(self._by_type.values(), values, strict=True)
            for variable, value in zip(variables, parts, strict=True)
        ]
        return assigned, sent

    def _mean(self, index: int, own: Tensor, received: Mapping[int, tuple[Tensor, Sequence[Tensor]]]) -> Tensor:
        dtype = sum_dtype(own.dtype)
        total = before = tf.cast(own, dtype)
        for one, weight in self._weights.items():
            is_copy, vectors = received[one]
            total += tf.cast(weight * tf.cast(is_copy, tf.float64), dtype) * (tf.cast(vectors[index], dtype) - before)
        return tf.ensure_shape(tf.cast(total, own.dtype), own.shape)


def _split(variables: Sequence[Variable], vector: Tensor) -> Sequence[Tensor]:
    parts = tf.split(vector, [variable.shape.num_elements() for variable in variables])
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]
