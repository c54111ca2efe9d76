"""The lock of each PS, which makes an update atomic there, and the counts of updates.

A reader holds the lock only while it takes references to the values. A later update leaves the referenced buffers
unchanged and changes a copy (tensorflow/core/kernels/training_op_helpers.h). TensorFlow releases the lock when a step
fails.

``applied`` counts the updates of a worker on a PS. Values read from several PS belong to the same updates if the counts
are equal on all of them. On the PS of ``global_step`` the counts show how many steps each worker has taken. Their sum
is what all workers have added to it.

A silent worker may still have an update in flight. Before another worker takes its remaining steps, it *fences* that
worker on each PS, under the lock. An update of a fenced worker fails before it changes anything there.

A connection reset or a killed worker may interrupt a step in the middle of an update: between the PS, or between two
variables of one PS. No PS can undo what it has applied. But then the counts of the worker, ``applying`` and ``applied``
on every PS, stay different after all its operations have ended. ``partial`` returns that difference, and the job
reports it.
"""

from collections.abc import Iterable, Sequence

import tensorflow.compat.v1 as tf

from tfps.tf_types import Operation, Tensor, Variable

FENCED = "tfps: this worker was taken for lost"
APPLIED = "applied"
BEGUN = "applying"
_KINDS = (BEGUN, APPLIED)


class Moments:
    """The locks and the counts of updates of all PS, in one graph.

    Args:
        num_ps: The number of PS.
        num_workers: The number of workers.
    """

    def __init__(self, num_ps: int, num_workers: int) -> None:
        self.devices = [f"/job:ps/task:{index}" for index in range(num_ps)]
        self._num_workers = num_workers
        self._counters: dict[tuple[str, str, int], Variable] = {}
        self._mutexes: dict[str, Tensor] = {}
        self._fences: dict[str, Variable] = {}
        self._updating: list[str] = []

    def lock(self, device: str) -> Tensor:
        """Add the lock of a PS to the graph and return it. No update starts there until ``unlock``.

        All locks of a PS share one mutex, which puts the steps of a run in order. Otherwise a step could hold the lock
        while it waits for the step before, which could then never end.
        """
        if device not in self._mutexes:
            with tf.control_dependencies(None), tf.device(device):
                self._mutexes[device] = tf.raw_ops.MutexV2(shared_name="tfps/update")
        with tf.device(device):
            return tf.raw_ops.MutexLock(mutex=self._mutexes[device])

    def unlock(self, lock: Tensor) -> Operation:
        """Add an operation that releases a lock to the graph, and return it."""
        with tf.device(lock.device):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def counts(self, device: str) -> Tensor:
        """Add the counts of each worker on a PS to the graph and return them, begun and applied: int64 [2, workers]."""
        counters = [self.counter(kind, device, worker) for kind in _KINDS for worker in range(self._num_workers)]
        with tf.device(device):
            return tf.reshape(tf.stack([counter.read_value() for counter in counters]), [len(_KINDS), -1])

    def is_updated(self, device: str) -> bool:
        """Return whether an update changes something on a PS; known after ``apply``."""
        return device in self._updating

    def steps(self, device: str) -> Tensor:
        """Add the number of steps that each worker has taken to the graph, and return it: int64 [workers].

        Args:
            device: The PS of ``global_step``.
        """
        return self.counts(device)[_KINDS.index(APPLIED)]

    def reset(self, workers: Iterable[int]) -> Operation:
        """Add an operation that sets the counts of some workers to 0 on all PS and lifts all fences, and return it."""
        with tf.control_dependencies(None):
            places = [(kind, device, worker) for worker in workers for device in self.devices for kind in _KINDS]
            fences = [self._fence(device).initializer for device in self.devices]
            return tf.group(*(self.counter(*place).initializer for place in places), *fences)

    def fence(self, workers: Tensor | Sequence[int], off: bool = True) -> Operation:
        """Add an operation that fences workers, int64 [n], or admits them again, and return it."""
        ends = []
        for device in self.devices:
            lock = self.lock(device)
            with tf.device(device), tf.control_dependencies([lock]):
                changed = tf.IndexedSlices(tf.fill(tf.shape(workers), off), workers)
                done = self._fence(device).scatter_update(changed).op
            with tf.control_dependencies([done]):
                ends.append(self.unlock(lock))
        return tf.group(*ends)

    def check(self, device: str, worker: int) -> tuple[Operation, Operation]:
        """Add a read and an operation that fails if a PS has fenced a worker, and return both."""
        with tf.device(device):
            read = self._fence(device).sparse_read(worker)
            return read.op, tf.raw_ops.Assert(condition=tf.logical_not(read), data=[FENCED])

    def _fence(self, device: str) -> Variable:
        """Return the bool variable [workers] of a PS that marks the fenced workers."""
        if device not in self._fences:
            name, count = f"tfps/fenced_{self.devices.index(device)}", self._num_workers
            with tf.control_dependencies(None), tf.device(device):
                self._fences[device] = tf.Variable(
                    lambda: tf.zeros([count], tf.bool), trainable=False, collections=[], use_resource=True, name=name
                )
        return self._fences[device]

    def settle(self, worker: int, device: str) -> Operation:
        """Add an operation that sets a worker's counts on all PS to the applied count of one PS, and return it."""
        steps = self.counter(APPLIED, device, worker).read_value()
        places = [(kind, place, worker) for place in self.devices for kind in _KINDS]
        others = [self.counter(*place) for place in places if place != (APPLIED, device, worker)]
        return tf.group(*(counter.assign(steps, read_value=False) for counter in others))

    def partial(self) -> Tensor:
        """Add the number of partially applied updates of each worker to the graph and return it: int64 [workers].

        It is valid while no run of the worker is in progress. Call this after ``apply``, which notes the PS that an
        update changes.
        """
        return partial([self.counts(device) for device in self._updating])

    def updates(self, device: str) -> None:
        """Note that an update changes something on a PS."""
        self._updating.append(device)

    def counter(self, kind: str, device: str, worker: int) -> Variable:
        """Return the int64 variable that counts the updates of a worker that a PS has begun or applied."""
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


def partial(counts: Sequence[Tensor]) -> Tensor:
    """Return the number of partially applied updates of each worker, int64 [workers], from the counts of every PS."""
    every = tf.concat(list(counts), axis=0)
    return tf.reduce_max(every, axis=0) - tf.reduce_min(every, axis=0)
