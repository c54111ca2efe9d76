"""How the workers of a ring begin together: when each is ready to receive, and has the values of the chief.

The chief counts the workers that are ready, and then tells each of them to begin. A worker asks between two runs
(``StepLimit``), so a restart can interrupt it::

    worker   queues empty, copies pulled --> [joined]         [begin 1] take --> steps
    chief    take n - 1 from [joined] --> put one into each of [begin i] --> steps
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext, StepLimit
from tfps.modes.ring.ring import Ring
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.worker_queues import check, device_of, on
from tfps.tf_types import Operation, Tensor

_MOST = 1 << 20


class Start:
    """One worker's part in the start. Create it on the device of ``global_step``.

    Args:
        ring: The ring.
        context: The job and the worker.

    Attributes:
        generation: int64 variable on the chief: the generation of the job.
        joined: The queue of those that are ready. It is closed when training has ended.
        queues: All queues, which are on the chief.
    """

    def __init__(self, ring: Ring, context: ModeContext) -> None:
        self._ring, self._task, self._others = ring, context.task, context.cluster.num_workers - 1
        self.generation = shared_variable("tfps/ring/present_generation")
        names = ["tfps/ring/joined", *(f"tfps/ring/begin_{index + 1}" for index in range(self._others))]
        self.queues = [tf.FIFOQueue(-1, tf.int64, shapes=[], name=name, shared_name=name) for name in names]
        self.joined, self._begin = self.queues[0], self.queues[1:]
        self._state = self.generation.device
        with on(device_of(self._task.index)):
            self._started = shared_variable("tfps/ring/started")

    def join(self, pull: Sequence[Operation]) -> Operation:
        """Return an operation with which a worker is ready in the present generation.

        Args:
            pull: Operations that give this worker the values of the chief.
        """
        with on(self._state):
            generation = self.generation.read_value()
        with tf.control_dependencies([self._ring.begin(generation)]), on(device_of(self._task.index)):
            reset = self._started.assign(-1, read_value=False)
        if self._task.is_chief:
            return reset
        with tf.control_dependencies([reset, *pull]), on(self._state):
            present = self.is_present(generation)
            with tf.control_dependencies([present]):
                return self.joined.enqueue(generation)

    def is_present(self, generation: Tensor) -> Operation:
        """Return an operation that fails if a generation is over."""
        with on(self._state):
            return check(tf.equal(self.generation.read_value(), generation))

    def limit(self) -> StepLimit:
        """Return what lets a worker take steps when all have begun."""
        return StepLimit(self.allowed([]), most=_MOST, renew=self._renew())

    def allowed(self, after: Sequence[Operation]) -> Tensor:
        """Return how many steps the worker may take: int64 scalar."""
        with on(device_of(self._task.index)), tf.control_dependencies(after):
            has_begun = tf.equal(self._started.read_value(), self._ring.generation())
            return tf.where(has_begun, tf.constant(_MOST, tf.int64), tf.zeros([], tf.int64))

    def _renew(self) -> Operation:
        """Return an operation that ends when the worker may begin."""
        with on(self._state):
            if self._task.is_chief:
                generations = self.joined.dequeue_many(self._others)
                with tf.control_dependencies([generations]):
                    done = [queue.enqueue(self.generation.read_value()) for queue in self._begin]
            else:
                done = [self._begin[self._task.index - 1].dequeue().op]
        with on(device_of(self._task.index)), tf.control_dependencies(done):
            return self._started.assign(self._ring.generation(), read_value=False)
