"""A ring of workers in which each sends to the next one: sums, and values of all, with the same bits on each worker.

The sum is that of Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations". A
vector has n parts. Worker r, of n:

1. Reduce-scatter: n - 1 times, it sends a part to the next worker and adds what it receives to the part before. Then
   part r + 1 of worker r is the sum of all workers'.
2. All-gather: n - 1 times, it sends the sum that it has got last, and receives the sum of another part.

So each worker sends 2 (n - 1) / n of the data, whatever n is. A part is summed by one worker in one order.

The parts travel through ``worker_queues``, and not by TensorFlow's collective operations: after any error these refuse
all further work on a server, so a lost worker could never be replaced while the others keep their processes.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.worker_queues import WorkerQueues, check, device_of, on
from tfps.tf_types import Operation, Shape, Tensor


class Ring:
    """One worker's part of a ring. All workers must make the same calls in the same order.

    Args:
        num_workers: The number of workers.
        worker: The index of this one.
        step: int64 scalar: the number of the step, the same on all workers.

    Attributes:
        next: The index of the worker that this one sends to.
        tag: int64 [2]: generation and step.
        sent: Operations that end when what this worker sends is in the queues of the next one.
    """

    def __init__(self, num_workers: int, worker: int, step: Tensor) -> None:
        self.size, self._worker, self.next = num_workers, worker, (worker + 1) % num_workers
        self._of_workers = WorkerQueues("tfps/ring", worker)
        self._queues: list[tuple[Any, Any]] = []  # the own one, and the one of the next worker
        self.sent: list[Operation] = []
        with on(device_of(worker)):
            self.tag = tf.stack([self.generation(), step])

    def generation(self) -> Tensor:
        """Add a read of the generation that this worker is in: int64 scalar."""
        return self._of_workers.generation()

    def begin(self, generation: Tensor) -> Operation:
        """Return an operation with which a generation begins: from now on nothing of another one arrives."""
        return self._of_workers.begin(generation, [own for own, _ in self._queues])

    def close(self) -> Operation:
        """Return an operation that lets the next worker receive nothing after what has been sent."""
        with on(device_of(self.next)):
            return tf.group(*(queue.close() for _, queue in self._queues))

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of all workers' vectors: [n]."""
        if self.size == 1:
            return vector
        with on(device_of(self._worker)):
            length = int(vector.shape[0])
            part = -(-length // self.size)
            parts = tf.split(tf.pad(vector, [[0, part * self.size - length]]), self.size)
            for turn in range(self.size - 1):
                (arrived,) = self._exchange([parts[(self._worker - turn) % self.size]], [[part]])
                at = (self._worker - turn - 1) % self.size
                parts[at] = parts[at] + arrived
            for turn in range(self.size - 1):
                (arrived,) = self._exchange([parts[(self._worker + 1 - turn) % self.size]], [[part]])
                parts[(self._worker - turn) % self.size] = arrived
            return tf.concat(parts, axis=0)[:length]

    def gather(self, tensors: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Return what each worker has given, by worker. The sizes of the first axes may differ."""
        shapes = [[None, *tensor.shape[1:]] for tensor in tensors]
        found = {self._worker: list(tensors)}
        with on(device_of(self._worker)):
            for turn in range(self.size - 1):
                received = self._exchange(found[(self._worker - turn) % self.size], shapes)
                found[(self._worker - turn - 1) % self.size] = received
        return [found[worker] for worker in range(self.size)]

    def _exchange(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Send tensors to the next worker, and return those that arrive from the one before: same types and shapes."""
        number, types = len(self._queues), [tensor.dtype for tensor in tensors]
        own, following = (self._of_workers.queue(one, str(number), types) for one in (self._worker, self.next))
        self._queues.append((own, following))
        self.sent.append(self._of_workers.put(self.next, following, [self.tag, *tensors]))
        with tf.control_dependencies([tensor.op for tensor in tensors]):  # a step that fails before takes nothing
            tag, *received = own.dequeue()
        with tf.control_dependencies([check(tf.reduce_all(tf.equal(tag, self.tag)))]):
            received = [tf.identity(tensor) for tensor in received]
        for tensor, shape in zip(received, shapes, strict=True):
            tensor.set_shape(shape)
        return received
