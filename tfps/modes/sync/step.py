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

With ``--backup_workers=k``, an update takes the first N - k gradients of its step to have arrived. A late one is
dropped and counted; its worker takes the newest of its tokens, and goes on with that step (``backup_workers``).
Gradients are then written into slots (``gradient_slots``), as they are where ``--aggregate`` needs each of them.

There are three differences from TensorFlow, so that a mean of all is one gradient of each worker, divided by N:

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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.base import Copy, ModeContext, Step
from tfps.modes.recovery import SyncRecovery
from tfps.modes.sync.accumulators import Accumulators
from tfps.modes.sync.backup_workers import BackupWorkers
from tfps.modes.sync.collector import Collector, Held
from tfps.modes.sync.gradient_slots import GradientSlots
from tfps.modes.sync.meeting import Meeting
from tfps.modes.sync.tokens import Stamps, Tokens, shared_variable
from tfps.tf_types import Fetch, Gradient, Operation, Optimizer, Tensor, Variable

_BASE = 1 << 40  # more than the steps of any job
_OVER = "the update is of a generation that is over"


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one synchronous step; see ``Mode.build_step``. The optimizer gets the mean gradient.

    The tickets are the tokens. None is handed out in advance, so no gradient is stale at the start.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    updates = Updates(optimizer.apply_gradients, global_step)
    step = of_gradients(gradients(optimizer, loss), updates, context)
    with tf.device(global_step.device):
        return dataclasses.replace(step, ended=step.ended | (global_step.read_value() >= context.config.max_steps))


@dataclass(frozen=True)
class Updates:
    """What the updates of the protocol do.

    Attributes:
        apply: Adds an operation that applies combined gradients. Its second argument is ``step``.
        step: int64 resource variable on a PS, which the protocol raises by 1 with each update.
        before: Operations that ``Step.chief_init`` runs first.
        collect: Makes what collects the gradients, from their stamp. ``None``: as ``--aggregate`` says.
    """

    apply: Callable[[Sequence[tuple[Gradient, Variable]], Variable], Fetch]
    step: Variable
    before: Sequence[Operation] = ()
    collect: Callable[[Tensor], Collector] | None = None


def of_gradients(pairs: Sequence[tuple[Gradient, Variable]], updates: Updates, context: ModeContext) -> Step:
    """Build the protocol for any gradients of this worker, or what a mode takes for a gradient.

    Args:
        pairs: This worker's gradients, each with its variable.
        updates: What is done with the combined gradients.
        context: The job and the worker.
    """
    global_step, worker, num_workers = updates.step, context.task.index, context.cluster.num_workers
    with tf.device(global_step.device):
        stamps = Stamps(worker, num_workers)
    collector = (updates.collect or functools.partial(_collector, pairs, context, global_step))(stamps.present)
    generation = tf.placeholder(tf.int64, [], name="tfps/present_generation")
    complete, starts, combined = _start_together(collector, generation)
    with tf.device(global_step.device):
        gate = complete, [start.start for start in starts], functools.partial(_check, starts[0].generation, generation)
        meeting = Meeting(*gate)
        backup = _backup(context, collector, *gate)
        tokens, applied = Tokens(global_step, num_workers), updates.apply(combined, global_step)
        update = tokens.hand_out(backup.count(applied) if backup else applied)
        counted = stamps.count([backup.send(collector.pushes)] if backup else collector.pushes)
        token = tokens.take(worker, counted, newest=backup is not None)
        taken = stamps.take(token)
        queues = [*tokens.queues, *meeting.queues]
        step = Step(
            train_op=taken,
            draw=functools.partial(tokens.catch_up, worker, stamps) if backup else tokens.expected,
            draw_after=functools.partial(_tokens_from, token),
            give_back=functools.partial(_close, queues),
            worker_init=stamps.worker_init(),
            chief_init=_chief_init(updates.before, global_step, stamps, generation, starts, collector),
            read_barrier=(taken,),
            update=update,
            update_starts=gate[1],
            hold=functools.partial(meeting.hold, token.op) if context.task.is_chief else None,
            recovery=_recovery(global_step, generation, starts, collector, queues),
            ended=tokens.are_closed(),
            updates_ahead=stamps.ahead(global_step),
        )
        return backup.added_to(step, token, queues) if backup else step


def _backup(
    context: ModeContext,
    collector: Collector,
    complete: Sequence[Operation],
    starts: Sequence[Operation],
    check: Callable[[], Operation],
) -> BackupWorkers | None:
    """Return what an update needs that leaves some gradients out; ``None`` if it has all."""
    if not context.config.backup_workers or not isinstance(collector, GradientSlots):
        return None
    return BackupWorkers(context, collector.chosen, complete, starts, check)


