"""Who reads which of a model's ``Examples``, in which order.

An example is known by its index. The state of training in the data is the number of times that each example has been
read, an int64 vector: an example with count c has been read in the epochs before c. It does not depend on the number of
workers. A worker reads, epoch by epoch, the examples of its share that have not been read in the epoch::

    epoch e of worker w = the examples of share w whose count is e or less, in the order of (seed, e)

So a run that continues from a vector reads what is left of an epoch, and divides it among the workers that it has.

Orders are sorted by hashes. A random generator of numpy may change with its version. Must not import TensorFlow.
"""

import numpy as np
import numpy.typing as npt

from tfps.data.examples import Examples
from tfps.errors import DataError, ModelError
from tfps.text import plural

Indices = npt.NDArray[np.int64]

PARTITIONS = ("even", "label")
_SHARES = -1  # instead of an epoch: the order from which shares are dealt
_CLASSES_PER_WORKER = 2  # as in McMahan et al. 2017, section 3
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


class Order:
    """Who reads which examples in which order. Equal arguments give equal orders, in each process and release.

    Args:
        examples: The examples.
        seed: Decides the shares and the order of each epoch.
        workers: The number of workers.
        partition: ``even`` for shares of like examples, ``label`` for shares of two classes or so.

    Attributes:
        shares: By worker, the indices of its examples. They are disjoint, and together are all.

    Raises:
        DataError: If a worker would have no example.
        ModelError: If the examples have no classes to divide by, or not one for each.
    """

    def __init__(self, examples: Examples, seed: int, workers: int, partition: str = "even") -> None:
        self._seed = seed
        ids = self._sorted(np.arange(examples.size, dtype=np.int64), _SHARES)
        parts = workers * (_CLASSES_PER_WORKER if partition == "label" else 1)
        if examples.size < parts:
            raise DataError(f"too few examples, {examples.size:,}, for {plural(workers, 'worker')}: use fewer workers.")
        if partition == "label":
            self.shares = self._by_class(ids, examples.classes, parts)
        else:
            self.shares = [ids[index::workers] for index in range(workers)]

    def _by_class(self, ids: Indices, classes: object, parts: int) -> list[Indices]:
        """Sort by class, cut in equal parts, and deal two random parts to each worker."""
        if classes is None:
            raise ModelError("--partition=label: the examples have no classes: give tfps.Examples(classes=...).")
        given = np.asarray(classes)
        if given.shape != ids.shape:
            shown = plural(len(given), "class", "classes") if given.ndim == 1 else f"classes of shape {given.shape}"
            raise ModelError(f"--partition=label: {shown} for {plural(len(ids), 'example')}: give one for each.")
        cut = np.array_split(ids[np.argsort(given[ids], kind="stable")], parts)
        dealt = self._sorted(np.arange(parts, dtype=np.int64), _SHARES)
        return [np.concatenate([cut[part] for part in pair]) for pair in dealt.reshape(-1, _CLASSES_PER_WORKER)]

    def rest(self, worker: int, counts: Indices, epoch: int) -> Indices:
        """Return what a worker reads in an epoch, in order.

        Args:
            worker: The worker.
            counts: int64 [size]: how often each example had been read when the worker started.
            epoch: The epoch, from 0.
        """
        share = self.shares[worker]
        unread: Indices = share[counts[share] <= epoch]
        return self._sorted(unread, epoch)

    def first_epoch(self, worker: int, counts: Indices) -> int:
        """Return the epoch that a worker reads first."""
        return int(counts[self.shares[worker]].min())

    def advanced(self, counts: Indices, taken: int) -> Indices:
        """Return the counts after each worker has read a number of examples."""
        after: Indices = counts.copy()
        for worker, share in enumerate(self.shares):
            left = taken
            while left > 0:
                epoch = self.first_epoch(worker, after)
                unread = share[after[share] <= epoch]
                read = unread if left >= len(unread) else self._sorted(unread, epoch)[:left]
                after[read] += 1
                left -= len(read)
        return after

    def _sorted(self, ids: Indices, epoch: int) -> Indices:
        """Return indices in the order of an epoch."""
        salt = _hash(_hash(np.array([self._seed], np.uint64)) + np.array([epoch], np.int64).astype(np.uint64))
        ordered: Indices = ids[np.lexsort((ids, _hash(salt + ids.astype(np.uint64))))]
        return ordered


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the outputs of SplitMix64 (Steele, Lea and Flood 2014) for some states; one per state, modulo 2^64."""
    mixed = values + np.uint64(_STEP)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    hashes: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashes
