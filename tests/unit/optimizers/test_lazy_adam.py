"""The optimizer that is tfps's own: Adam, lazy on sparse gradients."""

from typing import Any

import numpy as np
import pytest

from tfps.optimizers.registry import make_optimizer
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

ROWS = [[4, 0], [1, 5], [4, 4]]  # by step; the last one twice
RATE, DECAY1, DECAY2, EPSILON = 0.1, 0.9, 0.999, 1e-8


def trained(made: Any, gradients: Any) -> dict[str, Any]:
    """Return the variables of a table [6, 2] after some sparse gradients of two rows each."""
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [6, 2], initializer=tf.ones_initializer())
        value, rows = tf.placeholder(tf.float32, [2, 2]), tf.placeholder(tf.int64, [2])
        update = made().apply_gradients([(tf.IndexedSlices(value, rows, table.shape), table)])
        session.run(tf.global_variables_initializer())
        for number, gradient in zip(ROWS, gradients, strict=True):
            session.run(update, {value: gradient, rows: number})
        return session.run({variable.op.name: variable for variable in tf.global_variables()})


def ours() -> Any:
    """Make the optimizer that ``--optimizer=adam`` is."""
    return make_optimizer({"optimizer": "adam"}, "sgd", learning_rate=RATE)


def test_a_row_rests_until_it_has_a_gradient() -> None:
    """Rows and moments are Adam's at the steps that have the row, equal rows added up; others keep all their bits."""
    gradients = np.random.default_rng(7).normal(size=(3, 2, 2)).astype(np.float32)
    found = trained(ours, gradients)
    table, first, second = np.ones([6, 2]), np.zeros([6, 2]), np.zeros([6, 2])
    for step, (rows, gradient) in enumerate(zip(ROWS, gradients.astype(np.float64), strict=True), 1):
        for row in set(rows):
            total = gradient[np.equal(rows, row)].sum(axis=0)
            first[row] = DECAY1 * first[row] + (1 - DECAY1) * total
            second[row] = DECAY2 * second[row] + (1 - DECAY2) * total**2
            rate = RATE * np.sqrt(1 - DECAY2**step) / (1 - DECAY1**step)
            table[row] -= rate * first[row] / (np.sqrt(second[row]) + EPSILON)
    np.testing.assert_allclose(found["table"], table, rtol=1e-5)
    np.testing.assert_allclose(found["table/Adam"], first, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["table/Adam_1"], second, rtol=1e-4, atol=1e-9)
    untouched = [2, 3]
    np.testing.assert_array_equal(found["table"][untouched], np.ones([2, 2], np.float32))


def test_its_variables_are_those_of_adam() -> None:
    """A checkpoint of TensorFlow's Adam fits, and the other way round; but its rows do not rest."""
    gradients = np.ones([3, 2, 2], np.float32)
    theirs, mine = (trained(make, gradients) for make in (lambda: tf.train.AdamOptimizer(RATE), ours))
    assert {name: value.shape for name, value in theirs.items()} == {n: v.shape for n, v in mine.items()}
    assert not np.array_equal(theirs["table"][0], mine["table"][0])
    assert theirs["beta1_power"] == mine["beta1_power"] == pytest.approx(DECAY1**4)