def _collector(
    pairs: Sequence[tuple[Gradient, Variable]], context: ModeContext, global_step: Variable, stamp: Tensor
) -> Collector:
    """Return what collects the gradients. A sum of all needs no slots."""
    config, num_workers = context.config, context.cluster.num_workers
    aggregate, spare = config.aggregate or "mean", config.backup_workers or 0
    if aggregate in ("mean", "sum") and not spare:
        return Accumulators(pairs, stamp, num_workers, aggregate == "mean")
    sizes = num_workers, num_workers - spare
    return GradientSlots(pairs, stamp, context.task.index, *sizes, aggregate, global_step.device)


def gradients(optimizer: Optimizer, loss: Tensor) -> Sequence[tuple[Gradient, Variable]]:
    """Return the gradients of a loss, each with its variable.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not pairs:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    return pairs


def _tokens_from(token: Tensor, count: int, copy: Copy) -> Tensor:
    """Return the tickets from the token of a copy of the step on."""
    return copy(token) + tf.range(count, dtype=tf.int64)


def _close(queues: Sequence[Any], count: int) -> Operation:
    """Wake the other workers when one worker's input has ended: no mean is possible without that worker."""
    del count
    return tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in queues))


def _chief_init(
    before: Sequence[Operation],
    global_step: Variable,
    stamps: Stamps,
    generation: Tensor,
    starts: Sequence["_Start"],
    collector: Collector,
) -> Operation:
    """Return an operation that starts a generation. From then on, gradients with stamps of earlier ones are dropped."""
    with tf.control_dependencies(before):
        moved = stamps.base.assign(generation * _BASE, read_value=False)
        steps = [one.assign(global_step, read_value=False) for one in (stamps.first, *(each.count for each in starts))]
    with tf.control_dependencies([moved]):
        first = stamps.base + global_step
    return tf.group(
        *(start.generation.assign(generation, read_value=False) for start in starts),
        collector.begin(first),
        *steps,
    )


def _recovery(
    global_step: Variable,
    generation: Tensor,
    starts: Sequence["_Start"],
    collector: Collector,
    queues: Sequence[Any],
) -> SyncRecovery:
    held = [*collector.held, *(Held(queue.size(), queue.enqueue(global_step), queue.dequeue().op) for queue in queues)]
    started = tf.stack([start.count.read_value() for start in starts])
    return SyncRecovery(
        generation=generation,
        counts=tf.stack([tf.cast(each.count, tf.int64) for each in held]),
        unblock=[each.unblock for each in held],
        unblock_count=len(queues),
        clear=[each.clear for each in held],
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
    collector: Collector, generation: Tensor
) -> tuple[Sequence[Operation], Sequence[_Start], Sequence[tuple[Gradient, Variable]]]:
    """Start an update on all PS or on none: when each has all gradients and is in the generation of the update.

    Each PS notifies every other PS when it has them, so nothing waits for more than one message of each::

        ps/0:  gradients there, generation right --.   .--> started[0] += 1 --> ps/0 applies what it makes of them
                                                    >-<
        ps/1:  gradients there, generation right --'   '--> started[1] += 1 --> ps/1 applies what it makes of them

    Returns:
        The operations that end when all gradients are there, how an update starts on each PS, and the combined
        gradients of a started update with their variables.
    """
    generations: list[Variable] = []
    complete: list[Operation] = []
    for device in collector.devices:
        with tf.device(device):
            generations.append(shared_variable(f"tfps/begun_in_generation_{len(generations)}"))
            with tf.control_dependencies(collector.arrived(device)):
                complete.append(_check(generations[-1], generation))
    starts: list[_Start] = []
    for device in collector.devices:
        with tf.device(device):
            count = shared_variable(f"tfps/begun_{len(starts)}")
            with tf.control_dependencies(complete):
                starts.append(_Start(generations[len(starts)], count, count.assign_add(1, read_value=False)))
    pairs = collector.combined({device: each.start for device, each in zip(collector.devices, starts, strict=True)})
    return complete, starts, pairs


def _check(of_ps: Variable, generation: Tensor) -> Operation:
    """Return an operation that fails if an update is not of the generation that a PS is in."""
    with tf.device(of_ps.device):
        return tf.raw_ops.Assert(condition=tf.equal(of_ps.read_value(), generation), data=[_OVER])
