"""Asynchronous training: apply each gradient when it arrives, to the parameters as they are then.

No worker waits for another. Other workers may have changed the parameters since a gradient was computed (it is
*stale*). k gradients make k updates, applied one by one. Downpour SGD, Dean et al. 2012, section 4.1.

To end after exactly ``max_steps`` updates, workers draw numbered tickets from a counter beside ``global_step``.
``ResourceCountUpTo`` hands out each number once (tensorflow/core/kernels/count_up_to_op.cc). The run of the current
steps also draws the next tickets, so they cost no extra round trip.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.config.converters import INT64_MAX
from tfps.modes.base import Copy, ModeContext, Step
from tfps.modes.recovery import Fence, PartialUpdates
from tfps.modes.staleness import options
from tfps.modes.updates import atomic_update
from tfps.modes.updates.moments import Moments
from tfps.modes.updates.update_ops import leaves
from tfps.runtime.graph.graph_editor import add_control_inputs
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable

_STALEST = 31  # larger values are counted together with this one


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one asynchronous step; see ``Mode.build_step``. Its tickets number the updates of the job, starting at 0.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    cluster = context.cluster
    worker = context.task.index
    with tf.device(global_step.device):
        seen = global_step.read_value()
    pairs = _gradients(optimizer, loss)
    moments = Moments(cluster.num_ps, cluster.num_workers)
    option = options.of(context.config, optimizer, pairs)
    update = atomic_update.apply(option.optimizer, pairs, global_step, moments, worker)
    staleness, counted = count_staleness(seen, update.counted, global_step)
    train_op = tf.group(counted, *update.others)
    tickets = _Tickets(global_step, train_op)
    partial_total, first_partial = partial_updates(global_step)
    chief_init = _chief_init(global_step, tickets, staleness, partial_total, first_partial)
    # Reset the counts of all workers: a late worker has counted nothing yet, and a checkpoint must see zeros.
    if context.task.is_chief:
        chief_init = tf.group(chief_init, moments.reset(range(cluster.num_workers)), *option.init)
    gone = tf.placeholder(tf.int64, [None], name="tfps/gone")
    return Step(
        train_op=train_op,
        draw=tickets.draw,
        draw_after=tickets.draw_after,
        give_back=tickets.give_back,
        chief_init=chief_init,
        worker_init=tf.group(moments.settle(worker, update.device), moments.fence([worker], off=False)),
        read_barrier=(update.counted,) if update.counts_last else (),
        reports_step=True,
        fence=Fence(gone, moments.fence(gone)),
        staleness=staleness.read_value(),
        any_worker_can_finish=True,
        steps_taken=moments.steps(update.device),
        moments=moments,
        partial=partial_of(moments, partial_total, first_partial, worker, update.device),
        finish=option.finish,
    )


def _gradients(optimizer: Optimizer, loss: Tensor) -> Sequence[tuple[Gradient, Variable]]:
    """Return the gradients of a loss, each with its variable."""
    pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not pairs:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    return pairs


class _Tickets:
    """The counter of tickets, on the PS of ``global_step``.

    Args:
        global_step: int64 resource variable that counts the applied updates.
        train_op: The operation that takes one step.
    """

    def __init__(self, global_step: Variable, train_op: Operation) -> None:
        self._global_step = global_step
        self._train_op = train_op
        with tf.device(global_step.device):
            self.counter = tf.Variable(
                0, dtype=tf.int64, trainable=False, collections=[], use_resource=True, name="tfps/tickets"
            )

    def draw(self, count: int, pending: int = 0) -> Tensor:
        """Draw tickets. The counter never hands out one twice, so those in hand do not matter."""
        del pending
        return self._draw_all(count, ())

    def draw_after(self, count: int, copy: Copy) -> Tensor:
        """Return the global step after a copy of the step, and then tickets drawn after it.

        Draw last, so that failed steps draw nothing. Wait for the leaves: a graph pass may drop the group itself.
        """
        done = [copy(op) for op in leaves(self._train_op)]
        with tf.device(self._global_step.device):
            with tf.control_dependencies(done):
                reached = [self._global_step.read_value()]
            if not count:
                return tf.stack(reached)
            return tf.concat([tf.stack(reached), self._draw_all(count, done)], axis=0)

    def give_back(self, count: int) -> Operation:
        """Lower the counter by the tickets that are left."""
        with tf.device(self._global_step.device):
            return self.counter.assign_sub(count, read_value=False)

    def _draw_all(self, count: int, after: Sequence[Operation]) -> Tensor:
        """Draw tickets after some operations."""
        with tf.device(self._global_step.device):
            drawn = [_draw(self.counter) for _ in range(count)]
            for ticket in drawn:
                add_control_inputs(ticket.op, after)
            return tf.stack(drawn)


def partial_updates(global_step: Variable) -> tuple[Variable, Tensor]:
    """Return the variable of partially applied updates that have been reported, and its first value: a placeholder."""
    with tf.device(global_step.device):
        total = tf.Variable(
            lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name="tfps/partial"
        )
        return total, tf.placeholder_with_default(tf.zeros([], tf.int64), [], "tfps/first_partial")


def partial_of(moments: Moments, total: Variable, first: Tensor, worker: int, device: str) -> PartialUpdates:
    """Return the partially applied updates of a worker, and of all; ``device`` is the PS of ``global_step``."""
    return PartialUpdates(moments.partial(), total, first, lambda: moments.settle(worker, device))


def _chief_init(
    global_step: Variable, tickets: _Tickets, staleness: Variable, total: Variable, first: Tensor
) -> Operation:
    """Return an operation that sets the counter of tickets and the counts to their first values."""
    with tf.device(global_step.device):
        return tf.group(
            tickets.counter.assign(global_step, read_value=False),
            staleness.assign(tf.zeros_like(staleness), read_value=False),
            total.assign(first, read_value=False),
        )


def count_staleness(seen: Tensor, update: Operation, global_step: Variable) -> tuple[Variable, Operation]:
    """Return an int64 [n] variable, and an operation that counts a step there by its staleness.

    Both are on the PS of ``global_step``, so no extra data crosses the wire. If another worker updates at the same
    moment, its update may be counted as an earlier one.
    """
    with tf.device(global_step.device):
        counts = tf.Variable(
            lambda: tf.zeros([_STALEST + 1], tf.int64),
            trainable=False,
            collections=[],
            use_resource=True,
            name="tfps/staleness",
        )
        with tf.control_dependencies([update]):
            missed = global_step.read_value() - 1 - seen
        place = tf.clip_by_value(missed, 0, _STALEST)
        return counts, counts.scatter_add(tf.IndexedSlices(tf.ones([], tf.int64), place)).op


def _draw(counter: Variable) -> Tensor:
    return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=INT64_MAX, T=tf.int64)
