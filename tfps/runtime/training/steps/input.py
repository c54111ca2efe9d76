"""The batches that a worker's input has left, as far as that is known. Where they are dealt, it waits for them."""

import math
import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from tfps.data.epochs import ENDLESS
from tfps.data.hand import Hand, Supply
from tfps.runtime.graph.builder import TrainGraph
from tfps.tf_types import Session

_LOOK_SECS = 0.1


class Input:
    """The batches of one worker.

    Args:
        session: Session on this worker's server.
        built: Its training graph.

    Attributes:
        size_is_known: Whether it is known before a run whether there are enough batches for it.
    """

    def __init__(self, session: Session, built: TrainGraph) -> None:
        stream, position = built.iterator.stream, built.iterator.position
        self._session, self._step = session, built.step
        self._supply = _Supply(position.hand) if position and position.hand else None
        batches = int(session.run(built.batches)) if stream is None else stream.batches()
        self.size_is_known = batches != tf.data.experimental.UNKNOWN_CARDINALITY
        self._left = math.inf if batches < 0 or batches == ENDLESS else batches

    def has(self, count: int) -> bool:
        """Return whether at least ``count`` batches are left, as far as that is known."""
        return self._supply.has(count) if self._supply else self._left >= count

    def take(self, count: int) -> None:
        """Count ``count`` batches as used by a run that starts now."""
        self._left -= count
        if self._supply:
            self._supply.take(count)

    def note_end(self) -> None:
        """Note that the run has ended that was the first to start of those in flight."""
        if self._supply:
            self._supply.note_end()

    def fill(self, wanted: int, goes_on: Callable[[], bool]) -> bool:
        """Get batches, where they are dealt to the workers. Wait if there is none for now, while ``goes_on()``.

        Nobody waits for this worker meanwhile.

        Returns:
            Whether there may be a batch. Where they are not dealt, the input itself tells its end.
        """
        if self._supply is None or self._supply.fill(self._session, wanted) or self._supply.has(1):
            return True
        if self._step.leave is not None:
            self._session.run(self._step.leave)
        while not self._supply.has_ended and goes_on():
            time.sleep(_LOOK_SECS)
            self._supply.fill(self._session, 1)
            if self._supply.has(1):
                if self._step.rejoin is not None:
                    self._session.run(self._step.rejoin)
                return True
        return False


class _Supply:
    """The batches that are dealt to a worker.

    A step takes the next batch when it runs, so runs in flight together may take theirs in any order. A batch that was
    counted as used by a run is certain to have been trained on when

    1. the runs have ended that had started by then: now the pipeline has given it out, to them or to one that started
       meanwhile, and
    2. the runs have ended that have started until now.
    """

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._used = self._started = self._ended = 0
        self._trained, self._next, self._awaited, self._is_given = 0, 0, 0, False
        self.has_ended = False

    def has(self, count: int) -> bool:
        return self._hand.batches - self._used >= count

    def take(self, count: int) -> None:
        self._used, self._started = self._used + count, self._started + 1

    def note_end(self) -> None:
        self._ended += 1
        if self._ended < self._awaited:
            return
        if self._is_given:
            self._trained, self._next = self._next, self._used
        self._is_given, self._awaited = not self._is_given, self._started

    def fill(self, session: Session, wanted: int) -> bool:
        """Return whether there are as many batches as wanted."""
        supply = self._hand.fill(session, self._used + wanted, self._trained)
        self.has_ended = supply is Supply.ENDED
        return supply is Supply.READY
