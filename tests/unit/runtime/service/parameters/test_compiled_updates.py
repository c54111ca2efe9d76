"""Updates as functions: made for what comes again, with the arithmetic of the optimizer, and not without end."""

from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.client.arrays import Rows
from tfps.runtime.service.parameters import compiled_updates
from tfps.runtime.service.parameters.compiled_updates import CompiledUpdates


def optimizer() -> mock.Mock:
    """Return SGD of rate 1, and count the calls of its Python code."""
    made = mock.Mock()
    made.apply_gradients = mock.Mock(side_effect=tf.train.GradientDescentOptimizer(1.0).apply_gradients)
    return made


def test_an_update_that_comes_again_is_a_function() -> None:
    """Its Python code runs in the first, and once to make the function; new values and numbers of rows are others."""
    own, table, vector = optimizer(), tf.Variable(np.zeros([3, 2])), tf.Variable(np.zeros(2))
    updates = CompiledUpdates(own)
    for count in range(1, 7):
        ids = tf.constant([0, 2] * count, tf.int64)
        rows = tf.IndexedSlices(tf.ones([2 * count, 2], tf.float64), ids, tf.constant([3, 2], tf.int64))
        updates.apply([(rows, table), (tf.constant([1.0, count], tf.float64), vector)])
    assert own.apply_gradients.call_count == 2
    np.testing.assert_array_equal(table.numpy(), [[-21, -21], [0, 0], [-21, -21]])
    np.testing.assert_array_equal(vector.numpy(), [-6, -21])
    updates.apply([(tf.constant([1.0, 1.0], tf.float64), vector)])  # another set of parameters
    assert own.apply_gradients.call_count == 3
    np.testing.assert_array_equal(vector.numpy(), [-7, -22])


def test_there_are_only_so_many_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may push another set of parameters each time."""
    monkeypatch.setattr(compiled_updates, "_MOST", 2)
    own, variables = optimizer(), [tf.Variable(np.zeros(1)) for _ in range(4)]
    updates = CompiledUpdates(own)
    for _ in range(5):
        for variable in variables:
            updates.apply([(tf.constant([1.0], tf.float64), variable)])
    assert own.apply_gradients.call_count == 2 * 2 + 2 * 5
    assert [variable.numpy().item() for variable in variables] == [-5] * 4


def test_an_update_reads_what_it_has_made() -> None:
    """Once it is a function, each parameter of which no rows were updated; a copy of such a table would be too much."""
    table, vector = tf.Variable(np.zeros([3, 2])), tf.Variable(np.zeros(2))
    updates, rows = CompiledUpdates(optimizer()), Rows(np.array([1]), np.ones([1, 2]))
    dense = [(np.ones([3, 2]), table), (np.ones(2), vector)]
    assert updates.apply(dense) == {}
    for number in (2, 3):
        found = updates.apply(dense)
        assert sorted(found) == [0, 1]
        np.testing.assert_array_equal(found[0], np.full([3, 2], -number))
        np.testing.assert_array_equal(found[1], np.full(2, -number))
    assert not updates.is_copied(table)
    for _ in range(2):
        found = updates.apply([(rows, table), dense[1]])
    assert sorted(found) == [1]
    np.testing.assert_array_equal(found[1], [-5, -5])
    assert updates.is_copied(table)
    for _ in range(2):
        found = updates.apply(dense)
    assert sorted(found) == [1]
    np.testing.assert_array_equal(table, [[-5, -5], [-7, -7], [-5, -5]])
