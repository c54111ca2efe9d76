"""The ways to combine gradients, against numpy and by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.modes.sync import aggregation


def run(function: Callable[[Any], Any], value: Any) -> Any:
    """Return what a function of this package returns."""
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(function(tf.constant(value)))


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_median_is_numpys(count: int) -> None:
    """Of an odd and of an even number."""
    stack = np.random.default_rng(count).normal(size=[count, 2, 3])
    np.testing.assert_array_equal(run(aggregation.median, stack), np.median(stack, axis=0))


@pytest.mark.parametrize(("count", "trimmed"), [(3, 1), (4, 1), (5, 1), (7, 2), (9, 3)])
def test_a_trimmed_mean_leaves_out_both_ends(count: int, trimmed: int) -> None:
    """As many on each side as Krum tolerates, at least one."""
    stack = np.random.default_rng(count).normal(size=[count, 2, 3])
    expected = np.sort(stack, axis=0)[trimmed : count - trimmed].mean(axis=0)
    np.testing.assert_allclose(run(aggregation.trimmed_mean, stack), expected, rtol=1e-12)


def test_krum_selects_the_one_with_the_nearest_neighbors() -> None:
    """Of five, each is judged by its two nearest others; the one far away is not, nor is one at the rim."""
    points = np.float64([[0, 0], [3, 0], [0.5, 0], [-1000, 0], [1, 0]])
    distances = run(aggregation.squared_distances, points)
    np.testing.assert_array_equal(distances, ((points[:, None] - points[None]) ** 2).sum(axis=2))
    # Scores: 0.25 + 1, 4 + 6.25, 0.25 + 0.25, about 2e6, 0.25 + 1.
    assert run(aggregation.krum, distances) == 2


def test_krum_may_have_more_broken_ones() -> None:
    """Of seven, two that agree with each other are outvoted."""
    points = np.float64([[50], [0], [0.1], [50], [-0.1], [0.2], [-0.2]])
    assert run(aggregation.krum, run(aggregation.squared_distances, points)) == 1


@pytest.mark.parametrize(("count", "tolerated"), [(1, 0), (4, 0), (5, 1), (6, 1), (7, 2), (25, 11)])
def test_how_many_broken_ones_krum_tolerates(count: int, tolerated: int) -> None:
    """The most for which n >= 2 f + 3."""
    assert aggregation.tolerated(count) == tolerated
