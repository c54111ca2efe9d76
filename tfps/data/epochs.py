"""The examples of a share as one sequence, epoch after epoch, from a position in the data on.

Example: 5 examples with counts 1 0 0 1 0 (see ``order``), and an order of each epoch that is that of the numbers::

    epoch 0: 1 2 4   epoch 1: 0 1 2 3 4   epoch 2: 0 1 2 3 4   ...

Must not import TensorFlow.
"""

import functools
import sys

import numpy as np
import numpy.typing as npt

from tfps.data.order import Indices, Order
from tfps.errors import DataError
from tfps.text import plural

ENDLESS = sys.maxsize
_KEPT = 2  # epochs whose order is kept: a batch may be of two


class Epochs:
    """A share, epoch after epoch.

    Args:
        order: The order.
        worker: Whose share.
        counts: int64 [size]: how often each example had been read at the beginning.
        epochs: The epoch before which the sequence ends; ``None``: it does not.

    Attributes:
        length: The number of examples in the sequence; ``ENDLESS`` if it does not end.
    """

    def __init__(self, order: Order, worker: int, counts: Indices, epochs: int | None = None) -> None:
        own = counts[order.shares[worker]]
        self._counts, self._share = counts, order.shares[worker]
        self._first = order.first_epoch(worker, counts)
        self._rest = functools.lru_cache(_KEPT)(functools.partial(order.rest, worker, counts))
        whole = int(own.max())  # from this epoch on, each has all examples
        sizes = [int((own <= epoch).sum()) for epoch in range(self._first, whole + 1)]
        self._starts: npt.NDArray[np.int64] = np.cumsum([0, *sizes[:-1]])
        self._size = len(own)
        self.length = ENDLESS if epochs is None else int(np.maximum(epochs - own, 0).sum())

    def part(self, begin: int, end: int) -> tuple[Indices, Indices]:
        """Return a part of the sequence: the examples, and the epoch of each; both int64 [n].

        Args:
            begin: The place of the first example.
            end: The place after the last one; what is after the end of the sequence is left out.
        """
        found, epochs, end = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], min(end, self.length)
        while begin < end:
            epoch, place = self._place(begin)
            ids = self._rest(epoch)[place : place + end - begin]
            found.append(ids)
            epochs.append(np.full(len(ids), epoch, np.int64))
            begin += len(ids)
        return np.concatenate(found), np.concatenate(epochs)

    def counts(self, end: int) -> Indices:
        """Return how often each example has been read when those before a place in the sequence have been."""
        epoch, place = self._place(min(end, self.length))
        found: Indices = self._counts.copy()
        found[self._share] = np.maximum(found[self._share], epoch)
        found[self._rest(epoch)[:place]] = epoch + 1
        return found

    def _place(self, at: int) -> tuple[int, int]:
        """Return the epoch of a place in the sequence, and the place in it."""
        index = int(np.searchsorted(self._starts, at, "right")) - 1
        more, place = divmod(at - int(self._starts[index]), self._size)
        is_last = index == len(self._starts) - 1
        return (self._first + index + more, place) if is_last else (self._first + index, at - int(self._starts[index]))


class Turns:
    """The sequence of all examples, of which each worker takes a batch in turn, as those do that train in step.

    The last update of a sequence that ends has what is left, in equal parts. It is part of the one before if there is
    not one example for each worker.

    Args:
        epochs: The sequence.
        workers: The number of workers.
        batch_size: The size of a worker's batch.

    Attributes:
        updates: The number of updates; ``ENDLESS`` if the sequence does not end.

    Raises:
        DataError: If a worker would have no example.
    """

    def __init__(self, epochs: Epochs, workers: int, batch_size: int) -> None:
        self._epochs, self._workers, self._batch_size = epochs, workers, batch_size
        if 0 < epochs.length < workers:
            unread = f"{plural(epochs.length, 'example')} left for {plural(workers, 'worker')}"
            raise DataError(f"--epochs: too few examples, {unread}: use fewer workers.")
        whole, left = divmod(epochs.length, workers * batch_size)
        is_endless = epochs.length == ENDLESS
        self.updates = ENDLESS if is_endless else max(whole + (left >= workers), min(epochs.length, 1))

    def batch(self, worker: int, update: int) -> Indices:
        """Return a worker's batch of an update; an empty one after the end."""
        if update >= self.updates:
            return np.zeros(0, np.int64)
        begin = update * self._workers * self._batch_size
        size = self._epochs.length - begin if update == self.updates - 1 else self._workers * self._batch_size
        cut = [begin + index * size // self._workers for index in (worker, worker + 1)]
        return self._epochs.part(*cut)[0]

    def counts(self, updates: int) -> Indices:
        """Return how often each example has been read after a number of updates."""
        return self._epochs.counts(
            updates * self._workers * self._batch_size if updates < self.updates else self._epochs.length
        )
