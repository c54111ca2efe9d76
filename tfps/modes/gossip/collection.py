"""The mean of all workers' copies, which the chief takes now and then, and how the workers begin from it."""

import dataclasses
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext
from tfps.modes.copies import WorkerCopies
from tfps.modes.gossip.links import Links
from tfps.modes.gossip.mode import collect_every
from tfps.modes.local.round import Round
from tfps.modes.local.round_counts import RoundCounts
from tfps.modes.local.state import State
from tfps.modes.sync.accumulators import sum_dtype
from tfps.modes.sync.tokens import shared_variable
from tfps.tf_types import Gradient, Operation, Tensor, Variable


class Period(Round):
    """How far a worker is between two means. In a new generation it takes no step before all take a mean together.

    Args:
        copies: The worker's copies of the variables.
        global_step: The variable of the global step.
        context: The job and the worker.
        links: The worker's queues.
    """

    def __init__(self, copies: WorkerCopies, global_step: Variable, context: ModeContext, links: Links) -> None:
        config = context.config.replace(sync_every=collect_every(context.config))
        super().__init__(copies, global_step, dataclasses.replace(context, config=config))
        self._links, self._device = links, context.task.device
        with tf.device(None), tf.device(self._device):
            self._started = shared_variable("tfps/gossip/started")

    def allowed(self, after: Sequence[Operation] = ()) -> Tensor:
        """Return how many steps the worker may take before the next mean: int64 scalar."""
        left = super().allowed(after)
        with tf.device(None), tf.device(self._device), tf.control_dependencies(after):
            has_started = tf.equal(self._started.read_value(), self._links.generation())
            return tf.where(has_started, left, tf.zeros([], tf.int64))

    def start(self, step: Tensor, is_last: Tensor) -> Operation:
        """Return an operation that lets the worker take steps, from a step that all have come to.

        Args:
            step: int64 scalar: the step.
            is_last: bool scalar: whether there are no further steps.
        """
        begun = self.begin(step)
        with tf.device(None), tf.device(self._device), tf.control_dependencies([begun]):
            never = tf.constant(-1, tf.int64)
            return self._started.assign(tf.where(is_last, never, self._links.generation()), read_value=False)

    def join(self, step: Tensor) -> Operation:
        """Return an operation with which the worker waits for the others at a step."""
        with tf.device(None), tf.device(self._device):
            return tf.group(self.begin(step), self._started.assign(-1, read_value=False))


class Collection:
    """What the workers send to the chief for the mean, and what it makes of it.

    Args:
        state: The variables.
        copies: The worker's copies of them.
        period: How far the worker is.
        context: The job and the worker.

    Attributes:
        chief_init: Operation that the chief runs before any worker sends anything.
        counts: How many rounds, and steps of each worker, are in the variables.
        pairs: What the worker sends: its value of each float that it changes, with the variable.
    """

    def __init__(self, state: State, copies: WorkerCopies, period: Period, context: ModeContext) -> None:
        self._state, self._copies, self._period = state, copies, period
        self._device, self._worker, self._is_chief = context.task.device, context.task.index, context.task.is_chief
        own = [*state.slots, *state.counted]
        self._kept = [one for one in own if not _has_mean(one)]
        self._averaged = [*state.exchanged, *(one for one in own if _has_mean(one))]
        with tf.device(state.global_step.device):
            self.counts = RoundCounts("tfps/gossip", context.cluster.num_workers)
            self._is_last = shared_variable("tfps/gossip/is_last", dtype=tf.bool)
            self._staged = [
                shared_variable(f"tfps/gossip/staged_{index}", one.shape.as_list(), one.dtype.base_dtype)
                for index, one in enumerate(self._kept)
            ]
        self.chief_init = tf.group(self.counts.clear(), self._is_last.initializer)
        with tf.device(None), tf.device(self._device):
            self.pairs = self._sent()

    def _sent(self) -> Sequence[tuple[Gradient, Variable]]:
        values = [self._copies.read(variable) for variable in self._averaged]
        trained = len(self._state.trained)
        checks = [
            tf.check_numerics(value, f"tfps: the copy of {variable.op.name}").op
            for value, variable in zip(values[:trained], self._state.trained, strict=True)
            if not value.dtype.is_complex
        ]
        noted = [self.counts.tell(self._worker, self._period.taken())]
        if self._is_chief:
            pairs = zip(self._staged, self._kept, strict=True)
            noted += [staged.assign(self._copies.read(one), read_value=False) for staged, one in pairs]
        with tf.control_dependencies([*checks, *noted]):
            sent = [tf.cast(tf.identity(value), sum_dtype(value.dtype)) for value in values]
        return list(zip(sent, self._averaged, strict=True))

    def apply(self, means: Sequence[tuple[Gradient, Variable]], counter: Variable) -> Operation:
        """Return an operation that makes the variables the means, and raises the global step.

        Where no worker has taken a step, it changes nothing: a mean of equal values may have another last bit.
        """
        del counter
        steps = self.counts.told()  # each worker has written its own before it sent the rest
        most = tf.reduce_max(steps)
        some_input_has_ended = tf.reduce_any(steps < most)
        pairs = [*means, *((staged.read_value(), one) for staged, one in zip(self._staged, self._kept, strict=True))]
        assigned = [_assigned(variable, value, most > 0) for value, variable in pairs]
        assigned.append(self._is_last.assign(some_input_has_ended, read_value=False))
        with tf.control_dependencies(assigned):
            raised = self._state.global_step.assign_add(most, read_value=False)
            return tf.group(self.counts.count(steps), raised)

    def end(self, taken: Operation) -> Operation:
        """Return an operation that ends when the mean is there, and lets the worker go on with its copies.

        Args:
            taken: Sends ``pairs``, and ends when the chief has taken the mean of all workers'.
        """
        with tf.control_dependencies([taken]):
            step, is_last = self._state.global_step.read_value(), self._is_last.read_value()
        return self._period.start(step, is_last)

    def join(self, after: Sequence[Operation]) -> Operation:
        """Return an operation that gives the worker the chief's values."""
        with tf.control_dependencies(after):
            step = self._state.global_step.read_value()
            pulled = self._copies.pull(one for one in self._state.all if one is not self._state.global_step)
        return tf.group(self._period.join(step), pulled)


def _has_mean(variable: Variable) -> bool:
    return bool(variable.dtype.is_floating or variable.dtype.is_complex)


def _assigned(variable: Variable, value: Tensor, where: Tensor) -> Operation:
    with tf.device(variable.device):
        value = tf.cast(value, variable.dtype.base_dtype)
        return variable.assign(tf.where_v2(where, value, variable.read_value()), read_value=False)
