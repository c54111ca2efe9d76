"""Batches of several towers in one element of an input."""

from typing import Any

import pytest
from support.cluster import dataset_of, tf

from tfps.runtime.graph.towers import batches


def elements(dataset: Any) -> list[Any]:
    """Return the elements of a dataset."""
    with tf.Session() as session:
        iterator = tf.data.make_initializable_iterator(dataset)
        session.run(iterator.initializer)
        given, found = iterator.get_next(), []
        try:
            while True:
                found.append(session.run(given))
        except tf.errors.OutOfRangeError:
            return found


@pytest.mark.parametrize("count", [6, 7, 8])
@pytest.mark.parametrize("pad", [True, False])
def test_no_batch_is_lost_or_doubled(count: int, pad: bool) -> None:
    """Each batch has weight 1 once; what stands in for a missing one is the first of its step, with weight 0."""
    with tf.Graph().as_default():
        found = elements(batches.grouped(dataset_of([float(n) for n in range(count)]), 3, pad))
        rows = [([float(one[0]["x"]) for one in each[:-1]], each[-1].tolist()) for each in found]
        steps = int(tf.Session().run(batches.steps(tf.constant(count, tf.int64), 3, pad)))
    used = [x for row, weights in rows for x, weight in zip(row, weights, strict=True) if weight]
    assert used == [float(n) for n in range(count if pad else count // 3 * 3)]
    assert all(x == row[0] for row, weights in rows for x, weight in zip(row, weights, strict=True) if not weight)
    assert len(rows) == steps


def test_sparse_and_ragged_features_and_no_labels() -> None:
    """Each tower gets its own features of any kind."""

    def parts(number: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(tf.fill([number], number), [number])
        return {"s": tf.sparse.from_dense([[number, 0]]), "r": ragged}, None

    def numbers(one: Any) -> Any:
        first = tf.sparse.reduce_sum(one[0]["s"])
        return tf.stack([first, tf.size(one[0]["r"].flat_values, out_type=tf.int64)])

    with tf.Graph().as_default():
        source = tf.data.Dataset.range(1, 5).map(parts)
        found = elements(batches.grouped(source, 2, True).map(lambda one, other, _: (numbers(one), numbers(other))))
    assert [tuple(each.tolist() for each in step) for step in found] == [([1, 1], [2, 2]), ([3, 3], [4, 4])]
