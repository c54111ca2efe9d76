"""The lock of each PS, which makes an update atomic there, and the counts of updates.

A reader holds the lock only while it takes references to the values. A later update leaves the referenced buffers
unchanged and changes a copy (tensorflow/core/kernels/training_op_helpers.h). TensorFlow releases the lock when a step
fails.

``applied`` counts the updates of a worker on a PS. A worker may have several runs in flight, whose updates come to the
PS in any order. So each run draws a random number, and where there are several PS, these are added up, too. Values read
from several PS belong to the same updates if all counts are equal on all of them::

    PS 0 has the update of run A, PS 1 that of run B      numbers of updates 1 = 1      sums A != B

On the PS of ``global_step`` the counts show how many steps each worker has taken. Their sum is what all workers have
added to it.

A silent worker may still have an update in flight. Before another worker takes its remaining steps, it *fences* that
worker on each PS, under the lock. An update of a fenced worker fails before it changes anything there.

A connection reset or a killed worker may interrupt a step in the middle of an update: between the PS, or between two
variables of one PS. No PS can undo what it has applied. But then the counts of the worker, ``applying`` and ``applied``
on every PS, stay different after all its operations have ended. ``partial`` returns that difference, and the job
reports it. It is at least 2 where only the sums differ.
"""

import functools
from collections.abc import Iterable, Sequence

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import state_devices
from tfps.tf_types import Operation, Tensor, Variable

FENCED = "tfps: this worker was taken for lost"
APPLIED = "applied"
BEGUN = "applying"
_KINDS = (BEGUN, APPLIED)
RUN_ID = "tfps/run_id"
"""The name of the operation that draws a run's number. It runs once for all steps of a run."""
_RUN_IDS = 1 << 62


class Moments:
    """The locks and the counts of updates of all PS, in one graph.

    Args:
        num_ps: The number of PS; 0 if the chief holds what they would.
        num_workers: The number of workers.

    Attributes:
        devices: The PS.
        num_workers: The number of workers.
    """

    def __init__(self, num_ps: int, num_workers: int) -> None:
        self.devices = list(state_devices(num_ps))
        self.num_workers, self._counter_size = num_workers, 2 if num_ps > 1 else 1
        self._added: dict[str, Tensor] = {}
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
        """Add the counts of a PS to the graph and return them, begun and applied: int64 [2, workers * counter size].

        For each worker, they are the number of its updates and, if there are several PS, the sum of their runs.
        """
        counters = [self.counter(kind, device, worker) for kind in _KINDS for worker in range(self.num_workers)]
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
        return tf.reshape(self.counts(device)[_KINDS.index(APPLIED)], [self.num_workers, self._counter_size])[:, 0]

    def awaited(self, device: str) -> Sequence[Operation]:
        """Return the operations that a lock of a PS has to wait for, so that ``raised`` waits for no other task."""
        return [] if self._counter_size == 1 else [self._addend(device).op]

    def raised(self, kind: str, device: str, worker: int) -> Operation:
        """Add an operation that counts an update which a PS has begun or applied, and return it."""
        with tf.device(device):
            return self.counter(kind, device, worker).assign_add(self._addend(device), read_value=False)

    def _addend(self, device: str) -> Tensor:
        """Return what an update adds to a counter of a PS."""
        if device not in self._added:
            with tf.control_dependencies(None), tf.device(device):
                one = tf.ones([], tf.int64)
                self._added[device] = tf.stack([one] if self._counter_size == 1 else [one, self._run_id])
        return self._added[device]

    @functools.cached_property
    def _run_id(self) -> Tensor:
        """The worker's number for a run. It changes no variable, so runs need not follow each other."""
        with tf.control_dependencies(None), tf.device(None):
            return tf.random.uniform([], maxval=_RUN_IDS, dtype=tf.int64, seed=1, name=RUN_ID)

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
            name, count = f"tfps/fenced_{self.devices.index(device)}", self.num_workers
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
        return partial([self.counts(device) for device in self._updating], self.num_workers)

    def updates(self, device: str) -> None:
        """Note that an update changes something on a PS."""
        self._updating.append(device)

    def counter(self, kind: str, device: str, worker: int) -> Variable:
        """Return the int64 variable [counter size] that counts a worker's updates that a PS has begun or applied."""
        place = kind, device, worker
        if place not in self._counters:
            with tf.control_dependencies(None), tf.device(device):
                self._counters[place] = tf.Variable(
                    lambda: tf.zeros([self._counter_size], tf.int64),
                    trainable=False,
                    collections=[],
                    use_resource=True,
                    name=f"tfps/{kind}_{self.devices.index(device)}_{worker}",
                )
        return self._counters[place]


def partial(counts: Sequence[Tensor], num_workers: int) -> Tensor:
    """Return the number of partially applied updates of each worker, int64 [workers], from the counts of every PS."""
    every = tf.reshape(tf.concat(list(counts), axis=0), [len(counts) * len(_KINDS), num_workers, -1])
    numbers, others = every[:, :, 0], tf.reduce_any(tf.not_equal(every, every[:1]), axis=[0, 2])
    found = tf.reduce_max(numbers, axis=0) - tf.reduce_min(numbers, axis=0)
    return tf.where(tf.equal(found, 0) & others, tf.fill([num_workers], tf.constant(2, tf.int64)), found)
