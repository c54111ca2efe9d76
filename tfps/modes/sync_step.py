"""Synchronous training: an update is the mean of the gradients of all workers, computed at the same parameters.

The protocol of TensorFlow's ``SyncReplicasOptimizer`` (tensorflow/python/training/sync_replicas_optimizer.py; Chen et
al. 2016, "Revisiting Distributed Synchronous SGD"). The two sides, N workers:

1. A worker computes a gradient and puts it into an accumulator on the PS, stamped with the step it was computed at;
   an older stamp than the accumulator's is dropped.
2. The chief's background run takes N gradients as their mean, applies it once, raises ``global_step`` to g and puts a
   token of value g into each worker's queue.
3. The worker takes its token, whose value is the step that its next gradient counts for.

Drawn, with two workers::

    worker/0   gradient --push--> [accumulator, stamp g]                  [queue 0] --token g+1--> stamp, next step
    worker/1   gradient --push--> [  of each variable  ]                  [queue 1] --token g+1--> stamp, next step
    chief's update:        take the mean of 2 -> apply -> global_step = g+1 -> put g+1 into each queue

Three things differ from TensorFlow's, so that a mean is always one gradient of each worker, divided by N:

- There, tokens have no owner: a quick worker can take a slow one's, compute twice in one step, and make the mean one of
  its own gradients alone. Here each worker has a queue of its own.
- ``SparseConditionalAccumulator`` divides each row by the number of gradients it saw that row in, and merges rows only
  if their indices come sorted. Here it adds up, which is right in any order; what comes out is merged by row (an
  optimizer may take its norm), and the sum is divided by N.
- The stamp is kept on the PS, beside the tokens, and does not travel with every gradient.

A worker may be lost with its token, or with a part of its gradient sent, and the chief in the middle of an update. The
workers then restart together, in the next *generation*. Its stamps start from a higher base, so gradients that are
still on their way from before are dropped as stale. What has arrived is cleared, and every worker computes the gradient
of the present step again. A PS may not know yet that a worker is lost, and still have its requests in line: they get
tokens and gradients of zeros. An update of another generation than the PS's fails before it changes anything.

An update starts on all PS or on none: when each has all its means. From then on it needs nobody but the chief, which
lets it finish when all workers have interrupted their steps. Only if the chief is lost in the middle of an update
(``partially_applied``), the variables are of two steps and cannot be used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.modes.accumulators import MeanAccumulator, accumulate, values_of
from tfps.modes.base import Copy, ModeContext, Step, SyncRecovery
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable

_BASE = 1 << 40  # more than there are steps
_OVER = "the update is of a generation that is over"


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one synchronous step; see ``Mode.build_step``.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer``, which gets the mean gradient, and does not raise ``global_step``.
        loss: Scalar float tensor.
        global_step: int64 resource variable; counts the updates applied.
        context: The worker, and the cluster, whose number of workers is the number of gradients in a mean.

    Returns:
        The step; its tickets are the tokens, and no tokens are handed out in advance, so no gradient is stale at start.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    with tf.device(global_step.device):
        base, stamp = _number("tfps/base"), _number(f"tfps/stamp_{context.task.index}")
        stamped = stamp.read_value()
    gradients = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not gradients:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    accumulators = accumulate(gradients, stamped, context.cluster.num_workers)
    generation = tf.placeholder(tf.int64, [], name="tfps/present_generation")
    starts, means = _start_together(accumulators, generation)
    with tf.device(global_step.device):
        tokens = _Tokens(global_step, context.cluster.num_workers)
        update = tokens.hand_out(optimizer.apply_gradients(means, global_step))
        pushed = [_number(f"tfps/pushed_{index}") for index in range(context.cluster.num_workers)]
        token = tokens.take(context.task.index, pushed[context.task.index], [each.push for each in accumulators])
        taken = stamp.assign(token + base, read_value=False)
        worker_init = tf.group(
            stamp.assign(global_step + base, read_value=False),
            pushed[context.task.index].assign(global_step, read_value=False),
        )
        chief_init = _chief_init(global_step, base, generation, starts, accumulators)
        recovery = _recovery(global_step, generation, starts, accumulators, tokens)
        updates_ahead = tf.stack([number.read_value() for number in pushed]) - global_step

    def draw(count: int, in_hand: int = 0) -> Tensor:
        return global_step.read_value() + tf.range(in_hand, in_hand + count, dtype=tf.int64)

    def draw_after(count: int, copy: Copy) -> Tensor:
        return copy(token) + tf.range(count, dtype=tf.int64)

    return Step(
        train_op=taken,
        draw=draw,
        draw_after=draw_after,
        give_back=tokens.close,
        chief_init=chief_init,
        worker_init=worker_init,
        read_barrier=(taken,),
        update=update,
        update_starts=[start.start for start in starts],
        recovery=recovery,
        updates_ahead=updates_ahead,
    )


def _number(name: str) -> Variable:
    return tf.Variable(lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name=name)


class _Tokens:
    """A queue for each worker, in which the chief puts a token when an update is made.

    Args:
        global_step: int64 resource variable, whose value is a token's.
        num_workers: The number of queues.
    """

    def __init__(self, global_step: Variable, num_workers: int) -> None:
        self._global_step = global_step
        names = [f"tfps/tokens_{index}" for index in range(num_workers)]
        self.queues = [tf.FIFOQueue(-1, tf.int64, shapes=[], name=name, shared_name=name) for name in names]

    def hand_out(self, applied: Operation) -> Operation:
        """Raise ``global_step`` when an update is applied, and then put a token into each queue."""
        with tf.control_dependencies([applied]):
            raised = self._global_step.assign_add(1, read_value=False)
        with tf.control_dependencies([raised]):
            token = self._global_step.read_value()
            return tf.group(*(queue.enqueue(token) for queue in self.queues))

    def take(self, worker: int, pushed: Variable, pushes: Sequence[Operation]) -> Tensor:
        """Count a worker's gradient when all of it has arrived, and return the token that the worker takes then."""
        with tf.control_dependencies(pushes):
            counted = pushed.assign_add(1, read_value=False)
        with tf.control_dependencies([counted]):
            return self.queues[worker].dequeue()

    def close(self, count: int) -> Operation:
        """Wake the others when a worker's input has ended: no mean can be made without that worker."""
        del count
        return tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in self.queues))


