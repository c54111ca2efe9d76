"""Asynchronous training: apply each gradient when it arrives, to the parameters as they are then.

No worker waits for another. Other workers may have changed the parameters since a gradient was computed (it is
*stale*). k gradients make k updates, applied one by one. Downpour SGD, Dean et al. 2012, section 4.1.

To end after exactly ``max_steps`` updates, workers draw numbered tickets from a counter beside ``global_step``.
``ResourceCountUpTo`` hands out each number once (tensorflow/core/kernels/count_up_to_op.cc). The run of the current
steps also draws the next tickets, so they cost no extra round trip.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.config.converters import INT64_MAX
from tfps.modes import atomic_update
from tfps.modes.base import Copy, Fence, ModeContext, PartialUpdates, Step
from tfps.modes.moments import Moments
from tfps.runtime.graph.graph_editor import add_control_inputs
from tfps.tf_types import Optimizer, Tensor, Variable

_STALEST = 31  # larger values are counted together with this one


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one asynchronous step.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer``.
        loss: Scalar float tensor.
        global_step: int64 resource variable that counts the applied updates.
        context: The cluster and the worker.

    Returns:
        The step. Its tickets number the updates of the job, starting at 0.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    cluster, task = context.cluster, context.task
    with tf.device(global_step.device):
        seen = global_step.read_value()
    pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not pairs:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    moments = Moments(cluster.num_ps, cluster.num_workers)
    update = atomic_update.apply(optimizer, pairs, global_step, moments, task.index)
    staleness, counted = _counted(seen, update.counted, global_step)
    train_op = tf.group(counted, *update.others)
    with tf.device(global_step.device):
        counter = tf.Variable(
            0, dtype=tf.int64, trainable=False, collections=[], use_resource=True, name="tfps/tickets"
        )
        total = tf.Variable(
            lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name="tfps/partial"
        )
        first = tf.placeholder_with_default(tf.zeros([], tf.int64), [], "tfps/first_partial")
        start = tf.group(
            counter.assign(global_step, read_value=False),
            staleness.assign(tf.zeros_like(staleness), read_value=False),
            total.assign(first, read_value=False),
        )
    # Reset the counts of all workers: a late worker has counted nothing yet, and a checkpoint must see zeros.
    start = tf.group(start, moments.reset(range(cluster.num_workers))) if task.is_chief else start

    gone = tf.placeholder(tf.int64, [None], name="tfps/gone")

    def draw(count: int, in_hand: int = 0, after: Sequence[Any] = ()) -> Any:
        del in_hand  # the counter never hands out a ticket twice
        with tf.device(global_step.device):
            drawn = [_draw(counter) for _ in range(count)]
            for ticket in drawn:
                add_control_inputs(ticket.op, after)
            return tf.stack(drawn)

    def draw_after(count: int, copy: Copy) -> Any:
        # Draw last, so that failed steps draw nothing. Wait for the leaves: a graph pass may drop the group itself.
        done = [copy(op) for op in atomic_update.leaves(train_op)]
        with tf.device(global_step.device):
            with tf.control_dependencies(done):
                reached = [global_step.read_value()]
            return tf.concat([tf.stack(reached), draw(count, after=done)], axis=0) if count else tf.stack(reached)

    def give_back(count: int) -> Any:
        with tf.device(global_step.device):
            return counter.assign_sub(count, read_value=False)

    return Step(
        train_op=train_op,
        draw=draw,
        draw_after=draw_after,
        give_back=give_back,
        chief_init=start,
        worker_init=tf.group(moments.settle(task.index, update.device), moments.fence([task.index], off=False)),
        read_barrier=(update.counted,) if update.counts_last else (),
        tells_step=True,
        fence=Fence(gone, moments.fence(gone)),
        staleness=staleness.read_value(),
        any_worker_can_finish=True,
        steps_taken=moments.steps(update.device),
        moments=moments,
        partial=PartialUpdates(moments.partial(), total, first, lambda: moments.settle(task.index, update.device)),
    )


def _counted(seen: Any, update: Any, global_step: Variable) -> tuple[Any, Any]:
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


def _draw(counter: Variable) -> Any:
    return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=INT64_MAX, T=tf.int64)
