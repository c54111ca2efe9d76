"""Where the chief's step and its update of the same mean meet, if the model itself changes something in between.

A learning rate that the model changes in each step, or a weight that it clips, is changed when the mean is there, so
that an update is certain, and before the mean is applied::

    chief's step      push --> [complete] take --> the model's own changes --> [changed] put --> take the token
    chief's update    the mean is there --> [complete] put, [changed] take --> apply --> put the tokens
"""

from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates import update_ops
from tfps.tf_types import Operation


class Meeting:
    """Two queues, through which one run lets the other go on. Create it on the device of the queues.

    Args:
        complete: Operations of the update that end when it has all means.
        starts: Operations that start it.
        check: Adds an operation that fails if the update is of a generation that is over. A restart gives a pending
            update of an earlier generation what it waits for.

    Attributes:
        queues: The queues. They are closed where no mean is possible any more, and emptied where workers restart.
    """

    def __init__(
        self, complete: Sequence[Operation], starts: Sequence[Operation], check: Callable[[], Operation]
    ) -> None:
        self._complete, self._starts, self._check = complete, starts, check
        names = ("tfps/complete", "tfps/changed")
        self.queues = [tf.FIFOQueue(-1, tf.int64, shapes=[], name=name, shared_name=name) for name in names]

    def hold(self, token: Operation, changes: Sequence[Operation]) -> Operation:
        """Make each update wait for changes of the chief's step; see ``Step.hold``.

        Args:
            token: The operation with which the step takes its token, after its gradient has arrived.
            changes: The changes.
        """
        told, changed = self.queues
        with tf.device(told.queue_ref.device):
            with tf.control_dependencies(self._complete):
                tell = told.enqueue(0)
            with tf.control_dependencies([tell]):
                goes_on = changed.dequeue()
            with tf.control_dependencies(token.control_inputs):
                is_told = told.dequeue()
            with tf.control_dependencies(changes):
                go_on = changed.enqueue(0)
        with tf.control_dependencies([goes_on]):
            still_right = self._check()
        update_ops.let_wait(self._starts, [still_right])
        update_ops.let_wait([token], [go_on])
        return is_told.op
