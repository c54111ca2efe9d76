"""Queues through which workers send to each other, without PS.

A worker receives from queues on its own device. Another one sends to that device, and puts what it sends into a queue
there, in the same run. Each worker holds the generation that it is in. A lost worker may come back to life, so two
checks keep out what it sends:

- The sender's operation on the receiver's device looks at the receiver's generation when the element is there, and
  fails if it is another one (``put``).
- An element has a tag of its generation and its step. The receiver fails if that is not its own (``check``).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Task
from tfps.tf_types import DType, Operation, Tensor

STALE = "tfps: the workers have begun again together"


def device_of(worker: int) -> str:
    """Return the device on which a worker has its queues, and its copies: the same kind on each worker."""
    return f"{Task('worker', worker).device}/device:CPU:0"


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Return a context in which new operations are on exactly this device."""
    with tf.device(None), tf.device(device):
        yield


def check(condition: Tensor) -> Operation:
    """Return an operation that fails if what it looks at is of another generation: scalar bool."""
    return tf.raw_ops.Assert(condition=condition, data=[STALE])


class WorkerQueues:
    """The queues of one kind on all workers, as one worker sees them.

    Args:
        scope: The beginning of the names of the queues: ``tfps/ring``.
        worker: The index of this worker.
    """

    def __init__(self, scope: str, worker: int) -> None:
        self._scope, self._worker = scope, worker

    def queue(self, receiver: int, name: str, types: Sequence[DType]) -> Any:
        """Return a queue on a worker: of tags, int64 [n], with values of some types.

        Its size has no limit: one worker is at most one step ahead of another.
        """
        with on(device_of(receiver)):
            name = f"{self._scope}/{name}"
            return tf.FIFOQueue(-1, [tf.int64, *types], shared_name=name, name=f"{name}_of_{receiver}")

    def generation(self) -> Tensor:
        """Add a read of the generation that this worker is in: int64 scalar."""
        return self._read(self._worker)

    def begin(self, generation: Tensor, own: Iterable[Any]) -> Operation:
        """Return an operation with which a generation begins: from now on nothing of another one arrives.

        Args:
            generation: int64 scalar.
            own: The queues of this worker, which it empties.
        """
        with on(device_of(self._worker)):
            begun = tf.raw_ops.AssignVariableOp(resource=self._variable(self._worker), value=generation)
            with tf.control_dependencies([begun]):
                return tf.group(*map(_emptied, own))

    def put(self, to: int, queue: Any, elements: Sequence[Tensor]) -> Operation:
        """Return an operation that puts an element into a queue of another worker, if that one is in its generation.

        Args:
            to: The index of the other worker.
            queue: The queue.
            elements: The tag, int64 [n], whose first number is the generation, and the values.
        """
        with on(device_of(to)):
            arrived = [tf.identity(tensor) for tensor in elements]
            with tf.control_dependencies([self._is_present(to, arrived[0][0], arrived)]):
                made: Operation = queue.enqueue(arrived)
                return made

    def put_many(self, to: int, queue: Any, elements: Sequence[Tensor], generation: Tensor) -> Operation:
        """Return the same for any number of elements of a generation: each tensor has one more dimension, the first."""
        with on(device_of(to)):
            arrived = [tf.identity(tensor) for tensor in elements]
            with tf.control_dependencies([self._is_present(to, generation, arrived)]):
                made: Operation = queue.enqueue_many(arrived)
                return made

    def _is_present(self, worker: int, generation: Tensor, arrived: Sequence[Tensor]) -> Operation:
        """Return an operation that fails if a worker is in another generation when something has arrived there."""
        with tf.control_dependencies(arrived):
            present = self._read(worker)
        return check(tf.equal(present, generation))

    def _variable(self, worker: int) -> Tensor:
        with on(device_of(worker)):
            name = f"{self._scope}/generation"
            return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name, name=f"{name}_of_{worker}")

    def _read(self, worker: int) -> Tensor:
        with on(device_of(worker)):
            return tf.raw_ops.ReadVariableOp(resource=self._variable(worker), dtype=tf.int64)


def _emptied(queue: Any) -> Operation:
    """Return an operation that removes all elements of a queue, whatever their shapes."""

    def drop(count: Tensor) -> Tensor:
        with tf.control_dependencies([queue.dequeue()[0]]):
            return count + 1

    more = lambda _count: queue.size() > 0  # noqa: E731
    return tf.while_loop(more, drop, [tf.constant(0)], parallel_iterations=1, back_prop=False).op
