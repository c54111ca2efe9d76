"""Stale synchronous parallel training: as async, but no worker gets far ahead of the slowest one.

Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server". The update is that of
``async_step``: each gradient is applied when it arrives. The *clock* of a worker is the number of its applied steps.
With ``--staleness=s``, a worker begins a step only while::

    its clock - clock of the slowest live worker <= s

So s=0 is lockstep: nobody begins step k + 1 before all have ended step k. The slowest worker never waits.

The PS of ``global_step`` holds, for each worker, how many steps it has applied (``moments``), an ``offset``, whether it
``is_live``, and a queue. clock = applied + offset. The protocol:

Worker that trains
    1. It takes a run of at most ``allowed = slowest + s + 1 - clock`` steps. The slowest clock only rises, so each step
       of the run keeps the bound, and the run needs no check inside.
    2. Each step, when it is counted, puts a token into the queue of every other worker whose queue is empty.
    3. The end of the run returns ``allowed``. If it is 0, the worker waits for a token, and reads ``allowed`` again.

Worker that joins, at first or again
    4. It sets its offset so that its clock is that of the slowest other live worker, and then it is live. So the
       slowest clock does not fall, and what others were allowed before still holds. If no other worker is live, it
       keeps its clock.

Worker that leaves, because its tickets or its input have ended
    5. It is live no more, and puts tokens into all queues. It joins again if it takes the step of a lost worker.

Worker that finds another one lost
    6. It raises the fence: that worker changes nothing any more and is not live. Tokens go into all queues. If the lost
       worker was only frozen, its next update fails. It ends, and its next process joins again.

A lock makes 4 one action, as others see it when they read the clocks. Updates do not take that lock.

No wake-up is lost for long. A token is put after the count that it announces, so who takes it sees that count. If a
queue was not empty, the token in it is still to be taken, and who takes it sees the count, too. A token may also be
stale, or go to a request that was given up (of a lost process, or one that was interrupted). Therefore a worker waits
for ``_PATIENCE_SECS`` at most and then reads ``allowed`` again.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from tfps.config.converters import INT64_MAX
from tfps.modes import async_step
from tfps.modes.base import Copy, ModeContext, Step, StepLimit
from tfps.modes.recovery import Fence
from tfps.modes.updates.moments import APPLIED, Moments
from tfps.modes.updates.update_ops import leaves, place_of
from tfps.tf_types import Operation, Optimizer, Tensor, Variable

_PATIENCE_SECS = 0.5  # a stop request is seen as late; shorter than the grace that a worker gets for its step


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext, staleness: int) -> Step:
    """Build one step; see ``Mode.build_step``.

    Args:
        optimizer: See there.
        loss: See there.
        global_step: See there.
        context: See there.
        staleness: How many steps a worker may be ahead of the slowest one when it begins a step.

    Raises:
        ValueError: If the loss depends on no variable.
    """
    step = async_step.build(optimizer, loss, global_step, context)
    worker, device = context.task.index, place_of(global_step.handle.op)
    with tf.device(device):
        clocks = Clocks(step.moments, device, worker, staleness)
        counted = [op for op in leaves(step.train_op) if place_of(op) == device]
        return dataclasses.replace(
            step,
            train_op=tf.group(step.train_op, clocks.wake(counted, but=[worker])),
            draw_after=clocks.drawn_after(step),
            chief_init=tf.group(step.chief_init, clocks.reset()),
            worker_init=clocks.join(after=[step.worker_init]),
            fence=clocks.fence(step.fence) if step.fence else None,
            limit=clocks.limit(),
            leave=clocks.leave([worker]),
            rejoin=clocks.join(),
        )


class Clocks:
    """The clocks of all workers, in the graph of one. Create and use it on the PS of ``global_step``.

    Args:
        moments: The counts of updates.
        device: The PS.
        worker: The index of the worker that owns the graph.
        staleness: How many steps a worker may be ahead of the slowest one when it begins a step.
    """

    def __init__(self, moments: Moments, device: str, worker: int, staleness: int) -> None:
        self._worker, self._staleness, self._count = worker, staleness, moments.num_workers
        self._applied = [moments.counter(APPLIED, device, index) for index in range(self._count)]
        self._offset = self._variable("offset", tf.int64)
        self._is_live = self._variable("is_live", tf.bool)
        self._mutex = tf.raw_ops.MutexV2(shared_name="tfps/clocks")
        names = [f"tfps/wake_{index}" for index in range(self._count)]
        self._queues = [tf.FIFOQueue(-1, tf.bool, shapes=[], name=name, shared_name=name) for name in names]

    def _variable(self, name: str, dtype: tf.DType) -> Variable:
        return tf.Variable(
            lambda: tf.zeros([self._count], dtype),
            trainable=False,
            collections=[],
            use_resource=True,
            name=f"tfps/{name}",
        )

    def reset(self) -> Operation:
        """Return an operation after which no worker has joined."""
        return tf.group(*(variable.initializer for variable in (self._offset, self._is_live)))

    def limit(self) -> StepLimit:
        """Return the limit of the worker's steps. If it is the slowest one itself, it may take s + 1."""
        return StepLimit(
            allowed=self.allowed(),
            most=self._staleness + 1,
            renew=self._queues[self._worker].dequeue().op,
            patience_secs=_PATIENCE_SECS,
            awaited=self._awaited(),
        )

    def allowed(self, after: Sequence[Operation] = ()) -> Tensor:
        """Add the number of steps that the worker may take to the graph and return it, int64 scalar.

        A worker that is not live has been fenced or has left. It counts itself, too, so that it never waits for nobody.
        """
        live, clocks = self._read(after)
        return self._slowest(live, clocks) + self._staleness + 1 - clocks[self._worker]

    def _awaited(self) -> Tensor:
        """Add whom the worker waits for to the graph and return it, bool [workers]: the slowest, if they hold it."""
        live, clocks = self._read()
        slowest = self._slowest(live, clocks)
        is_held = clocks[self._worker] - slowest > self._staleness
        return live & tf.equal(clocks, slowest) & is_held

    def _slowest(self, live: Tensor, clocks: Tensor) -> Tensor:
        return tf.reduce_min(tf.where(live, clocks, tf.fill([self._count], clocks[self._worker])))

    def drawn_after(self, step: Step) -> Callable[[int, Copy], Tensor]:
        """Return ``Step.draw_after`` of a step without a limit, with the number of allowed steps as second element."""

        def draw_after(count: int, copy: Copy) -> Tensor:
            drawn = step.draw_after(count, copy)
            with tf.device(self._mutex.device):
                allowed = self.allowed([copy(op) for op in leaves(step.train_op)])
                return tf.concat([drawn[:1], [allowed], drawn[1:]], axis=0)

        return draw_after

    def wake(self, after: Sequence[Operation], but: Sequence[int] = ()) -> Operation:
        """Add an operation that puts a token into each empty queue to the graph, and return it.

        Args:
            after: Operations that end before it looks at the queues.
            but: Workers whose queues it leaves as they are.
        """
        with tf.control_dependencies(after):
            put = [
                queue.enqueue_many(tf.fill([tf.cast(tf.equal(queue.size(), 0), tf.int32)], True))
                for index, queue in enumerate(self._queues)
                if index not in but
            ]
        return tf.group(*put)

    def leave(self, workers: Tensor | Sequence[int], after: Sequence[Operation] = ()) -> Operation:
        """Add an operation after which nobody waits for some workers, int64 [n], to the graph, and return it."""
        with tf.control_dependencies(after):
            gone = tf.IndexedSlices(tf.fill(tf.shape(workers), False), workers)
            left = self._is_live.scatter_update(gone).op
        return self.wake([left])

    def fence(self, fence: Fence) -> Fence:
        """Return a fence after which nobody waits for the fenced workers."""
        left = self.leave(fence.workers, after=[fence.raise_])
        return dataclasses.replace(fence, raise_=left, held_by=self._is_live.read_value())

    def join(self, after: Sequence[Operation] = ()) -> Operation:
        """Add an operation with which the worker joins, at the clock of the slowest other one, and return it."""
        lock = self._lock(after)
        with tf.control_dependencies([lock]):
            live, clocks = self._values()
            others = live & tf.not_equal(tf.range(self._count), self._worker)
            slowest = tf.reduce_min(tf.where(others, clocks, tf.fill([self._count], tf.constant(INT64_MAX, tf.int64))))
            ahead = tf.where(tf.reduce_any(others), slowest - clocks[self._worker], tf.zeros([], tf.int64))
            moved = self._offset.scatter_add(tf.IndexedSlices(ahead, self._worker)).op
        with tf.control_dependencies([moved]):
            joined = self._is_live.scatter_update(tf.IndexedSlices(True, self._worker)).op
        with tf.control_dependencies([joined]):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def _read(self, after: Sequence[Operation] = ()) -> tuple[Tensor, Tensor]:
        """Read who is live, bool [workers], and the clocks, int64 [workers], while no worker joins."""
        lock = self._lock(after)
        with tf.control_dependencies([lock]):
            live, clocks = self._values()
        with tf.control_dependencies([live, clocks]):
            unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([unlocked]):
            return tf.identity(live), tf.identity(clocks)

    def _values(self) -> tuple[Tensor, Tensor]:
        applied = tf.stack([counter.read_value()[0] for counter in self._applied])
        return self._is_live.read_value(), applied + self._offset.read_value()

    def _lock(self, after: Sequence[Operation]) -> Tensor:
        with tf.control_dependencies(after):
            return tf.raw_ops.MutexLock(mutex=self._mutex)
