"""What a worker has in hand of the shards that are dealt: it takes them between its runs of steps, ahead of need.

A shard is in hand until the worker has trained on all of it. So what the pipeline has read ahead is still this worker's
to lose: see ``dealer``.
"""

import enum
from collections.abc import Sequence

import numpy as np

from tfps.data.dealer import Dealer, Dealt
from tfps.data.epochs import ENDLESS, Epochs
from tfps.data.order import Indices
from tfps.data.stream import PREFETCHED, Stream
from tfps.tf_types import Session

_AHEAD = PREFETCHED + 2  # batches: one is on its way into the pipeline, one out of it


class Supply(enum.Enum):
    """What a worker may expect."""

    READY = "as many batches as were asked for"
    LOW = "no shard is left, unless another worker is lost"
    ENDED = "each example has been read in each epoch"


class Hand:
    """The shards of one worker.

    Args:
        stream: Where the batches go.
        dealer: Who has which.
        epochs: The epoch at which the job ends; ``None`` if it does not.

    Attributes:
        batches: How many batches have been put into the stream.
    """

    def __init__(self, stream: Stream, dealer: Dealer, epochs: int | None) -> None:
        self._stream, self._dealer, self._limit = stream, dealer, epochs
        self.batches = 0
        self._sequence: Epochs | None = None
        self._size, self._shards = 1, ENDLESS
        self._held: dict[int, int] = {}  # by shard, how many batches end with all of it
        self._rest: Indices = np.zeros(0, np.int64)

    def join(self, session: Session) -> None:
        """Begin, with what a lost process of this worker held."""
        start, self._size, dealt = self._dealer.join(session)
        self._sequence = self._stream.sequence(start)
        length = self._sequence.length
        self._shards = ENDLESS if length == ENDLESS else -(-length // self._size)
        self._put(session, dealt)

    def fill(self, session: Session, batches: int, trained: int) -> Supply:
        """Take shards until there are some batches more than a number. All are counted from the beginning.

        What is left of a batch is put in, too, when no shard is left.

        Args:
            session: The session.
            batches: The number.
            trained: On how many of the first batches the worker has trained.
        """
        while self.batches < batches + _AHEAD:
            missing = (batches + _AHEAD - self.batches) * self._stream.batch_size - len(self._rest)
            done = [number for number, end in self._held.items() if end <= trained]
            dealt = self._dealer.take(session, -(-missing // self._size), self._shards, done)
            self._held = {number: end for number, end in self._held.items() if end > trained}
            self._put(session, dealt)
            if not dealt.returned and not dealt.fresh:
                if len(self._rest):
                    self._put_batch(len(self._rest))
                is_over = self._limit is not None and dealt.least >= self._limit
                return Supply.ENDED if is_over else Supply.LOW
        return Supply.READY

    def _put(self, session: Session, dealt: Dealt) -> None:
        """Put the examples of some shards into the stream, as full batches."""
        assert self._sequence is not None
        for number in dealt.returned:
            ids = self._ids(number)
            due = self._sequence.counts(dealt.next * self._size)[ids]
            self._put_ids(number, ids[self._dealer.counts(session, ids) < due])
        for number in dealt.fresh:
            self._put_ids(number, self._ids(number))

    def _ids(self, number: int) -> Indices:
        assert self._sequence is not None
        return self._sequence.part(number * self._size, (number + 1) * self._size)[0]

    def _put_ids(self, number: int, ids: Sequence[int] | Indices) -> None:
        self._rest = np.concatenate([self._rest, ids])
        while len(self._rest) >= self._stream.batch_size:
            self._put_batch(self._stream.batch_size)
        self._held[number] = self.batches + (1 if len(self._rest) else 0)

    def _put_batch(self, size: int) -> None:
        self._stream.put(self._rest[:size])
        self._rest, self.batches = self._rest[size:], self.batches + 1
