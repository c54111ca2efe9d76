"""Which workers of a service live, and how far each is. Does not import TensorFlow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.rendezvous import first_few

_MOST_GONE = 1000  # without a dropped push


@dataclass
class _Worker:
    """What is known of a worker."""

    connections: int = 0
    last_seen: float = 0.0
    steps: int = 0
    dropped: int = 0
    has_left: bool = False


class LiveWorkers:
    """The workers by index. The caller holds a lock.

    Args:
        timeout_secs: After how long without a connection a worker is gone.
        clock: Returns the time in seconds.
    """

    def __init__(self, timeout_secs: float, clock: Callable[[], float]) -> None:
        self._timeout_secs, self._clock = timeout_secs, clock
        self._workers: dict[int, _Worker] = {}
        self._most = _MOST_GONE

    def connected(self, index: int, change: int) -> None:
        """Note that a worker has made a connection (1), or has lost one (-1).

        One that is new, or was gone, is as far as the slowest of the others: nobody waits until it has caught up.
        """
        known = self._worker(index)
        if not self.lives(index):
            known.steps = max(known.steps, self._fewest())
        known.connections += change
        known.last_seen, known.has_left = self._clock(), False

    def _worker(self, index: int) -> _Worker:
        """Return what is known of a worker; forget others that are gone before there are too many."""
        if index not in self._workers and len(self._workers) >= self._most:
            kept = {i: one for i, one in self._workers.items() if one.dropped or self.lives(i)}
            self._workers, self._most = kept, 2 * len(kept) + _MOST_GONE
        return self._workers.setdefault(index, _Worker(last_seen=float("-inf")))

    def leave(self, index: int) -> None:
        """Note that a worker has said that it is done: without a connection, it holds nobody."""
        if index in self._workers:
            self._workers[index].has_left = True

    def lives(self, index: int) -> bool:
        """Return whether a worker has a connection, or had one not long ago; true for one that was never seen."""
        worker = self._workers.get(index)
        if worker is None or worker.connections > 0:
            return True
        return not worker.has_left and self._clock() - worker.last_seen < self._timeout_secs

    def seen(self, index: int) -> None:
        """Note that a worker has pushed something."""
        self._worker(index).last_seen = self._clock()

    def stepped(self, index: int) -> None:
        """Count a push of a worker that is in an update."""
        self._worker(index).steps += 1

    def restart(self) -> None:
        """Count the steps from 0 again."""
        for worker in self._workers.values():
            worker.steps = 0

    def lead(self, index: int) -> int:
        """Return by how many steps a worker is ahead of the slowest one that lives."""
        return self._worker(index).steps - self._fewest()

    def behind(self, index: int, staleness: int) -> Sequence[int]:
        """Return the workers that live and that a worker is more than so many steps ahead of."""
        most = self._worker(index).steps - staleness
        return sorted(other for other, worker in self._workers.items() if worker.steps < most and self.lives(other))

    def _fewest(self) -> int:
        return min((worker.steps for index, worker in self._workers.items() if self.lives(index)), default=0)

    def drop(self, index: int) -> None:
        """Count a push of a worker that came too late."""
        self._worker(index).dropped += 1

    @property
    def dropped(self) -> Mapping[int, int]:
        """By worker, how many of its pushes came too late."""
        return {index: worker.dropped for index, worker in self._workers.items()}


def named(workers: Sequence[int]) -> str:
    """Return workers as the subject of a sentence, with its verb."""
    names = first_few([f"worker {worker}" for worker in workers])
    return f"{names} {'is' if len(workers) == 1 else 'are'}"
