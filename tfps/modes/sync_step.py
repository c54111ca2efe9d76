"""Synchronous training: an update is the mean of the gradients of all workers, computed at the same parameters.

This is the protocol of TensorFlow's ``SyncReplicasOptimizer`` (tensorflow/python/training/sync_replicas_optimizer.py;
Chen et al. 2016, "Revisiting Distributed Synchronous SGD"). The two sides, with N workers:

1. A worker computes a gradient and pushes it into an accumulator on the PS. The gradient is stamped with the step at
   which it was computed. The accumulator drops gradients with an older stamp than its own.
2. The background run of the chief takes the mean of N gradients and applies it once. It raises ``global_step`` to g and
   puts a token of value g into each worker's queue.
3. The worker takes its token. Its value is the step to which the worker's next gradient belongs.

With two workers::

    worker/0   gradient --push--> [accumulator, stamp g]                  [queue 0] --token g+1--> stamp, next step
    worker/1   gradient --push--> [  of each variable  ]                  [queue 1] --token g+1--> stamp, next step
    chief's update:        take the mean of 2 -> apply -> global_step = g+1 -> put g+1 into each queue

There are three differences from TensorFlow, so that a mean is always one gradient of each worker, divided by N:

- There, tokens have no owner. A fast worker can take the token of a slow one, compute twice in one step, and make a
  mean of its gradients alone. Here each worker has a separate queue.
- ``SparseConditionalAccumulator`` divides each row by the number of gradients that had the row, and merges rows only if
  their indices are sorted. Here it sums, which is correct in any order. The result is merged by row, because an
  optimizer may take its norm, and the sum is divided by N.
- The stamp is kept on the PS, beside the tokens, and is not sent with every gradient.

A worker may be lost with its token, or after it has sent a part of its gradient. The chief may be in the middle of an
update. The workers then restart together, in the next *generation*. Its stamps start from a higher base, so gradients
still in flight are dropped as stale. Gradients that have arrived are cleared, and every worker computes the gradient of
the current step again. A PS may not know yet that a worker is lost, and still have its requests pending. These get
tokens and gradients of zeros. An update of another generation than that of the PS fails before it changes anything.

An update starts on all PS or on none, when each has all its means, and the model's own changes are made that an update
uses (``meeting``). After that it needs only the chief, which lets it finish after all workers have interrupted their
steps. If the chief itself is lost in the middle of an update (``partially_applied``), the variables belong to two steps
and cannot be used.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.accumulators import MeanAccumulator, accumulate, values_of
from tfps.modes.base import Copy, ModeContext, Step, SyncRecovery
from tfps.modes.meeting import Meeting
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable

_BASE = 1 << 40  # more than the steps of any job
_OVER = "the update is of a generation that is over"


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one synchronous step; see ``Mode.build_step``. The optimizer gets the mean gradient.

    The tickets are the tokens. None is handed out in advance, so no gradient is stale at the start.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    worker, num_workers = context.task.index, context.cluster.num_workers
    with tf.device(global_step.device):
        base = _number("tfps/base")
        stamp = _number(f"tfps/stamp_{worker}")
        stamped = stamp.read_value()
    accumulators = accumulate(_gradients(optimizer, loss), stamped, num_workers)
    generation = tf.placeholder(tf.int64, [], name="tfps/present_generation")
    complete, starts, means = _start_together(accumulators, generation)
    with tf.device(global_step.device):
        starting = [start.start for start in starts]
        meeting = Meeting(complete, starting, functools.partial(_check, starts[0].generation, generation))
        tokens = _Tokens(global_step, num_workers)
        update = tokens.hand_out(optimizer.apply_gradients(means, global_step))
        pushed = [_number(f"tfps/pushed_{index}") for index in range(num_workers)]
        token = tokens.take(worker, pushed[worker], [each.push for each in accumulators])
        taken = stamp.assign(token + base, read_value=False)
        queues = [*tokens.queues, *meeting.queues]
        return Step(
            train_op=taken,
            draw=tokens.expected,
            draw_after=functools.partial(_tokens_from, token),
            give_back=functools.partial(_close, queues),
            worker_init=_worker_init(global_step, base, stamp, pushed[worker]),
            chief_init=_chief_init(global_step, base, generation, starts, accumulators),
            read_barrier=(taken,),
            update=update,
            update_starts=starting,
            hold=functools.partial(meeting.hold, token.op) if context.task.is_chief else None,
            recovery=_recovery(global_step, generation, starts, accumulators, queues),
            ended=tokens.are_closed() | (global_step.read_value() >= context.config.max_steps),
            updates_ahead=tf.stack([number.read_value() for number in pushed]) - global_step,
        )


def _gradients(optimizer: Optimizer, loss: Tensor) -> Sequence[tuple[Gradient, Variable]]:
    """Return the gradients of a loss, each with its variable.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    gradients = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not gradients:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    return gradients


