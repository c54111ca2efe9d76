"""Claims about the rows of embedding tables on the wire."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import model_of, train, variables_of

import tfps
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.optimizers.registry import OPTIMIZERS
from tfps.runtime.graph import plan

pytestmark = pytest.mark.slow

STEPS, ROWS = 6, 60


def ids(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ids of which many are the same."""
    if mode == "eval":
        return None
    rng = np.random.default_rng(context.input_pipeline_id)
    values = np.minimum(rng.zipf(1.3, size=(STEPS, 8, 2)) - 1, ROWS - 1).astype(np.int64)
    return tf.data.Dataset.from_tensor_slices(values).map(lambda x: ({"ids": x}, 0.0)).repeat()


def shorter_ids(mode: str, params: Any, context: Any) -> Any:
    """Be the same with batches of 4 to 7, of which the graph does not know the length."""
    batches = ids(mode, params, context)
    return batches and batches.map(lambda x, y: ({"ids": x["ids"][: 4 + x["ids"][0, 0] % 4]}, y))


def looking_up(num_tables: int, input_fn: Any = ids) -> Any:
    """Return a model that looks up several tables, one of them twice, and two by the same ids."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        left, right = features["ids"][:, 0], features["ids"][:, 1]
        tables = [tf.get_variable(f"table{i}", [ROWS, 4]) for i in range(num_tables)]
        rows = [tf.nn.embedding_lookup(table, left) for table in tables]
        rows += [tf.nn.embedding_lookup(tables[0], right), tf.nn.embedding_lookup(tables[-1], features["ids"])[:, 1]]
        weight = tf.get_variable("weight", [4])
        loss = tf.reduce_mean(tf.square(tf.add_n(rows) * weight - 1))
        return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=0.1))

    return model_of(input_fn, model_fn)


def trained(
    directory: Path, num_ps: int, num_workers: int, input_fn: Any = ids, min_slice_mb: float = 1e-6, **flags: Any
) -> dict[str, bytes]:
    """Return the bytes of a job's variables; the tables are split."""
    flags |= {"max_steps": STEPS, "min_slice_mb": min_slice_mb, "model_dir": str(directory)}
    train(looking_up(3, input_fn), num_ps, num_workers, **flags)
    return {name: np.asarray(value).tobytes() for name, value in variables_of(directory).items()}


@pytest.mark.parametrize(("num_ps", "optimizer"), [*((1, name) for name in OPTIMIZERS), (2, "adagrad")])
def test_rows_that_travel_once_are_trained_alike(tmp_path: Path, num_ps: int, optimizer: str) -> None:
    """Unique ids and sums on the worker change no bit of tables and slots, split or whole."""
    made = [trained(tmp_path / each, num_ps, 1, optimizer=optimizer, wire=each) for each in ("plain", "packed")]
    assert made[0] == made[1]


@pytest.mark.parametrize(("optimizer", "min_slice_mb"), [("sgd", 1.0), ("sgd", 1e-6), ("adagrad", 1e-6)])
def test_batches_of_any_length_are_trained_alike(tmp_path: Path, optimizer: str, min_slice_mb: float) -> None:
    """The same if the length of nothing is known: with plain SGD, each gradient is sent, with lengths of its own."""
    flags = {"input_fn": shorter_ids, "optimizer": optimizer, "min_slice_mb": min_slice_mb}
    made = [trained(tmp_path / each, 2, 1, wire=each, **flags) for each in ("plain", "packed")]
    assert made[0] == made[1]


def test_rows_in_step_are_trained_alike(tmp_path: Path) -> None:
    """The same with two workers in sync, whose sums do not depend on the order."""
    made = [trained(tmp_path / each, 2, 2, mode="sync", optimizer="adagrad", wire=each) for each in ("plain", "packed")]
    assert made[0] == made[1]


