"""Examples as one sequence: each part is what the whole has there, and the counts agree with it."""

import numpy as np
import pytest

from tfps.data.epochs import ENDLESS, Epochs, Turns
from tfps.data.examples import Examples
from tfps.data.order import Indices, Order
from tfps.errors import DataError

SIZE = 53


def order(workers: int = 1, seed: int = 1) -> Order:
    """Return the order of some examples that nobody reads."""
    return Order(Examples(SIZE, lambda ids: (ids, ids)), seed, workers)


def uneven(seed: int) -> Indices:
    """Return counts as async leaves them: some examples are epochs ahead."""
    return np.random.default_rng(seed).integers(0, 4, SIZE)


def by_hand(made: Order, worker: int, counts: Indices, epochs: range) -> list[tuple[int, int]]:
    """Return the examples of some epochs, each with its epoch."""
    return [(int(one), epoch) for epoch in epochs for one in made.rest(worker, counts, epoch)]


@pytest.mark.parametrize("seed", range(10))
def test_parts_make_the_whole(seed: int) -> None:
    """Parts of any length, one after another, are the epochs one after another, to the limit."""
    made, counts, random = order(2, seed), uneven(seed), np.random.default_rng(seed)
    sequence = Epochs(made, 1, counts, 6)
    at, found = 0, []
    while at < sequence.length + 10:
        end = at + int(random.integers(1, 40))
        ids, epochs = sequence.part(at, end)
        found += list(zip(ids.tolist(), epochs.tolist(), strict=True))
        at = end
    assert found == by_hand(made, 1, counts, range(6))
    assert len(found) == sequence.length


@pytest.mark.parametrize("end", [0, 1, 40, 100, 400])
def test_counts_are_those_of_what_was_read(end: int) -> None:
    """Each example of a part has one read more than before."""
    counts = uneven(3)
    sequence = Epochs(order(), 0, counts)
    read = sequence.part(0, end)[0]
    expected = counts + np.bincount(read, minlength=SIZE)
    found = sequence.counts(end)
    np.testing.assert_array_equal(found[read], expected[read])
    np.testing.assert_array_equal(found, expected)
    assert sequence.length == ENDLESS


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 53])
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_turns_have_each_example_once(workers: int, batch_size: int, epochs: int) -> None:
    """The batches of all updates are the sequence; only the last one is not full, and no worker is without."""
    counts = np.zeros(SIZE, np.int64)
    turns = Turns(Epochs(order(), 0, counts, epochs), workers, batch_size)
    for update in range(turns.updates):
        batches = [turns.batch(worker, update) for worker in range(workers)]
        sizes = {len(batch) for batch in batches}
        assert sizes == {batch_size} if update < turns.updates - 1 else min(sizes) > 0
        assert max(sizes) <= batch_size + 1
        counts += np.bincount(np.concatenate(batches), minlength=SIZE)
        np.testing.assert_array_equal(turns.counts(update + 1), counts)
    assert (counts == epochs).all()
    assert not len(turns.batch(0, turns.updates))


def test_a_finished_sequence_is_empty() -> None:
    """A job whose epochs are reached has no batch."""
    sequence = Epochs(order(), 0, np.full(SIZE, 2), 2)
    assert sequence.length == 0
    assert not len(sequence.part(0, 5)[0])
    assert Turns(sequence, 2, 4).updates == 0


def test_fewer_examples_than_workers_are_refused() -> None:
    """An update needs one of each worker."""
    counts = np.full(SIZE, 2)
    counts[0] = 1
    with pytest.raises(DataError, match=r"1 example left for 2 workers: use fewer workers"):
        Turns(Epochs(order(), 0, counts, 2), 2, 4)
