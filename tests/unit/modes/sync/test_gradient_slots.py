"""Slots of gradients: which ones an update has, with five workers on one server."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.modes.sync.gradient_slots import GradientSlots
from tfps.modes.updates.moments import FENCED

WORKERS = 5
_DENSE = np.float32([[1, 1], [1.5, 1], [-10, -10], [2, 1], [1.25, 1]])
_ROWS = np.int64([[0, 3], [3, 0], [0, 0], [2, 3], [0, 3]])


class _Server:
    """Five workers with a session each on one server, and the slots of a dense and a sparse gradient."""

    def __init__(self, aggregate: str, needed: int, first: int = 0) -> None:
        self.target = tf.train.Server.create_local_server().target
        self.sessions: list[Any] = []
        self.pushes: list[Any] = []
        self.stamps: list[Any] = []
        self.factors: list[Any] = []
        for worker in range(WORKERS):
            with tf.Graph().as_default() as graph:
                dense = tf.get_variable("dense", [2], initializer=tf.zeros_initializer(), use_resource=True)
                table = tf.get_variable("table", [4, 2], initializer=tf.zeros_initializer(), use_resource=True)
                values = tf.constant(np.stack([_DENSE[worker]] * 2))
                rows = tf.IndexedSlices(values, tf.constant(_ROWS[worker]), tf.constant([4, 2], tf.int64))
                stamp = tf.placeholder(tf.int64, [])
                factor = tf.placeholder_with_default(1.0, [])
                pairs = [(tf.constant(_DENSE[worker]) * factor, dense), (rows, table)]
                slots = GradientSlots(pairs, stamp, worker, WORKERS, needed, aggregate, "")
                starts = {"": tf.group(*slots.arrived(""))}
                with tf.control_dependencies([starts[""]]):
                    found = slots.combined(starts)
                self.sessions.append(tf.Session(self.target, graph=graph))
                self.pushes.append(tf.group(*slots.pushes))
                self.stamps.append(stamp)
                self.factors.append(factor)
                if not worker:
                    self.sessions[0].run([slots.begin(tf.constant(first, tf.int64)), tf.global_variables_initializer()])
                    self._rows = found[1][0].indices
                    dense_rows = tf.scatter_nd(found[1][0].indices[:, None], found[1][0].values, [4, 2])
                    self._result = [slots.chosen, found[0][0], dense_rows]
                    self._count = slots.held[0].count

    def push(self, worker: int, stamp: int, factor: float = 1.0) -> None:
        """Push a worker's gradient."""
        self.sessions[worker].run(self.pushes[worker], {self.stamps[worker]: stamp, self.factors[worker]: factor})

    def arrived(self) -> int:
        """Return how many gradients have arrived."""
        return int(self.sessions[0].run(self._count))

    def rows(self) -> list[int]:
        """Return the rows of the combined sparse gradient, instead of ``update``."""
        return sorted(set(self.sessions[0].run(self._rows).tolist()))

    def update(self) -> Any:
        """Return the chosen workers, and both combined gradients."""
        return self.sessions[0].run(self._result)


def _of_table(worker: int) -> Any:
    gradient = np.zeros([4, 2], np.float32)
    np.add.at(gradient, _ROWS[worker], _DENSE[worker])
    return gradient


def _tables(workers: Sequence[int]) -> Any:
    return np.stack([_of_table(worker) for worker in workers])


def test_an_update_has_the_first_gradients_of_its_step() -> None:
    """In whichever order they come; one that comes before the update has begun is left out as well."""
    server = _Server("mean", 3)
    for worker in (4, 2, 0, 1):
        server.push(worker, 0)
    chosen, dense, table = server.update()
    assert chosen.tolist() == [0, 2, 4]
    np.testing.assert_allclose(dense, _DENSE[[0, 2, 4]].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(table, _tables([0, 2, 4]).mean(axis=0), rtol=1e-6)


def test_a_late_gradient_is_dropped() -> None:
    """One of the step before takes no part in the next update, nor does one that was left out."""
    server = _Server("sum", 2, first=7)
    for worker in (0, 1, 2):
        server.push(worker, 7)
    assert server.update()[0].tolist() == [0, 1]
    server.push(3, 7)
    assert server.arrived() == 0
    server.push(4, 8)
    server.push(3, 8)
    chosen, dense, table = server.update()
    assert chosen.tolist() == [3, 4]
    np.testing.assert_array_equal(dense, _DENSE[3] + _DENSE[4])
    np.testing.assert_array_equal(table, _tables([3, 4]).sum(axis=0))


def test_krum_selects_one_worker_for_all_variables() -> None:
    """The whole gradient of the worker that is nearest to the others, not that of the broken one."""
    server = _Server("krum", 5)
    for worker in range(WORKERS):
        server.push(worker, 0)
    flat = np.concatenate([_DENSE, _tables(range(WORKERS)).reshape(WORKERS, -1)], axis=1)
    distances = ((flat[:, None] - flat[None]) ** 2).sum(axis=2)
    expected = int(np.argmin(np.sort(distances, axis=1)[:, 1:3].sum(axis=1)))
    _, dense, table = server.update()
    np.testing.assert_array_equal(dense, _DENSE[expected])
    np.testing.assert_array_equal(table, _of_table(expected))
    assert expected != 2


def test_krum_has_the_rows_of_the_selected_worker_only() -> None:
    """An optimizer with momentum changes each row that a gradient has, also where it is 0."""
    server = _Server("krum", 5)
    for worker in range(WORKERS):
        server.push(worker, 0)
    assert server.rows() == [0, 3]


def test_a_worker_that_was_replaced_writes_nothing() -> None:
    """Its gradient of an earlier generation comes after that of its successor, into whose slot it would go."""
    server = _Server("sum", 2, first=10)
    server.push(0, 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match=FENCED):
        server.push(0, 9, factor=1000.0)
    server.push(1, 10)
    chosen, dense, _ = server.update()
    assert chosen.tolist() == [0, 1]
    np.testing.assert_array_equal(dense, _DENSE[0] + _DENSE[1])


def test_krum_selects_among_those_that_have_arrived() -> None:
    """The place among the chosen is not the worker."""
    server = _Server("krum", 4)
    for worker in (4, 3, 1, 2):
        server.push(worker, 0)
    chosen, dense, table = server.update()
    assert chosen.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(dense, _DENSE[4])
    np.testing.assert_array_equal(table, _of_table(4))