def test_rows_are_halved_both_ways(tmp_path: Path) -> None:
    """As bfloat16, rows of 1 + 2^-20 arrive as 1, their gradient of 0.123456 as 0.123535; the tables stay float32."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        almost_one = tf.constant_initializer(1 + 2**-20)
        tables = [tf.get_variable(f"table{i}", [ROWS, 4], initializer=almost_one) for i in range(2)]
        rows = [tf.nn.embedding_lookup(table, tf.range(features["ids"][0, 0] * 0, 3)) for table in tables]
        seen = tf.get_variable("seen", [4], initializer=tf.zeros_initializer())
        loss = tf.reduce_sum(tf.add_n(rows) * 0.123456) + tf.reduce_sum(seen * tf.stop_gradient(rows[1][0]))
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(ids, model_fn), num_workers=1, max_steps=1, wire="bfloat16", model_dir=str(tmp_path))
    saved = variables_of(tmp_path)
    np.testing.assert_array_equal(saved["seen"], np.float32([-1] * 4))
    for table in (saved["table0"], saved["table1"]):
        np.testing.assert_array_equal(table[:3], np.float32(1 + 2**-20) - np.full([3, 4], 0.12353515625, np.float32))
        np.testing.assert_array_equal(table[3:], np.float32(1 + 2**-20))


def branching(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a lookup in a branch, one in a loop, and sums of its own by unique ids."""
    left, right = features["ids"][:, 0], features["ids"][:, 1]
    first, second, third = (tf.get_variable(f"table{i}", [ROWS, 4]) for i in range(3))
    rows = tf.nn.embedding_lookup(second, right)
    rows += tf.cond(left[0] > 2, lambda: tf.nn.embedding_lookup(first, left), lambda: tf.zeros([8, 4]))
    rows += tf.map_fn(lambda one: tf.nn.embedding_lookup(third, one), left, dtype=tf.float32)
    groups = tf.math.unsorted_segment_sum(rows, tf.unique(left)[1], 8)
    loss = tf.reduce_mean(tf.square(rows - 1)) + tf.reduce_mean(groups)
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "adagrad", learning_rate=0.1))


def test_branches_loops_and_sums_of_its_own_are_the_models(tmp_path: Path) -> None:
    """What is looked up only sometimes, or summed in another way, is left as the model has it."""
    made = []
    for wire in ("plain", "packed"):
        train(model_of(ids, branching), 1, 1, max_steps=STEPS, wire=wire, model_dir=str(tmp_path / wire))
        made.append({name: np.asarray(v).tobytes() for name, v in variables_of(tmp_path / wire).items()})
    assert made[0] == made[1]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "ftrl"])
def test_tables_cost_no_calls(optimizer: str) -> None:
    """Ten tables are as many tensors a step as two: ids, rows, sums, and those of dense variables."""
    cluster = Cluster(("p:1",), ("w:1", "w:2"))
    counts = []
    for num_tables in (2, 10):
        planned = plan.make(JobConfig(optimizer=optimizer), cluster, looking_up(num_tables))
        counts.append(len(planned.pulled) + len(planned.pushed))
    assert counts[0] == counts[1] <= 7


def test_a_row_travels_once() -> None:
    """What is asked for are unique ids, and the gradient that is sent has a row for each of them."""
    planned = plan.make(JobConfig(optimizer="adagrad"), Cluster(("p:1",), ("w:1",)), looking_up(1))
    assert planned.plain
    widths = [sum(c.num_bytes is None for c in way) for way in (planned.pulled, planned.pushed)]
    assert widths == [1, 2]  # rows; ids and sums
    assert not any(c.num_bytes is None for c in planned.plain.pulled)  # all eight, however many are the same


@pytest.mark.parametrize("wire", ["plain", "packed"])
@pytest.mark.parametrize(
    ("name", "read"),
    [("L2Loss", tf.nn.l2_loss), ("HistogramSummary", lambda table: tf.summary.histogram("all_of_it", table))],
)
def test_a_table_read_whole_is_refused(wire: str, name: str, read: Any) -> None:
    """A regulariser or a histogram of a whole table is named, with the model's line, before anything starts."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        table = tf.get_variable("table", [ROWS, 4])
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, features["ids"]))
        more = read(table)
        loss = loss + 0.1 * more if more.dtype == tf.float32 else loss
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1))

    with pytest.raises(ModelError, match=rf"'table' is an embedding table.*\({name}\) reads all of it"):
        plan.make(JobConfig(wire=wire), Cluster(("p:1",), ("w:1",)), model_of(ids, model_fn))


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_rows_are_looked_up_before_a_change_that_waits_for_them(tmp_path: Path, wire: str) -> None:
    """A lookup of unique rows replaces the model's, for which the change waits; a million ids take their time."""
    size = 1_000_000

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        numbers = tf.data.Dataset.from_tensors(0).map(lambda _: ({"ids": tf.range(size)}, 0.0))
        return None if mode == "eval" else numbers.repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        zeros = {"initializer": tf.zeros_initializer(), "trainable": False}
        table, hits = tf.get_variable("table", [size], **zeros), tf.get_variable("hits", [], **zeros)
        before = tf.gather(table, features["ids"])
        with tf.control_dependencies([before]):
            marked = tf.scatter_update(table, features["ids"], 1.0)
        for update in (marked, hits.assign_add(tf.reduce_sum(before))):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=1.0 * weight, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(input_fn, model_fn), 1, 1, model_dir=str(tmp_path), max_steps=1, wire=wire)
    assert variables_of(tmp_path)["hits"] == 0
