"""Find the worker that holds the others up, or falls behind: the chief checks regularly. Does not import TensorFlow."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HALF = 0.5


@dataclass(frozen=True)
class WorkerPace:
    """A worker's last heartbeat.

    Attributes:
        steps: How many steps it had taken.
        global_step: The global step after the last of them.
        when: When that was, in seconds since 1970, by whichever clock its source names; 0.0 if it has taken none.
        secs: For how long it had trained.
        skipped: How many batches it had skipped.
        batches: How many of its steps had a known batch size.
        examples: How many examples were in these batches.
        waited: For how long this process waited for other workers before its last step.
        is_waiting: Whether it has waited for other workers since its last step.

    What lost processes of this worker had reported is included, but for ``global_step``, ``when`` and ``waited``.
    """

    steps: int = 0
    global_step: int = 0
    when: float = 0.0
    secs: float = 0.0
    skipped: int = 0
    batches: int = 0
    examples: int = 0
    waited: float = 0.0
    is_waiting: bool = False


class Stragglers:
    """Count how often each worker was the only one behind.

    Args:
        few: Report nothing after fewer checks than this.
    """

    def __init__(self, few: int = 4) -> None:
        self._few, self._looks = few, 0
        self._behind: Counter[int] = Counter()
        self._before: Sequence[WorkerPace] = []

    def look_in_step(self, ahead: Sequence[int]) -> None:
        """Check which workers the others wait for, where workers do so; see ``Step.updates_ahead``."""
        if len(ahead) > 1:  # a single worker has none to wait for
            least = min(0, *ahead)  # less than 0 where updates do not wait for each worker
            self._note([index for index, count in enumerate(ahead) if count == least])

    def look_apart(self, beats: Sequence[WorkerPace], training: Sequence[int]) -> None:
        """Check which training workers ran at less than half the usual pace since the last check.

        Time in which they waited for others does not count.
        """
        before, self._before = self._before, beats
        if not before or not all(before[index].when for index in training):
            return
        paces = {i: _pace(before[i], beats[i]) for i in training if not _has_only_waited(before[i], beats[i])}
        if not any(paces.values()):
            return
        usual = statistics.median_high(paces.values())
        self._note([index for index, pace in paces.items() if pace < _HALF * usual])

    def _note(self, behind: Sequence[int]) -> None:
        self._looks += 1
        self._behind.update(behind if len(behind) == 1 else [])

    @property
    def shares(self) -> Mapping[int, float]:
        """By worker index, the share of checks in which it was behind; empty after too few checks."""
        if self._looks < self._few:
            return {}
        return {index: round(count / self._looks, 3) for index, count in sorted(self._behind.items())}


def _has_only_waited(before: WorkerPace, now: WorkerPace) -> bool:
    """Return whether a worker took no step between two heartbeats, and waited for others in that time."""
    return now.steps == before.steps and (before.is_waiting or now.is_waiting)


def _pace(before: WorkerPace, now: WorkerPace) -> float:
    """Return steps per second between two heartbeats; 0 if there was none, or the worker was restarted between them."""
    secs = now.when - before.when - max(now.waited - before.waited, 0.0)
    return max(now.steps - before.steps, 0) / secs if secs > 0 else 0.0
