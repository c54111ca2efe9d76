"""What the workers of ``local`` exchange when a round ends, and what the PS make of it."""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext
from tfps.modes.copies import WorkerCopies
from tfps.modes.local.round import Round
from tfps.modes.local.round_counts import RoundCounts
from tfps.modes.local.state import State
from tfps.modes.sync.accumulators import Accumulators, sum_dtype
from tfps.modes.sync.tokens import shared_variable
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable


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
        counts: How many rounds, and steps of each worker, are in the variables.
        pairs: What the worker pushes: ``n_i``, ``n_i (w - w_i)`` for each trained variable, and ``n_i w_i`` for each
            averaged one, which may hold Inf. A worker that waits pushes ``n_i = 0`` alone.
    """

    def __init__(
        self, state: State, copies: WorkerCopies, progress: Round, server: Optimizer, context: ModeContext
    ) -> None:
        self._state, self._copies, self._round, self._server = state, copies, progress, server
        self._device, self._worker, self._is_chief = context.task.device, context.task.index, context.task.is_chief
        self._workers = context.cluster.num_workers
        self._base = WorkerCopies([*state.exchanged, *state.kept], self._device, "tfps/before")
        with tf.device(state.global_step.device):
            self._total = shared_variable("tfps/weight", dtype=tf.float32)
            self.counts = RoundCounts("tfps/round", context.cluster.num_workers)
        self.chief_init = self.counts.clear()
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
        steps = self.counts.tell(self._worker, self._round.taken())
        with tf.control_dependencies([*checks, steps]):
            sent = [_weighted(tensor, weight) for tensor in (*changes, *values)]
            return [(tf.identity(weight), self._total), *zip(sent, self._state.exchanged, strict=True)]

    def collect(self, stamp: Tensor) -> Accumulators:
        """Return what adds up ``pairs`` on the PS.

        Args:
            stamp: int64 scalar: the round.
        """
        sample = self._round.sample(sent_by_all=[self._total])
        return Accumulators(self.pairs, stamp, self._workers, is_mean=False, sample=sample)

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
            steps = self.counts.told()  # each worker has written its own before it pushed
            counted = self.counts.count(steps)
            raised = self._state.global_step.assign_add(tf.reduce_max(steps), read_value=False)
            return tf.group(counted, raised)

    def begin(self, after: Sequence[Operation]) -> Operation:
        """Return an operation with which the worker begins after it has joined, or when all take a round again.

        If it was interrupted after its round had ended on the PS, it takes no round again: it keeps its slots.
        """
        fixed, has_ended = self._copies.pull_once(self._state.fixed), self._round.has_ended()
        kept = self._base.give_back(self._state.kept, self._copies, keep=has_ended)
        with tf.control_dependencies([kept]):
            counted = tf.cond(has_ended, self._count, tf.no_op)
        step = self._step([*after, kept, counted])
        with tf.control_dependencies([step]):
            return tf.group(fixed, self._round.begin(step), self._pull())

    def _count(self) -> Operation:
        """Return an operation with which a chief that is started again goes on counting."""
        counted = self._state.counted if self._is_chief else ()
        return tf.group(*(one.assign(self._copies.read(one), read_value=False) for one in counted))

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
            kept.append(self._count())  # slots are too large to send each time
        step = self._step([taken, *kept])  # last, with the step at which the next round begins: see begin
        return tf.group(self._round.begin(step), self._round.if_drawn(step, self._pull))

    def _step(self, after: Sequence[Operation]) -> Tensor:
        with tf.control_dependencies(after):
            step: Tensor = self._state.global_step.read_value()
            return step

    def _pull(self) -> Operation:
        """Return an operation that copies the variables from the PS."""
        values = [(one, one.read_value()) for one in self._state.exchanged]
        return tf.group(*(copies.assign(*pair) for pair in values for copies in (self._copies, self._base)))


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
