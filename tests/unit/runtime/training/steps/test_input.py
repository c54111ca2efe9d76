"""A worker that is dealt its batches: what it has trained on, and how it waits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfps.data.epochs import ENDLESS
from tfps.data.hand import Supply
from tfps.runtime.training.steps.input import Input


class Dealt:
    """A hand that gets batches when the test says so."""

    def __init__(self) -> None:
        self.batches, self.gets, self.trained = 0, [], 0

    def fill(self, _: Any, batches: int, trained: int) -> Supply:
        """Take the next number of batches; it ends after the last."""
        self.trained = trained
        if self.batches < batches and self.gets:
            self.batches += self.gets.pop(0)
        if self.batches >= batches:
            return Supply.READY
        return Supply.LOW if self.gets else Supply.ENDED


def input_of(hand: Dealt) -> tuple[Input, list[str]]:
    """Return an input, and what it has run."""
    ran: list[str] = []
    session = SimpleNamespace(run=ran.append)
    iterator = SimpleNamespace(stream=SimpleNamespace(batches=lambda: ENDLESS), position=SimpleNamespace(hand=hand))
    built = SimpleNamespace(iterator=iterator, step=SimpleNamespace(leave="leave", rejoin="rejoin"))
    return Input(session, built), ran  # type: ignore[arg-type]


def test_it_waits_for_what_another_worker_may_leave() -> None:
    """Nobody waits for it meanwhile; at the end it does not come back."""
    hand = Dealt()
    hand.gets = [2, 0, 0, 1]
    given, ran = input_of(hand)
    assert given.fill(2, lambda: True)
    assert given.has(2)
    given.take(2)
    assert not given.has(1)
    assert given.fill(1, lambda: True)
    assert ran == ["leave", "rejoin"]
    given.take(1)
    assert not given.fill(1, lambda: True)
    assert ran == ["leave", "rejoin", "leave"]


def test_a_request_to_stop_ends_the_wait() -> None:
    """The worker does not wait for data that it does not use."""
    hand = Dealt()
    hand.gets = [0, 1]
    assert not input_of(hand)[0].fill(1, lambda: False)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_counts_as_trained_on_only_if_it_is(seed: int, in_flight: int) -> None:
    """Steps of runs in flight take batches in any order; the rule never counts one that a run still has."""
    random, hand = np.random.default_rng(seed), Dealt()
    hand.gets = [1] * 1000
    given, _ = input_of(hand)
    runs: list[list[int]] = []  # by run in flight, the batches that it has taken
    sizes: list[int] = []
    pulled, trained, counted = 0, set(), 0
    for _ in range(300):
        if len(runs) < in_flight and random.random() < 0.6:
            hand.batches += 8
            given.take(size := int(random.integers(1, 5)))
            runs.append([])
            sizes.append(size)
        for index in random.permutation(len(runs)):
            for _ in range(int(random.integers(0, 3))):
                if len(runs[index]) < sizes[index]:
                    runs[index].append(pulled)
                    pulled += 1
        if runs and len(runs[0]) == sizes[0]:
            trained |= set(runs.pop(0))
            sizes.pop(0)
            given.note_end()
        given.fill(1, lambda: True)
        counted = hand.trained
        assert set(range(counted)) <= trained
    assert counted > len(trained) / 2
