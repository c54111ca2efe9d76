"""A worker's rounds in ``local``: how far it is in one, and what it exchanges with the PS at the end."""

from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import Copy, ModeContext
from tfps.modes.copies import WorkerCopies
from tfps.modes.local.state import State
from tfps.modes.local_sgd import sync_every, workers_per_round
from tfps.modes.sync.accumulators import sum_dtype
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.update_ops import leaves
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable


class Round:
    """How far a worker is in its round: its step, its examples, and the step at which the round began.

    Args:
        copies: The worker's copies of the variables.
        global_step: The variable of the global step.
        context: The job and the worker.
    """

    def __init__(self, copies: WorkerCopies, global_step: Variable, context: ModeContext) -> None:
        self._copies, self._global_step, self._context = copies, global_step, context
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
        most, steps = tf.constant(self._context.config.max_steps, tf.int64), sync_every(self._context.config)
        return tf.where(began < most, tf.minimum(most - began, steps), tf.constant(steps, tf.int64))

    def allowed(self, after: Sequence[Operation] = ()) -> Tensor:
        """Return how many steps the worker may take before it ends the round: int64 scalar."""
        config, worker = self._context.config, self._context.task
        with tf.device(None), tf.device(worker.device), tf.control_dependencies(after):
            began = self._began.read_value()
            left = began + self.length(began) - self._copies.read(self._global_step)
            count, most = workers_per_round(config, self._context.cluster.num_workers), config.max_steps
            if count == self._context.cluster.num_workers:
                return left
            drawn = tf.random.stateless_uniform([self._context.cluster.num_workers], [config.seed, began])
            is_drawn = tf.reduce_any(tf.equal(tf.math.top_k(drawn, count).indices, worker.index))
            return tf.where(is_drawn | (began >= most), left, tf.zeros([], tf.int64))

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


class Exchange:
    """What the workers exchange when a round ends.

    Args:
        state: The variables.
        copies: The worker's copies of them.
        progress: The worker's rounds.
        server: The optimizer of the PS.
        context: The job and the worker.

    Attributes:
        chief_init: Operation that the chief runs before any worker ends a round.
        pairs: What the worker pushes: ``n_i``, ``n_i (w - w_i)`` for each trained variable, and ``n_i w_i`` for each
            averaged one, which may hold Inf.
    """

    def __init__(
        self, state: State, copies: WorkerCopies, progress: Round, server: Optimizer, context: ModeContext
    ) -> None:
        self._state, self._copies, self._round, self._server = state, copies, progress, server
        self._device, self._worker, self._is_chief = context.task.device, context.task.index, context.task.is_chief
        self._base = WorkerCopies([*state.exchanged, *state.kept], self._device, "tfps/before")
        with tf.device(state.global_step.device):
            self._total = shared_variable("tfps/weight", dtype=tf.float32)
            self._steps = shared_variable("tfps/round_steps", [context.cluster.num_workers])
        self.chief_init = self._steps.initializer
        with tf.device(None), tf.device(self._device):
            self.pairs = self._pushed()

    def _pushed(self) -> Sequence[tuple[Gradient, Variable]]:
        weight = self._round.weight()
        changes = [self._change(variable) for variable in self._state.trained]
        checks = [
            tf.check_numerics(change, f"tfps: the change of {variable.op.name} in a round").op
            for change, variable in zip(changes, self._state.trained, strict=True)
            if not change.dtype.is_complex
        ]
        values = [self._copies.read(variable) for variable in self._state.averaged]
        values = [tf.cast(value, sum_dtype(value.dtype)) for value in values]
        steps = self._steps.scatter_update(tf.IndexedSlices(self._round.taken(), self._worker)).op
        with tf.control_dependencies([*checks, steps]):
            sent = [_weighted(tensor, weight) for tensor in (*changes, *values)]
            return [(tf.identity(weight), self._total), *zip(sent, self._state.exchanged, strict=True)]

    def _change(self, variable: Variable) -> Tensor:
        before, now = (copies.read(variable) for copies in (self._base, self._copies))
        dtype = sum_dtype(before.dtype)
        return tf.cast(before, dtype) - tf.cast(now, dtype)

    def apply(self, combined: Sequence[tuple[Gradient, Variable]], counter: Variable) -> Operation:
        """Return an operation that applies the mean change of all workers, and raises the global step."""
        del counter
        sums = {variable.ref(): tensor for tensor, variable in combined}
        total = sums.pop(self._total.ref())
        means = {ref: _divided(tensor, total, ref.deref()) for ref, tensor in sums.items()}
        applied = self._server.apply_gradients([(means[one.ref()], one) for one in self._state.trained])
        averaged = [_assigned(one, means[one.ref()], total) for one in self._state.averaged]
        with tf.control_dependencies([applied, *averaged]):
            most = tf.reduce_max(self._steps.read_value())  # each worker has written its own before it pushed
            return self._state.global_step.assign_add(most, read_value=False)

    def begin(self, after: Sequence[Operation]) -> Operation:
        """Return an operation with which the worker begins after it has joined, or when all take a round again."""
        fixed = self._copies.pull_once(self._state.fixed)
        return tf.group(fixed, self._base.give_back(self._state.kept, self._copies), self._pull(after))

    def stored(self, counter: Variable) -> Operation:
        """Return an operation that writes what the chief keeps to the PS, as it was when the round began.

        In the first round it does nothing: other workers may still read there what the job begins with.

        Args:
            counter: The number of rounds: int64 variable.
        """
        with tf.device(counter.device):
            has_begun = counter.read_value() > 0
        return self._base.push(self._state.kept, where=has_begun)

    def end_round(self, taken: Operation) -> Operation:
        """Return an operation that ends a round, and begins the next.

        Args:
            taken: Pushes ``pairs``, and ends when the PS have applied those of all workers.
        """
        with tf.control_dependencies([taken]):
            kept = [self._base.assign(one, self._copies.read(one)) for one in self._state.kept]
            if self._is_chief:  # a chief that is started again goes on counting; slots are too large to send each time
                kept += [one.assign(self._copies.read(one), read_value=False) for one in self._state.counted]
        return tf.group(self._pull([taken]), *kept)

    def _pull(self, after: Sequence[Operation]) -> Operation:
        with tf.control_dependencies(after):
            step = self._state.global_step.read_value()
            values = [(one, one.read_value()) for one in self._state.exchanged]
        pulled = [copies.assign(*pair) for pair in values for copies in (self._copies, self._base)]
        return tf.group(self._round.begin(step), *pulled)


def _weighted(tensor: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor times a weight: 0 for a weight of 0, also where the tensor is not finite."""
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


def _assigned(variable: Variable, mean: Tensor, total: Tensor) -> Operation:
    """Return an operation that gives a variable the mean of the workers' values, if there is any example."""
    with tf.device(variable.device):
        return variable.assign(tf.where_v2(total > 0, mean, variable.read_value()), read_value=False)


def _divided(tensor: Tensor, total: Tensor, variable: Variable) -> Tensor:
    """Return a weighted mean, from the sums of all workers; 0 if there is no example."""
    with tf.device(variable.device):
        mean = tf.math.divide_no_nan(tensor, tf.cast(total, tensor.dtype))
        return tf.cast(mean, variable.dtype.base_dtype)
