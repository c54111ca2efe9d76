"""The queues through which neighbors send their copies to each other.

A worker has one queue on its own device for each neighbor. The neighbor sends its vectors to that device, and puts
them into the queue there, in the same run. Each element has a tag: generation, step, and whether it is a copy. A lost
worker may come back to life, so two checks keep its copies out:

- The sender's operation on the receiver's device looks at the receiver's generation when the copy is there, and fails
  if it is another one.
- The receiver fails if a tag is not its own.

A worker whose input has ended sends one element without a copy for each step that is left: its neighbors take their
own copies in place of its. ``W`` of the others stays symmetric then, so the mean of all copies stays right.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.ring.ring import STALE, device_of, on
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
        self._from = {one: _queue(worker, one, types) for one in neighbors}
        self._to = {one: _queue(one, worker, types) for one in neighbors}

    def generation(self) -> Tensor:
        """Add a read of the generation that this worker is in: int64 scalar."""
        return _generation(self._worker)

    def begin(self, generation: Tensor) -> Operation:
        """Return an operation with which a generation begins: from now on nothing of another one arrives."""
        with on(device_of(self._worker)):
            begun = tf.raw_ops.AssignVariableOp(resource=_variable(self._worker), value=generation)
            with tf.control_dependencies([begun]):
                return tf.group(*map(_emptied, self._from.values()))

    def send(self, step: Tensor, vectors: Sequence[Tensor]) -> Sequence[Operation]:
        """Return operations that end when a copy is in the queues of the neighbors.

        Args:
            step: int64 scalar: the number of the step.
            vectors: The copy: one vector of each type.
        """
        tag = self._tag(step, is_copy=1)
        return [self._put(one, queue.enqueue, [tag, *vectors], tag[0]) for one, queue in self._to.items()]

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
        return tf.group(*(self._put(to, queue.enqueue_many, elements, generation) for to, queue in self._to.items()))

    def receive(self, step: Tensor) -> Mapping[int, tuple[Tensor, Sequence[Tensor]]]:
        """Return what each neighbor has sent: whether it is a copy, 1 or 0, and its vectors, of size 1 if not."""
        tag = self._tag(step, is_copy=1)
        found = {}
        for one, queue in self._from.items():
            sent, *vectors = queue.dequeue()
            with tf.control_dependencies([_check(tf.reduce_all(tf.equal(sent[:2], tag[:2])))]):
                found[one] = sent[2], [tf.identity(vector) for vector in vectors]
        return found

    def _tag(self, step: Tensor, is_copy: int) -> Tensor:
        return tf.stack([self.generation(), step, tf.constant(is_copy, tf.int64)])

    def _put(self, to: int, put: Any, elements: Sequence[Tensor], generation: Tensor) -> Operation:
        """Return an operation on a neighbor's device that puts elements into its queue, if it is in a generation."""
        with on(device_of(to)):
            arrived = [tf.identity(element) for element in elements]
            with tf.control_dependencies(arrived):
                present = _generation(to)
            with tf.control_dependencies([_check(tf.equal(present, generation))]):
                made: Operation = put(arrived)
                return made


def _queue(receiver: int, sender: int, types: Sequence[DType]) -> Any:
    """Return a queue on a worker. Its size has no limit: one worker is at most one step ahead of another."""
    with on(device_of(receiver)):
        name = f"tfps/gossip/from_{sender}"
        return tf.FIFOQueue(-1, [tf.int64, *types], shared_name=name, name=f"{name}_to_{receiver}")


def _variable(worker: int) -> Tensor:
    with on(device_of(worker)):
        name = "tfps/gossip/generation"
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name, name=f"{name}_of_{worker}")


def _generation(worker: int) -> Tensor:
    with on(device_of(worker)):
        return tf.raw_ops.ReadVariableOp(resource=_variable(worker), dtype=tf.int64)


def _check(condition: Tensor) -> Operation:
    return tf.raw_ops.Assert(condition=condition, data=[STALE])


def _emptied(queue: Any) -> Operation:
    """Return an operation that removes all elements of a queue, whatever their shapes."""

    def drop(count: Tensor) -> Tensor:
        with tf.control_dependencies([queue.dequeue()[0]]):
            return count + 1

    more = lambda _count: queue.size() > 0  # noqa: E731
    return tf.while_loop(more, drop, [tf.constant(0)], parallel_iterations=1, back_prop=False).op
