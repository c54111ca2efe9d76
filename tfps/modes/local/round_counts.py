"""How many rounds are in the variables, and how many steps of each worker, where workers train on copies.

What a worker has taken since its last round does not count: it is taken again if a worker is lost.
"""

import tensorflow.compat.v1 as tf

from tfps.modes.sync.tokens import shared_variable
from tfps.tf_types import Operation, Tensor


class RoundCounts:
    """The counts, in variables on the present device.

    Args:
        scope: The beginning of the names.
        num_workers: The number of workers.
    """

    def __init__(self, scope: str, num_workers: int) -> None:
        self._told = shared_variable(f"{scope}_steps", [num_workers])
        self._steps = shared_variable("tfps/steps_taken", [num_workers])
        self._rounds = shared_variable("tfps/rounds_made")

    def clear(self) -> Operation:
        """Return an operation that forgets what the workers have told."""
        initializer: Operation = self._told.initializer
        return initializer

    def tell(self, worker: int, steps: Tensor) -> Operation:
        """Return an operation that tells how many steps a worker has taken in its round: int64 scalar."""
        told: Operation = self._told.scatter_update(tf.IndexedSlices(steps, worker)).op
        return told

    def told(self) -> Tensor:
        """Add a read of what each worker has told: int64 [workers]."""
        return self._told.read_value()

    def count(self, steps: Tensor) -> Operation:
        """Return an operation that counts a round, which is in the variables now: int64 [workers]."""
        is_round = tf.cast(tf.reduce_max(steps) > 0, tf.int64)
        counted = self._steps.assign_add(steps, read_value=False)
        return tf.group(counted, self._rounds.assign_add(is_round, read_value=False))

    def steps(self) -> Tensor:
        """Add a read of the steps that are in the variables since this run began: int64 [workers]."""
        return self._steps.read_value()

    def rounds(self) -> Tensor:
        """Add a read of the number of rounds that are in the variables since this run began: int64 scalar."""
        return self._rounds.read_value()

    def begin(self, generation: Tensor) -> Operation:
        """Return an operation that begins to count, in the first generation of a run."""

        def zero() -> Operation:  # an initializer, which is not in here, would run in any case
            steps = self._steps.assign(tf.zeros(self._steps.shape, tf.int64), read_value=False)
            return tf.group(steps, self._rounds.assign(0, read_value=False))

        with tf.device(self._steps.device):
            return tf.cond(generation > 0, tf.no_op, zero)
