"""Who reads which examples in which order: nothing is lost or doubled in an epoch, however often a run is resumed."""

import numpy as np
import pytest

from tfps.data.examples import Examples
from tfps.data.order import Order
from tfps.errors import DataError, ModelError

SIZE = 103
FIRST, SECOND = [[3, 5, 4, 0], [5, 0, 4, 3]], [2, 1, 6, 7]  # of 8 examples, by epoch


def examples(classes: object = None) -> Examples:
    """Return examples that nobody reads."""
    return Examples(SIZE, lambda ids: (ids, ids), classes)


@pytest.mark.parametrize("partition", ["even", "label"])
@pytest.mark.parametrize("workers", [1, 2, 10])
def test_the_shares_are_disjoint_and_together_all(workers: int, partition: str) -> None:
    """Each example is in one share; the sizes of even shares differ by 1 at most."""
    shares = Order(examples(np.arange(SIZE) % 10), 3, workers, partition).shares
    assert sorted(np.concatenate(shares)) == list(range(SIZE))
    assert partition == "label" or np.ptp([len(share) for share in shares]) <= 1


def test_label_shares_have_few_classes() -> None:
    """Of 10 workers and 10 equal classes, each has two classes, and not all have the same."""
    classes = np.arange(1000) % 10
    shares = Order(Examples(1000, lambda ids: (ids, ids), classes), 1, 10, "label").shares
    assert all(len(set(classes[share])) <= 2 for share in shares)
    assert len({tuple(sorted(set(classes[share]))) for share in shares}) > 1


def test_orders_are_fixed_for_good() -> None:
    """A checkpoint of sync relies on the order, also one of an earlier release."""
    order = Order(Examples(8, lambda ids: (ids, ids)), 1, 2)
    zeros = np.zeros(8, np.int64)
    assert [order.rest(0, zeros, epoch).tolist() for epoch in (0, 1)] == FIRST
    assert order.rest(1, zeros, 0).tolist() == SECOND


def test_orders_differ_by_epoch_and_seed() -> None:
    """Each epoch and each seed has its own order."""
    zeros = np.zeros(SIZE, np.int64)
    orders = [Order(examples(), seed, 1).rest(0, zeros, epoch).tolist() for seed in (1, 2) for epoch in (0, 1, 2)]
    assert len({tuple(one) for one in orders}) == 6


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_run_reads_what_is_left(seed: int) -> None:
    """A run that is cut anywhere goes on as one that was not cut."""
    random = np.random.default_rng(seed)
    order = Order(examples(), seed, int(random.integers(1, 6)))
    first, more = (int(n) for n in random.integers(0, 200, 2))
    whole = order.advanced(np.zeros(SIZE, np.int64), first + more)
    cut = order.advanced(order.advanced(np.zeros(SIZE, np.int64), first), more)
    np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_are_what_the_workers_have_read(seed: int) -> None:
    """``advanced`` agrees with the streams that ``rest`` gives, and no example is an epoch ahead in a share."""
    random = np.random.default_rng(seed)
    workers, taken = int(random.integers(1, 6)), int(random.integers(1, 150))
    before = Order(examples(), seed, int(random.integers(1, 6))).advanced(np.zeros(SIZE, np.int64), 37)
    order = Order(examples(), seed, workers)
    by_hand = before.copy()
    for worker in range(workers):
        first = order.first_epoch(worker, before)
        stream = np.concatenate([order.rest(worker, before, first + number) for number in range(20)])
        np.add.at(by_hand, stream[:taken], 1)
        assert np.ptp(by_hand[order.shares[worker]]) <= max(1, np.ptp(before))
    np.testing.assert_array_equal(order.advanced(before, taken), by_hand)


def test_what_cannot_be_divided_is_refused() -> None:
    """Too few examples are data; no classes, and classes of other examples, are a mistake of the model."""
    for classes, workers, partition, kind, what in (
        (None, SIZE + 1, "even", DataError, "use fewer workers"),
        (None, 2, "label", ModelError, r"give tfps\.Examples\(classes=\.\.\.\)"),
        ([1], 2, "label", ModelError, "label: 1 class for 103 examples: give one for each"),
        (np.zeros(5000), 2, "label", ModelError, "label: 5,000 classes for 103 examples: give one for each"),
        (np.zeros([SIZE, 2]), 2, "label", ModelError, r"label: classes of shape \(103, 2\) for 103 examples: give one"),
        (np.zeros(SIZE), 60, "label", DataError, "use fewer workers"),
    ):
        with pytest.raises(kind, match=what):
            Order(examples(classes), 1, workers, partition)
