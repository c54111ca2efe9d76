"""What ``sync`` needs beside, where an update leaves some gradients out (Chen et al. 2016, section 3).

With N workers and k of them as backup, no update waits for the k slowest ones, whoever they are at the moment:

1. A worker pushes its gradient, counts it in ``sent``, and waits for a token.
2. The update of the chief's background run takes the first N - k gradients of its step (``gradient_slots``), counts
   them in ``contributed``, and puts a token for each worker. A gradient that arrives later is dropped.
3. A late worker finds several tokens. It takes all, and goes on with the step of the newest. So does one that begins
   later than others, or skips a batch.

An update does not need the chief's gradient. So that a checkpoint is of one step, each update takes a permit before it
starts, and puts it back when it has ended. The chief takes the permit while it saves.

A worker whose input has ended is as one that is always late: training ends when more than k inputs have ended.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from tfps.errors import ModelError
from tfps.modes.base import ModeContext, Step
from tfps.modes.recovery import Pause, SyncRecovery
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates.update_ops import let_wait
from tfps.tf_types import Operation, Tensor


class BackupWorkers:
    """The counts and the permit. Create it on the PS of ``global_step``.

    Args:
        context: The job and the worker.
        chosen: int64 [N - k]: the workers whose gradients an update has.
        complete: Operations of the update that end when all its gradients are there.
        starts: Operations that start it. They wait for the permit.
        check: Adds an operation that fails if the update is of a generation that is over. A restart gives a pending
            update of an earlier generation a permit.
    """

    def __init__(
        self,
        context: ModeContext,
        chosen: Tensor,
        complete: Sequence[Operation],
        starts: Sequence[Operation],
        check: Callable[[], Operation],
    ) -> None:
        num_workers = context.cluster.num_workers
        self._spare, self._worker = context.config.backup_workers or 0, context.task.index
        self._is_chief = context.task.is_chief
        self._chosen = chosen
        self._sent = [shared_variable(f"tfps/sent_{index}") for index in range(num_workers)]
        self._contributed = shared_variable("tfps/contributed", [num_workers])
        self._has_ended = shared_variable("tfps/inputs_ended", [num_workers], tf.bool)
        self._permit = tf.FIFOQueue(-1, tf.int64, shapes=[], name="tfps/permit", shared_name="tfps/permit")
        with tf.control_dependencies(complete):
            permit = self._permit.dequeue()
        with tf.control_dependencies([permit]):
            let_wait(starts, [check()])

    def send(self, pushes: Sequence[Operation]) -> Operation:
        """Return an operation that counts a gradient of this worker when it has been pushed."""
        with tf.control_dependencies(pushes):
            return self._sent[self._worker].assign_add(1, read_value=False)

    def count(self, applied: Operation) -> Operation:
        """Return an operation that counts the gradients of an update when it has been applied."""
        with tf.control_dependencies([applied]):
            counted = tf.IndexedSlices(tf.ones_like(self._chosen), self._chosen)
            return self._contributed.scatter_add(counted).op

    def added_to(self, step: Step, token: Tensor, queues: Sequence[Any]) -> Step:
        """Return the step with what backup workers change.

        Args:
            step: The step of ``sync``.
            token: The token that the worker takes.
            queues: The queues that are closed when no update is possible any more.
        """
        assert step.recovery is not None
        assert step.update is not None
        with tf.control_dependencies([step.update]):
            ended = self._permit.enqueue(0)
        return dataclasses.replace(
            step,
            update=ended,
            draw_after=lambda count, copy: _reached(copy(token), count),
            give_back=lambda _count: self._end_input(queues),
            worker_init=tf.group(step.worker_init, self._note_end(False)),
            chief_init=self._begin(step.recovery.generation, step.chief_init),
            hold=None,
            refuse=self._refuse if self._is_chief else None,
            recovery=self._with_permit(step.recovery),
            reports_step=True,
            may_skip_steps=True,
            steps_taken=self._contributed.read_value(),
            dropped=tf.stack([number.read_value() for number in self._sent]) - self._contributed.read_value(),
            pause=Pause(self._permit.dequeue().op, self._permit.enqueue(0)),
        )

    def _with_permit(self, recovery: SyncRecovery) -> SyncRecovery:
        return dataclasses.replace(
            recovery,
            counts=tf.concat([recovery.counts, [tf.cast(self._permit.size(), tf.int64)]], axis=0),
            unblock=[*recovery.unblock, self._permit.enqueue(0)],
            clear=[*recovery.clear, self._permit.dequeue().op],
        )

    def _begin(self, generation: Tensor, begun: Operation) -> Operation:
        """Return an operation that puts the only permit, and in the first generation sets all counts to 0.

        The PS are in the generation after ``begun``: an update of an earlier one that gets the permit fails then.
        """
        with tf.control_dependencies([begun]):
            taken = self._permit.dequeue_many(self._permit.size()).op
        with tf.control_dependencies([taken]):
            permit = self._permit.enqueue(0)
        return tf.group(permit, tf.cond(generation > 0, tf.no_op, self._reset))

    def _reset(self) -> Operation:
        counts = [*self._sent, self._contributed, self._has_ended]
        return tf.group(*(count.assign(tf.zeros(count.shape, count.dtype), read_value=False) for count in counts))

    def _end_input(self, queues: Sequence[Any]) -> Operation:
        """Return an operation that notes the end of this worker's input, and closes queues if too few are left."""
        with tf.control_dependencies([self._note_end(True)]):
            count = tf.reduce_sum(tf.cast(self._has_ended.read_value(), tf.int32))
        close = lambda: tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in queues))  # noqa: E731
        return tf.cond(count > self._spare, close, tf.no_op)

    def _note_end(self, has_ended: bool) -> Operation:
        return self._has_ended.scatter_update(tf.IndexedSlices([has_ended], [self._worker])).op

    def _refuse(self, changes: Sequence[Operation]) -> NoReturn:
        raise ModelError(
            f"--backup_workers={self._spare}: the model itself changes in each step what its optimizer uses "
            f"({changes[0].name}), and an update may come before the chief's step, which makes that change: "
            "compute it from global_step, or leave --backup_workers out."
        )


def _reached(token: Tensor, count: int) -> Tensor:
    """Return the global step after a step, and then the next tickets."""
    return tf.concat([token[None], token + tf.range(count, dtype=tf.int64)], axis=0)
