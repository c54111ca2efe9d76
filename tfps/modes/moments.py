"""The lock of each PS, by which an update is one moment there, and the counts of updates that were made.

A reader holds the lock only while it refers to the values: an update that comes later leaves what is referred to as
it is, and changes a copy (tensorflow/core/kernels/training_op_helpers.h). TensorFlow unlocks when a step fails.

``applied`` counts a worker's updates on a PS. Values that were read from several PS belong to the same updates if the
counts are the same on all of them. On the PS of ``global_step`` they tell how many steps each worker has taken, and sum
up to what all workers have added to it.

A worker that is silent may still have an update on its way. Who takes the steps that it has left undone *fences* it off
before: on each PS, under the lock, and an update of a fenced worker fails before it changes anything there.

A connection that is reset, or a worker that is killed, may break off a step in the middle of an update: between the PS,
or between two variables of one. No PS can take back what it has applied. But then a worker's counts, ``applying`` and
``applied`` on every PS, are not all the same when nothing of it runs any more: that is ``partial``, which is told.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

FENCED = "tfps: this worker was taken for lost"
APPLIED = "applied"
BEGUN = "applying"
_KINDS = (BEGUN, APPLIED)


class Moments:
    """The locks of every PS and the counts of updates there, in one graph.

    Args:
        num_ps: The number of PS.
        num_workers: The number of workers.
    """

    def __init__(self, num_ps: int, num_workers: int) -> None:
        self.devices = [f"/job:ps/task:{index}" for index in range(num_ps)]
        self._num_workers = num_workers
        self._counters: dict[tuple[str, str, int], Any] = {}
        self._mutexes: dict[str, Any] = {}
        self._fences: dict[str, Any] = {}
        self._updating: list[str] = []

    def lock(self, device: str) -> Any:
        """Add to the graph, and return, the lock of a PS: no update begins there until ``unlock``.

        All locks of a PS are of one mutex, by which several steps of a run come in order: a step that held one while it
        waits for the step before would keep that from ending.
        """
        if device not in self._mutexes:
            with tf.control_dependencies(None), tf.device(device):
                self._mutexes[device] = tf.raw_ops.MutexV2(shared_name="tfps/update")
        with tf.device(device):
            return tf.raw_ops.MutexLock(mutex=self._mutexes[device])

    def unlock(self, lock: Any) -> Any:
        """Add to the graph, and return, an operation that gives a lock back."""
        with tf.device(lock.device):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def counts(self, device: str) -> Any:
        """Add to the graph, and return, the counts of each worker on a PS, begun and applied: int64 [2, workers]."""
        counters = [self.counter(kind, device, worker) for kind in _KINDS for worker in range(self._num_workers)]
        with tf.device(device):
            return tf.reshape(tf.stack([counter.read_value() for counter in counters]), [len(_KINDS), -1])

    def is_updated(self, device: str) -> bool:
        """Return whether an update changes something on a PS; known after ``apply``."""
        return device in self._updating

    def steps(self, device: str) -> Any:
        """Add to the graph, and return, how many steps each worker has taken: int64 [workers].

        Args:
            device: The PS of ``global_step``.
        """
        return self.counts(device)[_KINDS.index(APPLIED)]

    def reset(self, workers: Iterable[int]) -> Any:
        """Add to the graph, and return, an operation that sets the counts of some workers to 0 on all PS."""
        with tf.control_dependencies(None):
            places = [(kind, device, worker) for worker in workers for device in self.devices for kind in _KINDS]
            fences = [self._fence(device).initializer for device in self.devices]
            return tf.group(*(self.counter(*place).initializer for place in places), *fences)

    def fence(self, workers: Any, off: bool = True) -> Any:
        """Add to the graph, and return, an operation that fences workers off, int64 [n], or lets them in again."""
        ends = []
        for device in self.devices:
            lock = self.lock(device)
            with tf.device(device), tf.control_dependencies([lock]):
                changed = tf.IndexedSlices(tf.fill(tf.shape(workers), off), workers)
                done = self._fence(device).scatter_update(changed).op
            with tf.control_dependencies([done]):
                ends.append(self.unlock(lock))
        return tf.group(*ends)

    def check(self, device: str, worker: int) -> Any:
        """Add to the graph, and return, a read and an operation that fails if a PS has fenced a worker off."""
        with tf.device(device):
            read = self._fence(device).sparse_read(worker)
            return read.op, tf.raw_ops.Assert(condition=tf.logical_not(read), data=[FENCED])

    def _fence(self, device: str) -> Any:
        """Return the bool variable [workers] of a PS: which workers are fenced off."""
        if device not in self._fences:
            name, count = f"tfps/fenced_{self.devices.index(device)}", self._num_workers
            with tf.control_dependencies(None), tf.device(device):
                self._fences[device] = tf.Variable(
                    lambda: tf.zeros([count], tf.bool), trainable=False, collections=[], use_resource=True, name=name
                )
        return self._fences[device]

    def settle(self, worker: int, device: str) -> Any:
        """Add to the graph, and return, an operation that sets a worker's counts on all PS to what one has applied."""
        steps = self.counter(APPLIED, device, worker).read_value()
        places = [(kind, place, worker) for place in self.devices for kind in _KINDS]
        others = [self.counter(*place) for place in places if place != (APPLIED, device, worker)]
        return tf.group(*(counter.assign(steps, read_value=False) for counter in others))

    def partial(self) -> Any:
        """Add to the graph, and return, how many updates of each worker are made in part: int64 [workers].

        That is so if no run of the worker is under way, and after ``apply`` has told which PS an update changes.
        """
        return partial([self.counts(device) for device in self._updating])

    def updates(self, device: str) -> None:
        """Note that an update changes something on a PS."""
        self._updating.append(device)

    def counter(self, kind: str, device: str, worker: int) -> Any:
        """Return the int64 variable that counts the updates of a worker that a PS has begun, or applied."""
        place = kind, device, worker
        if place not in self._counters:
            with tf.control_dependencies(None), tf.device(device):
                self._counters[place] = tf.Variable(
                    lambda: tf.zeros([], tf.int64),
                    trainable=False,
                    collections=[],
                    use_resource=True,
                    name=f"tfps/{kind}_{self.devices.index(device)}_{worker}",
                )
        return self._counters[place]


def partial(counts: Sequence[Any]) -> Any:
    """Return how many updates of each worker are made in part, int64 [workers], by ``counts`` of every PS."""
    every = tf.concat(list(counts), axis=0)
    return tf.reduce_max(every, axis=0) - tf.reduce_min(every, axis=0)
