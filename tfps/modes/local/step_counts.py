"""How many steps of each worker are in the variables, where workers train on copies and the variables follow later.

What a worker has taken since then does not count: it is taken again if a worker is lost.
"""

import tensorflow.compat.v1 as tf

from tfps.modes.sync.tokens import shared_variable
from tfps.tf_types import Operation, Tensor


class StepCounts:
    """The counts, in variables on the present device.

    Args:
        scope: The beginning of the names.
        num_workers: The number of workers.
    """

    def __init__(self, scope: str, num_workers: int) -> None:
        self._new = shared_variable(f"{scope}_steps", [num_workers])
        self._all = shared_variable("tfps/steps_taken", [num_workers])

    def clear(self) -> Operation:
        """Return an operation that forgets what the workers have told."""
        initializer: Operation = self._new.initializer
        return initializer

    def tell(self, worker: int, steps: Tensor) -> Operation:
        """Return an operation that tells how many steps a worker has taken: int64 scalar."""
        told: Operation = self._new.scatter_update(tf.IndexedSlices(steps, worker)).op
        return told

    def told(self) -> Tensor:
        """Add a read of what each worker has told: int64 [workers]."""
        return self._new.read_value()

    def count(self, steps: Tensor) -> Operation:
        """Return an operation that counts steps, int64 [workers], which are in the variables now."""
        counted: Operation = self._all.assign_add(steps, read_value=False)
        return counted

    def counted(self) -> Tensor:
        """Add a read of the steps that are in the variables since this run began: int64 [workers]."""
        return self._all.read_value()

    def begin(self, generation: Tensor) -> Operation:
        """Return an operation that begins to count, in the first generation of a run."""

        def zero() -> Operation:
            return tf.group(self._all.assign(tf.zeros(self._all.shape, tf.int64), read_value=False))

        with tf.device(self._all.device):
            return tf.cond(generation > 0, tf.no_op, zero)
