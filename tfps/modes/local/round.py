"""How far a worker of ``local`` is in its round, which begins with the variables of the PS and ends in an exchange."""

from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import Copy, ModeContext
from tfps.modes.copies import WorkerCopies
from tfps.modes.local_sgd import steps_per_round, workers_per_round
from tfps.modes.sync.accumulators import Sample
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates.update_ops import leaves
from tfps.tf_types import Operation, Tensor, Variable


class Round:
    """How far a worker is in its round: its step, its examples, and the step at which the round began.

    Args:
        copies: The worker's copies of the variables.
        global_step: The variable of the global step.
        context: The job and the worker.

    Attributes:
        size: The number of workers that train in a round.
        steps: The number of steps of this worker in a full round.
    """

    def __init__(self, copies: WorkerCopies, global_step: Variable, context: ModeContext) -> None:
        self._copies, self._global_step, self._context = copies, global_step, context
        self.steps = steps_per_round(context)
        self.size = workers_per_round(context.config, context.cluster.num_workers)
        with tf.device(None), tf.device(context.task.device):
            self._began, self._examples = (shared_variable(f"tfps/round/{name}") for name in ("began", "examples"))

    def begin(self, step: Tensor) -> Operation:
        """Return an operation with which a round begins at a step, when the step is there: the last round is over."""
        with tf.device(None), tf.device(self._context.task.device), tf.control_dependencies([step]):
            return tf.group(
                self._began.assign(step, read_value=False),
                self._examples.assign(0, read_value=False),
                self._copies.assign(self._global_step, step),
            )

    def has_ended(self) -> Tensor:
        """Return whether the PS have the worker's present round, which it was interrupted in: bool scalar."""
        step = self._global_step.read_value()
        with tf.device(None), tf.device(self._context.task.device):
            has_begun = tf.raw_ops.VarIsInitializedOp(resource=self._began.handle)
            return tf.cond(has_begun, lambda: step > self._began.read_value(), lambda: tf.constant(False))

    def count_examples(self) -> Operation:
        """Return an operation that counts the examples of a step."""
        examples = 1 if self._context.examples is None else self._context.examples
        return self._examples.assign_add(tf.cast(examples, tf.int64), read_value=False)

    def weight(self) -> Tensor:
        """Return the number of examples so far: float32 scalar."""
        return tf.cast(self._examples.read_value(), tf.float32)

    def taken(self) -> Tensor:
        """Return how many steps the worker has taken in the round: int64 scalar."""
        with tf.device(None), tf.device(self._context.task.device):
            return self._copies.read(self._global_step) - self._began.read_value()

    def length(self, began: Tensor) -> Tensor:
        """Return how many steps a round has that begins at a step. After ``--max_steps`` there are no more rounds."""
        most, steps = (tf.constant(number, tf.int64) for number in (self._context.config.max_steps, self.steps))
        return tf.where(began < most, tf.minimum(most - began, steps), steps)

    def allowed(self, after: Sequence[Operation] = ()) -> Tensor:
        """Return how many steps the worker may take before it ends the round: int64 scalar."""
        config, worker = self._context.config, self._context.task
        with tf.device(None), tf.device(worker.device), tf.control_dependencies(after):
            began = self._began.read_value()
            left = began + self.length(began) - self._copies.read(self._global_step)
            if self.size == self._context.cluster.num_workers:
                return left
            return tf.where(self.is_drawn(began) | (began >= config.max_steps), left, tf.zeros([], tf.int64))

    def is_drawn(self, began: Tensor) -> Tensor:
        """Return whether this worker trains in the round that begins at a step: bool scalar."""
        worker, workers = self._context.task, self._context.cluster.num_workers
        with tf.device(None), tf.device(worker.device):
            drawn = tf.random.stateless_uniform([workers], [self._context.config.seed, began])
            return tf.reduce_any(tf.equal(tf.math.top_k(drawn, self.size).indices, worker.index))

    def if_drawn(self, began: Tensor, act: Callable[[], Operation]) -> Operation:
        """Return an operation that does something if this worker trains in the round that begins at a step.

        Args:
            began: The step: int64 scalar.
            act: Adds an operation that does it.
        """

        def done() -> Tensor:
            with tf.control_dependencies([act()]), tf.device(None), tf.device(self._context.task.device):
                return tf.constant(True)

        if self.size == self._context.cluster.num_workers:
            with tf.control_dependencies([began]):
                return act()
        is_drawn = self.is_drawn(began)
        with tf.device(None), tf.device(self._context.task.device):
            return tf.cond(is_drawn, done, lambda: tf.constant(False)).op

    def sample(self, sent_by_all: Sequence[Variable]) -> Sample | None:
        """Return the workers that train in the present round; ``None`` if all always do.

        Args:
            sent_by_all: Variables for which all workers send something.
        """
        if self.size == self._context.cluster.num_workers:
            return None
        with tf.device(None), tf.device(self._context.task.device):
            return Sample(self.size, self.is_drawn(self._began.read_value()), sent_by_all)

    def tickets(self, count: int, pending: int = 0) -> Tensor:
        """Return the numbers of the worker's next steps."""
        with tf.device(None), tf.device(self._context.task.device):
            return self._copies.read(self._global_step) + tf.range(pending, pending + count, dtype=tf.int64)

    def tickets_after(self, taken: Operation) -> Callable[[int, Copy], Tensor]:
        """Return ``Step.draw_after``: the number of allowed steps, and then the tickets."""

        def draw_after(count: int, copy: Copy) -> Tensor:
            done = [copy(op) for op in leaves(taken)]
            allowed = self.allowed(done)
            with tf.control_dependencies(done):
                return tf.concat([allowed[None], self.tickets(count)], axis=0)

        return draw_after