def _tokens_from(token: Tensor, count: int, copy: Copy) -> Tensor:
    """Return the tickets from the token of a copy of the step on."""
    return copy(token) + tf.range(count, dtype=tf.int64)


def _worker_init(global_step: Variable, base: Variable, stamp: Variable, pushed: Variable) -> Operation:
    """Return an operation after which a worker's gradient belongs to the present step."""
    return tf.group(
        stamp.assign(global_step + base, read_value=False),
        pushed.assign(global_step, read_value=False),
    )


def _number(name: str) -> Variable:
    return tf.Variable(lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name=name)


class _Tokens:
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

    def take(self, worker: int, pushed: Variable, pushes: Sequence[Operation]) -> Tensor:
        """Count a worker's gradient when all of it has arrived, and then return the token that the worker takes."""
        with tf.control_dependencies(pushes):
            counted = pushed.assign_add(1, read_value=False)
        with tf.control_dependencies([counted]):
            return self.queues[worker].dequeue()

    def expected(self, count: int, pending: int = 0) -> Tensor:
        """Return the values of the tokens that come next, without taking any."""
        return self._global_step.read_value() + tf.range(pending, pending + count, dtype=tf.int64)

    def are_closed(self) -> Tensor:
        """Return whether one worker's input has ended."""
        return tf.reduce_any(tf.stack([queue.is_closed() for queue in self.queues]))


def _close(queues: Sequence[Any], count: int) -> Operation:
    """Wake the other workers when one worker's input has ended: no mean is possible without that worker."""
    del count
    return tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in queues))


def _chief_init(
    global_step: Variable,
    base: Variable,
    generation: Tensor,
    starts: Sequence["_Start"],
    accumulators: Sequence[MeanAccumulator],
) -> Operation:
    """Return an operation that starts a generation. From then on, gradients with stamps of earlier ones are dropped."""
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
    queues: Sequence[Any],
) -> SyncRecovery:
    held = [each.accumulator.num_accumulated() for each in accumulators] + [queue.size() for queue in queues]
    started = tf.stack([start.count.read_value() for start in starts])
    return SyncRecovery(
        generation=generation,
        counts=tf.stack([tf.cast(count, tf.int64) for count in held]),
        unblock=[each.unblock for each in accumulators] + [queue.enqueue(global_step) for queue in queues],
        unblock_count=len(queues),
        clear=[each.drop for each in accumulators] + [queue.dequeue().op for queue in queues],
        partially_applied=tf.reduce_any(tf.not_equal(started, global_step)),
    )


@dataclass(frozen=True)
class _Start:
    """How an update starts on one PS.

    Attributes:
        generation: Variable: the generation of the PS.
        count: Variable: the number of updates that have started there.
        start: Operation that starts one.
    """

    generation: Variable
    count: Variable
    start: Operation


def _start_together(
    accumulators: Sequence[MeanAccumulator], generation: Tensor
) -> tuple[Sequence[Operation], Sequence[_Start], Sequence[tuple[Gradient, Variable]]]:
    """Start an update on all PS or on none: when each has all its means and is in the generation of the update.

    Each PS notifies every other PS when its means are complete, so nothing waits for more than one message of each::

        ps/0:  means complete, generation right --.   .--> started[0] += 1 --> means of ps/0 are applied
                                                   >-<
        ps/1:  means complete, generation right --'   '--> started[1] += 1 --> means of ps/1 are applied

    Returns:
        The operations that end when all means are complete, how an update starts on each PS, and the means of a started
        update with their variables.
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
                complete.append(_check(generations[-1], generation))
    starts: list[_Start] = []
    means: list[tuple[Gradient, Variable]] = []
    for device, own in by_ps.items():
        with tf.device(device):
            count = _number(f"tfps/begun_{len(starts)}")
            with tf.control_dependencies(complete):
                starts.append(_Start(generations[len(starts)], count, count.assign_add(1, read_value=False)))
            with tf.control_dependencies([starts[-1].start]):
                means += [(_copied(each.mean), each.variable) for each in own]
    return complete, starts, means


def _check(of_ps: Variable, generation: Tensor) -> Operation:
    """Return an operation that fails if an update is not of the generation that a PS is in."""
    with tf.device(of_ps.device):
        return tf.raw_ops.Assert(condition=tf.equal(of_ps.read_value(), generation), data=[_OVER])


def _copied(mean: Gradient) -> Gradient:
    if isinstance(mean, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(mean.values), tf.identity(mean.indices), mean.dense_shape)
    return tf.identity(mean)
