"""The queues through which neighbors send their copies to each other.

A worker has one queue (``worker_queues``) for each neighbor. Each element has a tag: generation, step, and whether it
is a copy.

A worker whose input has ended sends one element without a copy for each step that is left: its neighbors take their
own copies in place of its. ``W`` of the others stays symmetric then, so the mean of all copies stays right.
"""

from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.worker_queues import WorkerQueues, check, device_of, on
from tfps.tf_types import DType, Operation, Tensor


class Links:
    """One worker's queues, from and to its neighbors.

    Args:
        worker: The index of the worker.
        neighbors: The indices of its neighbors.
        types: The types of the vectors that they exchange.
    """

    def __init__(self, worker: int, neighbors: Sequence[int], types: Sequence[DType]) -> None:
        self._worker, self._types = worker, types
        self._queues = WorkerQueues("tfps/gossip", worker)
        self._from = {one: self._queues.queue(worker, f"from_{one}", types) for one in neighbors}
        self._to = {one: self._queues.queue(one, f"from_{worker}", types) for one in neighbors}

    def generation(self) -> Tensor:
        """Add a read of the generation that this worker is in: int64 scalar."""
        return self._queues.generation()

    def begin(self, generation: Tensor) -> Operation:
        """Return an operation with which a generation begins: from now on nothing of another one arrives."""
        return self._queues.begin(generation, self._from.values())

    def send(self, step: Tensor, vectors: Sequence[Tensor]) -> Sequence[Operation]:
        """Return operations that end when a copy is in the queues of the neighbors.

        Args:
            step: int64 scalar: the number of the step.
            vectors: The copy: one vector of each type.
        """
        tag = self._tag(step)
        return [self._queues.put(one, queue, [tag, *vectors]) for one, queue in self._to.items()]

    def send_none(self, first: Tensor, count: Tensor) -> Operation:
        """Return an operation after which the neighbors expect no copy for some steps.

        Args:
            first: int64 scalar: the number of the first of these steps.
            count: int64 scalar: how many there are.
        """
        with on(device_of(self._worker)):
            generation = self.generation()
            steps = first + tf.range(count, dtype=tf.int64)
            tags = tf.stack([tf.fill([count], generation), steps, tf.zeros([count], tf.int64)], axis=1)
            nothing = [tf.zeros([count, 1], dtype) for dtype in self._types]
        elements = [tags, *nothing]
        return tf.group(*(self._queues.put_many(to, queue, elements, generation) for to, queue in self._to.items()))

    def receive(self, step: Tensor) -> Mapping[int, tuple[Tensor, Sequence[Tensor]]]:
        """Return what each neighbor has sent: whether it is a copy, 1 or 0, and its vectors, of size 1 if not."""
        tag = self._tag(step)
        found = {}
        for one, queue in self._from.items():
            sent, *vectors = queue.dequeue()
            with tf.control_dependencies([check(tf.reduce_all(tf.equal(sent[:2], tag[:2])))]):
                found[one] = sent[2], [tf.identity(vector) for vector in vectors]
        return found

    def _tag(self, step: Tensor) -> Tensor:
        return tf.stack([self.generation(), step, tf.constant(1, tf.int64)])