def _chief_init(
    global_step: Variable,
    base: Variable,
    generation: Tensor,
    starts: Sequence["_Start"],
    accumulators: Sequence[MeanAccumulator],
) -> Operation:
    """Return an operation that starts a generation: gradients with stamps of earlier ones are dropped from then on."""
    with tf.control_dependencies([base.assign(generation * _BASE, read_value=False)]):
        first = base + global_step
    return tf.group(
        *(start.generation.assign(generation, read_value=False) for start in starts),
        *(each.accumulator.set_global_step(first) for each in accumulators),
        *(start.count.assign(global_step, read_value=False) for start in starts),
    )


def _recovery(
    global_step: Variable,
    generation: Tensor,
    starts: Sequence["_Start"],
    accumulators: Sequence[MeanAccumulator],
    tokens: _Tokens,
) -> SyncRecovery:
    held = [each.accumulator.num_accumulated() for each in accumulators] + [queue.size() for queue in tokens.queues]
    started = tf.stack([start.count.read_value() for start in starts])
    return SyncRecovery(
        generation=generation,
        counts=tf.stack([tf.cast(count, tf.int64) for count in held]),
        unblock=[each.unblock for each in accumulators] + [queue.enqueue(global_step) for queue in tokens.queues],
        unblock_count=len(tokens.queues),
        clear=[each.drop for each in accumulators] + [queue.dequeue().op for queue in tokens.queues],
        partially_applied=tf.reduce_any(tf.not_equal(started, global_step)),
    )


@dataclass(frozen=True)
class _Start:
    """How an update starts on one PS.

    Attributes:
        generation: Variable: the generation in which the PS is.
        count: Variable: how many updates have started there.
        start: Operation with which one starts.
    """

    generation: Variable
    count: Variable
    start: Operation


def _start_together(
    accumulators: Sequence[MeanAccumulator], generation: Tensor
) -> tuple[Sequence[_Start], Sequence[tuple[Gradient, Variable]]]:
    """Let an update start on all PS or on none: when each has all its means, and is in the update's generation.

    Each PS tells each other when it has them, so nothing waits for more than one message of each::

        ps/0:  means complete, generation right --.   .--> started[0] += 1 --> means of ps/0 are applied
                                                   >-<
        ps/1:  means complete, generation right --'   '--> started[1] += 1 --> means of ps/1 are applied

    Returns:
        For each PS how an update starts there; the means of an update that has started, with their variables.
    """
    by_ps: dict[str, list[MeanAccumulator]] = {}
    for each in sorted(accumulators, key=lambda each: str(each.variable.device)):
        by_ps.setdefault(each.variable.device, []).append(each)
    generations: list[Variable] = []
    complete: list[Operation] = []
    for device, own in by_ps.items():
        with tf.device(device):
            generations.append(_number(f"tfps/begun_in_generation_{len(generations)}"))
            with tf.control_dependencies([values_of(each.mean) for each in own]):
                is_right = tf.equal(generations[-1].read_value(), generation)
            complete.append(tf.raw_ops.Assert(condition=is_right, data=[_OVER]))
    starts: list[_Start] = []
    means: list[tuple[Gradient, Variable]] = []
    for device, own in by_ps.items():
        with tf.device(device):
            count = _number(f"tfps/begun_{len(starts)}")
            with tf.control_dependencies(complete):
                starts.append(_Start(generations[len(starts)], count, count.assign_add(1, read_value=False)))
            with tf.control_dependencies([starts[-1].start]):
                means += [(_copied(each.mean), each.variable) for each in own]
    return starts, means


def _copied(mean: Gradient) -> Gradient:
    if isinstance(mean, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(mean.values), tf.identity(mean.indices), mean.dense_shape)
    return tf.identity(mean)
