"""Which steps of a job without common rounds the workers have taken, and which they have been granted.

All are on the PS of ``global_step``, and change under its lock.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.modes.local_sgd import sync_every
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates.moments import Moments
from tfps.tf_types import Operation, Tensor, Variable


class Grants:
    """The steps that are taken and granted.

    Args:
        config: The job.
        global_step: The variable of the global step.
        moments: The locks.
        worker: The index of the worker that owns the graph.

    Attributes:
        taken: int64 variable [workers]: the steps of each worker in this run that are in the variables.
    """

    def __init__(self, config: JobConfig, global_step: Variable, moments: Moments, worker: int) -> None:
        self._global_step, self._moments, self._worker = global_step, moments, worker
        self._workers, self._device = moments.num_workers, str(global_step.device)
        self._round, self._end = sync_every(config), config.max_steps
        with tf.device(self._device):
            self._first = shared_variable("tfps/first_of_all")  # the steps of all workers before this run
            self.taken = shared_variable("tfps/steps_taken", [self._workers])
            self._granted = shared_variable("tfps/granted", [self._workers])

    def reset(self) -> Operation:
        """Return an operation after which no step is taken or granted in this run."""
        with tf.device(self._device):
            first = self._first.assign(self._workers * self._global_step.read_value(), read_value=False)
            return tf.group(first, self.taken.initializer, self._granted.initializer)

    def count(self, steps: Tensor) -> Operation:
        """Return an operation of an update that counts a worker's steps, and ends its grant.

        Args:
            steps: int64 scalar.
        """
        with tf.device(self._device):
            before = self._first.read_value() + tf.reduce_sum(self.taken.read_value())
            raised = self._step_at(before + steps) - self._step_at(before)
            with tf.control_dependencies([raised]):
                taken = self.taken.scatter_add(tf.IndexedSlices(steps, self._worker)).op
                step = self._global_step.assign_add(raised, read_value=False)
                return tf.group(taken, self._without([self._worker]), step)

    def _step_at(self, steps: Tensor) -> Tensor:
        """Return the global step when all workers together have taken some steps."""
        return tf.minimum(steps // self._workers, self._end)

    def _without(self, workers: Tensor | Sequence[int]) -> Operation:
        nothing = tf.zeros(tf.shape(workers), tf.int64)
        operation: Operation = self._granted.scatter_update(tf.IndexedSlices(nothing, workers)).op
        return operation

    def draw(self, after: Sequence[Operation]) -> tuple[Tensor, Tensor]:
        """Grant the worker its next steps. Return their number, and the global step: int64 scalars.

        It is 0 where no steps are left: all others are taken or granted. It fails if the worker has been fenced.
        """
        with tf.device(self._device), tf.control_dependencies(after):
            lock = self._moments.lock(self._device)
            with tf.control_dependencies([lock]):
                checked = self._moments.check(self._device, self._worker)
            with tf.control_dependencies(checked):
                step, number = self._global_step.read_value(), self._number()
            with tf.control_dependencies([step]):
                granted = self._granted.scatter_update(tf.IndexedSlices(number, self._worker)).op
            with tf.control_dependencies([granted]):
                end = self._moments.unlock(lock)
            with tf.control_dependencies([end]):
                return tf.identity(number), tf.identity(step)

    def _number(self) -> Tensor:
        """Return how many steps the worker gets now: a round, or less near the end. No ticket reaches ``max_steps``."""
        taken, granted = self._first.read_value() + tf.reduce_sum(self.taken.read_value()), self._granted.read_value()
        left = self._workers * self._end - taken - (tf.reduce_sum(granted) - granted[self._worker])
        until_end = self._end - self._step_at(taken)
        return tf.maximum(tf.reduce_min(tf.stack([left, until_end, tf.constant(self._round, tf.int64)])), 0)

    def withdraw(self, workers: Tensor | Sequence[int], after: Sequence[Operation] = ()) -> Operation:
        """Return an operation after which others may take the steps that some workers, int64 [n], have been granted."""
        with tf.device(self._device), tf.control_dependencies(after):
            lock = self._moments.lock(self._device)
            with tf.control_dependencies([lock]):
                withdrawn = self._without(workers)
            with tf.control_dependencies([withdrawn]):
                return self._moments.unlock(lock)
