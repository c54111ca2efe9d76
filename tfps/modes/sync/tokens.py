"""Tokens and stamps of ``sync``: a worker's next gradient belongs to the step of the token that it has taken."""

import functools
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.tf_types import DType, Operation, Tensor, Variable


def shared_variable(name: str, shape: Sequence[int | None] = (), dtype: DType = tf.int64) -> Variable:
    """Return a variable of zeros that all workers share by its name. A size of ``None`` varies."""
    zeros = functools.partial(tf.zeros, [size or 0 for size in shape], dtype)
    flags = {"trainable": False, "collections": [], "use_resource": True}
    return tf.Variable(zeros, name=name, shape=tf.TensorShape(shape), **flags)


class Stamps:
    """The step to which a worker's gradients belong, and what it has pushed. Create it on the PS of ``global_step``.

    Args:
        worker: The index of the worker.
        num_workers: The number of workers.

    Attributes:
        base: int64 variable: the stamp of step 0 in the present generation.
        first: int64 variable: the step at which the present generation began.
        present: int64 scalar: the stamp of the worker's gradient, read when a step begins.
    """

    def __init__(self, worker: int, num_workers: int) -> None:
        self.base, self.first = shared_variable("tfps/base"), shared_variable("tfps/first")
        self._stamp = shared_variable(f"tfps/stamp_{worker}")
        self.present = self._stamp.read_value()
        self._pushed = [shared_variable(f"tfps/pushed_{index}") for index in range(num_workers)]
        self._own = self._pushed[worker]

    def count(self, pushes: Sequence[Operation]) -> Operation:
        """Return an operation that counts a gradient when all of it has been pushed."""
        with tf.control_dependencies(pushes):
            return self._own.assign(self.present - self.base + 1, read_value=False)

    def take(self, token: Tensor) -> Operation:
        """Return an operation after which the next gradient belongs to the step of a token."""
        return self._stamp.assign(token + self.base, read_value=False)

    def take_newest(self, tokens: Tensor) -> Operation:
        """Return the same for the last of some tokens, int64 [n]; the stamp stays if there is none."""
        return self._stamp.assign(tf.concat([self.present[None], tokens + self.base], axis=0)[-1], read_value=False)

    def worker_init(self) -> Operation:
        """Return an operation after which a worker's gradient belongs to the first step of the generation.

        Others may have made updates since, so the worker has a token for each of these. A gradient of the present step
        would be one of two if the worker then took the token of that step.
        """
        return tf.group(
            self._stamp.assign(self.first + self.base, read_value=False),
            self._own.assign(self.first, read_value=False),
        )

    def ahead(self, global_step: Variable) -> Tensor:
        """Return for how many future updates each worker has pushed a gradient; less than 0 if it is late."""
        return tf.stack([number.read_value() for number in self._pushed]) - global_step


class Tokens:
    """One queue per worker, into which the chief puts a token after each update.

    Args:
        global_step: int64 resource variable, whose value is the value of a token.
        num_workers: The number of queues.
    """

    def __init__(self, global_step: Variable, num_workers: int) -> None:
        self._global_step = global_step
        names = [f"tfps/tokens_{index}" for index in range(num_workers)]
        self.queues = [tf.FIFOQueue(-1, tf.int64, shapes=[], name=name, shared_name=name) for name in names]

    def hand_out(self, applied: Operation) -> Operation:
        """Raise ``global_step`` after an update is applied, and then put a token into each queue."""
        with tf.control_dependencies([applied]):
            raised = self._global_step.assign_add(1, read_value=False)
        with tf.control_dependencies([raised]):
            token = self._global_step.read_value()
            return tf.group(*(queue.enqueue(token) for queue in self.queues))

    def take(self, worker: int, counted: Operation, newest: bool) -> Tensor:
        """Return the token that a worker takes when its gradient has been counted: the next one, or the newest."""
        queue = self.queues[worker]
        with tf.control_dependencies([counted]):
            token = queue.dequeue()
        if not newest:
            return token
        with tf.control_dependencies([token]):
            later = queue.dequeue_many(queue.size())
        return tf.concat([token[None], later], axis=0)[-1]

    def expected(self, count: int, pending: int = 0) -> Tensor:
        """Return the values of the tokens that come next, without taking any."""
        return self._global_step.read_value() + tf.range(pending, pending + count, dtype=tf.int64)

    def catch_up(self, worker: int, stamps: Stamps, count: int, pending: int = 0) -> Tensor:
        """Return the same, after a worker has taken the tokens that are there.

        It goes on with the step of the newest one. It has pushed no gradient since it took its last token.
        """
        queue = self.queues[worker]
        with tf.device(self._global_step.device):
            taken = stamps.take_newest(queue.dequeue_many(queue.size()))
            with tf.control_dependencies([taken]):
                return self.expected(count, pending)

    def are_closed(self) -> Tensor:
        """Return whether one worker's input has ended."""
        return tf.reduce_any(tf.stack([queue.is_closed() for queue in self.queues]))
