"""Distances over several servers: against NumPy, and against the operations of a TensorFlow job."""

import tracemalloc
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.eager import _eagerly

from tfps.modes.sync import aggregation, krum

__all__ = ["_eagerly"]

RANDOM = np.random.default_rng(5)


@dataclass(frozen=True)
class Rows:
    """Rows of a gradient."""

    ids: Any
    values: Any


def whole(stack: Any) -> Any:
    """Return the squared distances of gradients that are in one array."""
    flat = np.asarray(stack, np.float64).reshape(len(stack), -1)
    return ((flat[:, None] - flat[None]) ** 2).sum(axis=2)


def integers(*shape: int) -> Any:
    """Return whole numbers, whose distances are exact in any order of the sum."""
    return RANDOM.integers(-50, 50, shape).astype(np.float32)


def tables(size: int) -> tuple[list[Rows | Any], Any]:
    """Return gradients of rows, with ids that repeat and in no order, and what they are as arrays: [n, rows, 3]."""
    given: list[Rows | Any] = []
    for count in (0, 1, 7, 30, 30):
        given.append(Rows(RANDOM.integers(0, size, count).astype(np.int64), integers(count, 3)))
    dense = np.zeros([len(given), size, 3])
    for place, one in enumerate(given):
        np.add.at(dense[place], one.ids, one.values)
    return given, dense


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_distances_are_over_all_parameters(block: int) -> None:
    """Whatever the block; one that a gradient lacks is 0 there, a scalar and an empty array have their place, too."""
    with mock.patch.object(krum, "_BLOCK", block):
        w, b, c, none = integers(5, 4, 3), integers(5, 3), integers(5), integers(5, 0, 2)
        given = [{"w": w[i], "b": b[i], "c": np.asarray(c[i]), "none": none[i]} for i in range(5)]
        np.testing.assert_array_equal(krum.squared_distances(given), whole(w) + whole(b) + whole(c))
        del given[1]["w"], given[4]["b"]
        w[1], b[4] = 0, 0
        np.testing.assert_array_equal(krum.squared_distances(given), whole(w) + whole(b) + whole(c))


@pytest.mark.parametrize("block", [1, 16, 1 << 16])
@pytest.mark.parametrize("with_dense", [False, True])
def test_rows_count_as_what_they_are_dense(block: int, with_dense: bool) -> None:
    """Ids repeat, gradients have other rows, one has none, one lacks the table; another one may be dense."""
    with mock.patch.object(krum, "_BLOCK", block):
        given, dense = tables(20)
        parts: list[Any] = [{"t": one} for one in given]
        parts.append({})
        dense = np.concatenate([dense, np.zeros([1, 20, 3])])
        if with_dense:
            parts.append({"t": integers(20, 3)})
            dense = np.concatenate([dense, parts[-1]["t"][None]])
        np.testing.assert_array_equal(krum.squared_distances(parts), whole(dense))


def test_comparing_takes_no_copy_of_the_gradients() -> None:
    """Of 40 MB, at most a few at a time."""
    given = [{"w": np.zeros([2_000_000], np.float32)} for _ in range(5)]
    tracemalloc.start()
    try:
        krum.squared_distances(given)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 * krum._BLOCK <= most < 4 << 20


def test_no_parameter_is_no_distance() -> None:
    """A server may have none."""
    np.testing.assert_array_equal(krum.squared_distances([{}] * 3), np.zeros([3, 3]))


def test_gradients_of_any_width_are_compared_as_float64() -> None:
    """float16 and integers do not overflow, and a small difference of large float32 counts."""
    half = np.float16([[60000], [-60000], [0]])
    small = np.int8([[120], [-120], [0]])
    near = np.float32([[1e30], [-1e30], [3]])
    for stack in (half, small, near):
        np.testing.assert_array_equal(krum.squared_distances([{"w": each} for each in stack]), whole(stack))


def test_what_is_too_large_is_inf_and_never_nan() -> None:
    """The square of a float64, and two rows of one id: those who send that are not selected."""
    most = np.finfo(np.float64).max
    bad = Rows(np.int64([1, 1]), np.float64([[most], [most]]))
    honest = [np.float64([[0], [number]]) for number in (1, 2, 4, 8, 16)]
    given: list[Any] = [{"w": one} for one in (bad, bad, *honest)]
    found = krum.squared_distances(given)
    assert not np.isnan(found).any()
    assert np.isinf(found[0, 1])  # although they are the same: nobody can tell
    assert np.isinf(found[:2, 2:]).all()
    assert np.isfinite(found[2:, 2:]).all()
    assert krum.selected(found) == 4  # n = 7, f = 2: of 4, the 3 nearest are 1, 2 and 8; 9 + 4 + 16 is the least
    far = krum.squared_distances([{"w": np.float64([number])} for number in (most, most, 0, 1, 3)])
    assert far[0, 1] == 0
    assert krum.selected(far) == 3


@pytest.mark.parametrize("count", [5, 6, 7, 11])
def test_the_rule_is_that_of_a_job(count: int) -> None:
    """Also with ties, of which the first one wins: the same operations, of the same distances."""
    for seed in range(20):
        stack = np.random.default_rng(seed).integers(0, 3, [count, 2]).astype(np.float32)
        with tf.Graph().as_default(), tf.Session() as session:
            expected = session.run(aggregation.krum(aggregation.squared_distances(tf.constant(stack))))
        assert krum.selected(krum.squared_distances([{"w": one} for one in stack])) == expected


def test_the_first_of_equals_is_selected() -> None:
    """All the same, and two pairs."""
    assert krum.selected(np.zeros([5, 5])) == 0
    points = np.float32([[9], [0], [1], [0], [1]])
    assert krum.selected(whole(points)) == 1  # the two nearest of each: 0 + 1 for all but the first


def test_the_first_of_the_broken_when_all_are() -> None:
    """If every distance is Inf, there is still one update, and no error."""
    found = np.full([5, 5], np.inf)
    np.fill_diagonal(found, 0)
    assert krum.selected(found) == 0
