"""The largest size of what a batch looks up in tables, in a plan, against the formula."""

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import model_of

import tfps
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.models.model import Model
from tfps.runtime.graph import plan, size_bounds

ROWS, WIDTH, TABLES, BATCH = 50, 4, 2, 8


def looking_up(is_full: bool) -> Model:
    """Return a model that looks up one row of each table for an example; batches may be shorter unless full."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        ids = tf.data.Dataset.from_tensors((np.zeros([TABLES], np.int64), 0.0)).repeat()
        return None if mode == "eval" else ids.batch(BATCH, drop_remainder=is_full)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        tables = [tf.get_variable(f"table{at}", [ROWS, WIDTH]) for at in range(TABLES)]
        rows = [tf.nn.embedding_lookup(table, features[:, at]) for at, table in enumerate(tables)]
        loss = tf.reduce_sum(tf.add_n(rows)[:, 0] - labels)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.AdagradOptimizer(0.1))

    return model_of(input_fn, model_fn)


@pytest.mark.parametrize("mode", ["async", "sync", "allreduce"])
@pytest.mark.parametrize(("is_full", "most"), [(True, BATCH), (False, ROWS)])
def test_rows_are_bounded_by_the_batch_or_the_table(mode: str, is_full: bool, most: int) -> None:
    """Each table gives a row for each example at most, or all of its rows, and gets as many sums of gradients."""
    with_ps, workers = mode != "allreduce", ("w:1", "w:2")
    planned = plan.make(JobConfig(mode=mode), Cluster(("p:1",) if with_ps else (), workers), looking_up(is_full))
    ways = [[*planned.pulled], [*planned.pushed, *planned.to_next]] if with_ps else [[*planned.to_next]]
    bounds = [sum(one.most_bytes or 0 for one in way if one.num_bytes is None) for way in ways]
    assert all(one.most_bytes for way in ways for one in way if one.num_bytes is None)
    values, ids = TABLES * most * WIDTH * 4, TABLES * most * 8
    # The numbers of ids are sent to the PS before the ids.
    assert bounds == ([values, values + ids + TABLES * 8] if with_ps else [values + ids])


def test_what_has_no_bound() -> None:
    """Ids that may repeat in a batch of unknown size; and a string has no size."""
    with tf.Graph().as_default():
        ids, words = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.string, [3])
        table = tf.get_variable("table", [ROWS, WIDTH], use_resource=True)
        rows = tf.raw_ops.ResourceGather(resource=table.handle, indices=ids, dtype=tf.float32)
        assert size_bounds.most_bytes(rows) is size_bounds.most_bytes(ids) is size_bounds.most_bytes(words) is None
        unique, _ = tf.unique(ids)
        known = tf.raw_ops.ResourceGather(resource=table.handle, indices=unique, dtype=tf.float32)
        assert size_bounds.most_bytes(known) == ROWS * WIDTH * 4
        known.set_shape([5, WIDTH])
        assert size_bounds.most_bytes(known) == 5 * WIDTH * 4
