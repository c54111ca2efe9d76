"""A ring of workers in which each sends to the next one: sums, and values of all, with the same bits on each worker.

The sum is that of Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations". A
vector has n parts. Worker r, of n:

1. Reduce-scatter: n - 1 times, it sends a part to the next worker and adds what it receives to the part before. Then
   part r + 1 of worker r is the sum of all workers'.
2. All-gather: n - 1 times, it sends the sum that it has got last, and receives the sum of another part.

So each worker sends 2 (n - 1) / n of the data, whatever n is. A part is summed by one worker in one order.

The ring is made of ``tf.FIFOQueue``, and not of TensorFlow's collective operations: after any error these refuse all
further work on a server, so a lost worker could never be replaced while the others keep their processes. They were also
2 to 4 times slower for gradients of 25 to 100 MB.

A worker receives from queues on its own device. The worker before it sends a part to that device, and puts it into a
queue there, in the same run. Each element has a tag: generation and step. A lost worker may come back to life
(a *zombie*), so two checks keep its parts out:

- The sender's operation on the receiver's device looks at the receiver's generation when the part is there, and fails
  if it is another one.
- The receiver fails if a tag is not its own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Task
from tfps.tf_types import DType, Operation, Shape, Tensor

STALE = "tfps: the ring has been formed again"


def device_of(worker: int) -> str:
    """Return the device on which a worker has its part of the ring, and its copies: the same kind on each worker."""
    return f"{Task('worker', worker).device}/device:CPU:0"


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Return a context in which new operations are on exactly this device."""
    with tf.device(None), tf.device(device):
        yield


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
        self._queues: list[tuple[Any, Any]] = []  # the own one, and the one of the next worker
        self.sent: list[Operation] = []
        with on(device_of(worker)):
            self.tag = tf.stack([self.generation(), step])

    def generation(self) -> Tensor:
        """Add a read of the generation that this worker is in: int64 scalar."""
        return _read(self._worker)

    def begin(self, generation: Tensor) -> Operation:
        """Return an operation with which a generation begins: from now on nothing of another one arrives."""
        with on(device_of(self._worker)):
            begun = tf.raw_ops.AssignVariableOp(resource=_generation_of(self._worker), value=generation)
            with tf.control_dependencies([begun]):
                return tf.group(*(_emptied(own) for own, _ in self._queues))

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
        types = [tensor.dtype for tensor in tensors]
        own, following = (_queue(worker, len(self._queues), types) for worker in (self._worker, self.next))
        self._queues.append((own, following))
        with on(device_of(self.next)):
            arrived = [tf.identity(tensor) for tensor in [self.tag, *tensors]]
            with tf.control_dependencies(arrived):
                present = _read(self.next)
            with tf.control_dependencies([_check(tf.equal(present, arrived[0][0]))]):
                self.sent.append(following.enqueue(arrived))
        with tf.control_dependencies([tensor.op for tensor in tensors]):  # a step that fails before takes nothing
            tag, *received = own.dequeue()
        with tf.control_dependencies([_check(tf.reduce_all(tf.equal(tag, self.tag)))]):
            received = [tf.identity(tensor) for tensor in received]
        for tensor, shape in zip(received, shapes, strict=True):
            tensor.set_shape(shape)
        return received


def _queue(worker: int, number: int, types: Sequence[DType]) -> Any:
    """Return a queue on a worker. Its size has no limit: one worker is at most one step ahead of another."""
    with on(device_of(worker)):
        name = f"tfps/ring/{number}"
        return tf.FIFOQueue(-1, [tf.int64, *types], shared_name=name, name=f"{name}_of_{worker}")


def _generation_of(worker: int) -> Tensor:
    with on(device_of(worker)):
        name = "tfps/ring/generation"
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name, name=f"{name}_of_{worker}")


def _read(worker: int) -> Tensor:
    with on(device_of(worker)):
        return tf.raw_ops.ReadVariableOp(resource=_generation_of(worker), dtype=tf.int64)


def _check(condition: Tensor) -> Operation:
    return tf.raw_ops.Assert(condition=condition, data=[STALE])


def _emptied(queue: Any) -> Operation:
    """Return an operation that removes all elements of a queue, whatever their shapes."""

    def drop(count: Tensor) -> Tensor:
        with tf.control_dependencies([queue.dequeue()[0]]):
            return count + 1

    more = lambda _count: queue.size() > 0  # noqa: E731
    return tf.while_loop(more, drop, [tf.constant(0)], parallel_iterations=1, back_prop=False).op
