"""How far a worker of ``local`` is in a round of its own, which ends without the others."""

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext
from tfps.modes.copies import WorkerCopies
from tfps.modes.local.round import Round
from tfps.modes.local_sgd import sync_every
from tfps.modes.sync.tokens import shared_variable
from tfps.tf_types import Operation, Tensor, Variable


class OwnRound(Round):
    """How far a worker is in the steps that it has been granted.

    Args:
        copies: The worker's copies of the variables.
        global_step: The variable of the global step.
        context: The job and the worker.

    Attributes:
        seen: int64 variable: how many rounds of all workers were in the variables when this one began.
    """

    def __init__(self, copies: WorkerCopies, global_step: Variable, context: ModeContext) -> None:
        super().__init__(copies, global_step, context)
        self._max_steps, self._every = context.config.max_steps, sync_every(context.config)
        with tf.device(None), tf.device(context.task.device):
            self._granted, self.seen = shared_variable("tfps/round/granted"), shared_variable("tfps/round/seen")
            self._none = shared_variable("tfps/round/none")

    def begin_granted(self, number: Tensor, step: Tensor, seen: Tensor) -> Operation:
        """Return an operation with which a round begins: a number of steps, at a step, after so many other rounds."""
        with tf.device(None), tf.device(self._context.task.device), tf.control_dependencies([number, step, seen]):
            noted = [self._granted.assign(number, read_value=False), self.seen.assign(seen, read_value=False)]
            return tf.group(self.begin(step), *noted, self._none.initializer)

    def must_have_steps(self) -> Operation:
        """Return an operation that fails, as one that the end of an input cancels, if the round has no step so far."""

        def fail() -> Tensor:
            return tf.raw_ops.ResourceCountUpTo(resource=self._none.handle, limit=0, T=tf.int64) >= 0

        with tf.device(None), tf.device(self._context.task.device):
            return tf.cond(self.taken() > 0, lambda: tf.constant(True), fail).op

    def length(self, began: Tensor) -> Tensor:
        """Return how many steps the round has. Where none was granted, there are no more rounds."""
        del began
        granted = self._granted.read_value()
        return tf.where(granted > 0, granted, tf.constant(self._every, tf.int64))

    def tickets(self, count: int, pending: int = 0) -> Tensor:
        """Return the numbers of the worker's next steps: less than ``max_steps`` while there may be another round."""
        numbers = super().tickets(count, pending)
        with tf.device(None), tf.device(self._context.task.device):
            most = tf.constant(self._max_steps, tf.int64)
            return tf.where(self._granted.read_value() > 0, tf.minimum(numbers, most - 1), tf.fill([count], most))
