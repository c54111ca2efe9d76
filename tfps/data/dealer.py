"""The shards of ``--data_policy=dynamic``: who has which, on the PS of ``global_step``.

The examples are one sequence, epoch after epoch (``epochs``), cut into shards of equal size. The PS holds the number of
the ``next`` shard, and which worker holds which of the shards that have been dealt. A fast worker takes more of them.
What has been read is known from the counts (``position``), which an update raises together with the parameters.

Nothing here is saved: with the counts of a checkpoint, a resumed job makes new shards of what they leave unread. The
protocol:

Chief that begins a run
    1. It writes the counts with which the run starts, from which all workers cut the same shards, and the shards' size.

Worker
    2. Before a run of steps, it takes as many shards as it needs: first those of lost workers, then the next ones. They
       are now held by it.
    3. When it has trained on all of a shard, it says so with its next request, and holds the shard no more.
    4. When no shard is left, it asks again now and then, until each example has been read: another may be lost.

Worker that finds another one lost
    5. It raises the fence: that worker's updates change nothing any more. Then it marks it as ``gone``, and what that
       worker holds is free. The next worker reads those examples of it whose counts lack a read of what has been dealt.

Worker that starts again
    6. It is not ``gone`` any more, and begins with what its lost process held and nobody took, and is unread.

So nothing is lost. An example is read once more than needed only if a worker is lost, and an update of it arrives when
it has started again, or another worker has an example of its shards in hand, too, for the next epoch. A lock makes each
of 2 and 6 one action.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.data.order import Indices
from tfps.tf_types import Operation, Session, Tensor, Variable


@dataclasses.dataclass(frozen=True)
class Dealt:
    """What a worker gets.

    Attributes:
        fresh: The numbers of new shards.
        returned: The numbers of those that others held, or this worker's lost process.
        next: The number of the first shard that nobody has had before.
        least: The least of all counts.
    """

    fresh: Sequence[int]
    returned: Sequence[int]
    next: int
    least: int


class Dealer:
    """The shards, in the graph of one worker.

    Args:
        counts: int64 variable: ``head`` numbers, and then the count of each example.
        head: See there.
        size: The number of examples.
        workers: The number of workers.
        worker: The index of this one.
    """

    def __init__(self, counts: Variable, head: int, size: int, workers: int, worker: int) -> None:
        self._worker, self._head, self._counts = worker, head, counts
        with tf.device(counts.device):
            self._start = _variable("start", lambda: tf.zeros([size], tf.int64))
            self._next = _variable("next", lambda: tf.zeros([2], tf.int64))  # with the size of a shard
            self._gone = _variable("gone", lambda: tf.zeros([workers], tf.bool))
            self._held = _variable("held", lambda: tf.zeros([0, 2], tf.int64), [None, 2])  # (shard, worker) in rows
            self._mutex = tf.raw_ops.MutexV2(shared_name="tfps/shards/lock")
            self._begin, self._given = self._begun(size)
            self._join, self._start_now = self._joined(), self._start.read_value()
            self._asked = tf.placeholder(tf.int64, [None], "tfps/shards/asked")
            self._read = counts.sparse_read(self._asked + head)
            self._take, self._request = self._taken()

    def _begun(self, size: int) -> tuple[Operation, Sequence[Tensor]]:
        given = tf.placeholder(tf.int64, [size]), tf.placeholder(tf.int64, [])
        with tf.control_dependencies([self._gone.initializer, self._held.initializer]):
            first = self._next.assign(tf.stack([0, given[1]]), read_value=False)
            return tf.group(self._start.assign(given[0], read_value=False), first), given

    def begin(self, session: Session, counts: Indices, shard_size: int) -> None:
        """Begin a run with some counts, int64 [size]; the chief does it before all others."""
        session.run(self._begin, dict(zip(self._given, (counts, shard_size), strict=True)))

    def join(self, session: Session) -> tuple[Indices, int, Dealt]:
        """Return the counts with which the run has begun, the size of a shard, and what this worker has already."""
        held, (after, size) = session.run(self._join)
        return session.run(self._start_now), int(size), Dealt([], sorted(held.tolist()), int(after), 0)

    def counts(self, session: Session, ids: Indices) -> Indices:
        """Return the counts of some examples."""
        counts: Indices = session.run(self._read, {self._asked: ids})
        return counts

    def take(self, session: Session, count: int, limit: int, done: Sequence[int]) -> Dealt:
        """Take shards.

        Args:
            session: The session.
            count: How many at most.
            limit: The number of shards in all.
            done: The numbers of shards that this worker holds no more.
        """
        feed = dict(zip(self._request, (count, limit, np.asarray(done, np.int64)), strict=True))
        returned, fresh, first, least = session.run(self._take, feed)
        return Dealt(fresh.tolist(), returned.tolist(), int(first), int(least))

    def fenced(self, fence: Any) -> Any:
        """Return a mode's fence, ``modes.recovery.Fence``, which also frees what the fenced workers hold."""
        with tf.device(self._counts.device):
            gone = tf.IndexedSlices(tf.fill(tf.shape(fence.workers), True), fence.workers)
            with tf.control_dependencies([fence.raise_]):
                freed = self._gone.scatter_update(gone).op
            now, owners = self._gone.read_value(), self._held.read_value()[:, 1]
            holds = tf.math.bincount(tf.cast(owners, tf.int32), minlength=now.shape[0], maxlength=now.shape[0]) > 0
            held_by = holds & ~now
            held_by = held_by if fence.held_by is None else held_by | fence.held_by
        return dataclasses.replace(fence, raise_=freed, held_by=held_by)

    def _joined(self) -> Sequence[Tensor]:
        """Return the numbers of the shards that this worker holds when it is not gone any more, and ``next``."""
        with self._locked() as lock:
            back = self._gone.scatter_update(tf.IndexedSlices(False, self._worker)).op
            rows, state = self._held.read_value(), self._next.read_value()
            own = tf.boolean_mask(rows[:, 0], tf.equal(rows[:, 1], self._worker))
        return _unlocked(lock, [back], [own, state])

    def _taken(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return what a worker gets, and the placeholders of its request."""
        count, limit = tf.placeholder(tf.int64, []), tf.placeholder(tf.int64, [])
        done = tf.placeholder(tf.int64, [None])
        with self._locked() as lock:
            rows, state, gone = self._held.read_value(), self._next.read_value(), self._gone.read_value()
            numbers, owners = rows[:, 0], rows[:, 1]
            kept = ~(tf.equal(owners, self._worker) & _is_in(numbers, done))
            returned = tf.sort(tf.boolean_mask(numbers, kept & tf.gather(gone, owners)))[:count]
            first = state[0]
            left = tf.minimum(count - tf.size(returned, out_type=tf.int64), limit - first)
            fresh = tf.range(first, first + tf.maximum(left, 0))
            own = tf.concat([returned, fresh], axis=0)
            others = tf.boolean_mask(rows, kept & ~_is_in(numbers, returned))
            now = tf.concat([others, tf.stack([own, tf.fill(tf.shape(own), _int64(self._worker))], axis=1)], axis=0)
            after = tf.stack([first + tf.size(fresh, out_type=tf.int64), state[1]])
            with tf.control_dependencies([now, after]):
                changed = [self._held.assign(now, read_value=False), self._next.assign(after, read_value=False)]
        found = _unlocked(lock, changed, [returned, fresh, first])
        return [*found, tf.reduce_min(self._counts.read_value()[self._head :])], [count, limit, done]

    def _locked(self) -> Any:
        return _Locked(tf.raw_ops.MutexLock(mutex=self._mutex))


class _Locked:
    """A context whose operations wait for a lock."""

    def __init__(self, lock: Tensor) -> None:
        self._lock, self._waits = lock, tf.control_dependencies([lock])

    def __enter__(self) -> Tensor:
        self._waits.__enter__()
        return self._lock

    def __exit__(self, *error: Any) -> None:
        self._waits.__exit__(*error)


def _unlocked(lock: Tensor, changed: Sequence[Operation], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors that are there when some changes are made and the lock is free again."""
    with tf.control_dependencies([*changed, *tensors]):
        unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([unlocked]):
        return [tf.identity(tensor) for tensor in tensors]


def _is_in(numbers: Tensor, others: Tensor) -> Tensor:
    """Return which of some numbers, int64 [n], are among others, int64 [m]: bool [n]."""
    return tf.reduce_any(tf.equal(numbers[:, None], others[None, :]), axis=1)


def _int64(number: int) -> Tensor:
    return tf.constant(number, tf.int64)


def _variable(name: str, first: Callable[[], Tensor], shape: Any = None) -> Variable:
    """Return a variable that is not saved."""
    return tf.Variable(
        first, trainable=False, collections=[], use_resource=True, name=f"tfps/shards/{name}", shape=shape
    )
