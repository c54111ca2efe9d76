"""Krum over gradients that are on several servers: each adds up its part of the squared distances, in NumPy.

The squared distance of two gradients is the sum over all of their parameters, so each server computes it over its own,
and the matrices of all servers are added. The rule that selects by the sum is ``aggregation.krum``, as in a TensorFlow
job. Krum: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".

Differences, squares and sums are float64. The gradients are compared block by block, so the memory that this takes does
not depend on their size, beside a few integers for each row of a sparse gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.modes.sync import aggregation

Array = np.ndarray[Any, np.dtype[Any]]
_BLOCK = 1 << 16  # numbers of all gradients together: they fit into a cache


class SparseRows(Protocol):
    """Some rows of a gradient; all others are 0."""

    @property
    def ids(self) -> Array:
        """Integers [n]: the numbers of the rows. One that occurs more than once counts as often."""

    @property
    def values(self) -> Array:
        """[n, ...]: the rows."""


Gradient = Array | SparseRows


def selected(distances: Array) -> int:
    """Return the index of the gradient that Krum selects; of several that are as good, the first.

    Args:
        distances: float64 [n, n]: the squared distances between n gradients, over all servers.
    """
    with tf.device("CPU:0"):
        return int(aggregation.krum(distances))


def squared_distances(gradients: Sequence[Mapping[str, Gradient]]) -> Array:
    """Return the squared distances between n gradients: float64 [n, n]. One that is too large is Inf; none is NaN.

    Args:
        gradients: Of each, the parts by the name of their parameter. One that is missing counts as 0.
    """
    found = np.zeros([len(gradients), len(gradients)])
    with np.errstate(over="ignore", invalid="ignore"):
        for name in dict.fromkeys(name for each in gradients for name in each):
            for block in _blocks([each.get(name) for each in gradients]):
                for index in range(len(block) - 1):
                    difference = block[index + 1 :] - block[index]
                    found[index, index + 1 :] += np.einsum("ij,ij->i", difference, difference)
    found[np.isnan(found)] = np.inf  # Inf - Inf, where rows of one id add up to more than a float64 can be
    found += found.T
    return found


def _blocks(given: Sequence[Gradient | None]) -> Iterator[Array]:
    """Yield the gradients of one parameter in parts: float64 [n, numbers], of all gradients the same numbers."""
    arrays = [one for one in given if one is None or isinstance(one, np.ndarray)]
    return _dense_blocks(arrays) if len(arrays) == len(given) else _row_blocks(given)


def _dense_blocks(given: Sequence[Array | None]) -> Iterator[Array]:
    flat = {place: one.reshape(-1) for place, one in enumerate(given) if one is not None}
    size, step = max(map(len, flat.values())), max(1, _BLOCK // len(given))
    for start in range(0, size, step):
        block = np.zeros([len(given), min(step, size - start)])
        for place, one in flat.items():
            block[place] = one[start : start + step]
        yield block


def _row_blocks(given: Sequence[Gradient | None]) -> Iterator[Array]:
    """Yield blocks of rows: of those that some gradient has, which are all of them if one is dense."""
    dense = {place: _flat_rows(one) for place, one in enumerate(given) if isinstance(one, np.ndarray)}
    others = {place: one for place, one in enumerate(given) if not (one is None or isinstance(one, np.ndarray))}
    sparse = {place: _Sparse(one) for place, one in others.items()}
    width = next(iter(sparse.values())).values.shape[1]
    ids = np.unique(np.concatenate([one.ids for one in sparse.values()]))
    if dense:
        ids = np.arange(len(next(iter(dense.values()))))
    step = max(1, _BLOCK // (len(given) * max(1, width)))
    for start in range(0, len(ids), step):
        chosen = ids[start : start + step]
        block = np.zeros([len(given), len(chosen), width])
        for place, rows in dense.items():
            block[place] = rows[start : start + step]
        for place, one in sparse.items():
            one.add_to(block[place], chosen)
        yield block.reshape(len(given), -1)


class _Sparse:
    """The rows of one gradient, found by id."""

    def __init__(self, gradient: SparseRows) -> None:
        ids = gradient.ids.astype(np.int64, copy=False)
        self._order = np.argsort(ids, kind="stable")
        self.ids, self.values = ids[self._order], _flat_rows(gradient.values)

    def add_to(self, block: Array, chosen: Array) -> None:
        """Add the rows of the ids [m], which are sorted, to a block, float64 [m, width]."""
        first, end = np.searchsorted(self.ids, chosen[0]), np.searchsorted(self.ids, chosen[-1], side="right")
        places = np.searchsorted(chosen, self.ids[first:end])
        np.add.at(block, places, self.values[self._order[first:end]].astype(np.float64))


def _flat_rows(array: Array) -> Array:
    return array.reshape(len(array), int(np.prod(array.shape[1:])))
