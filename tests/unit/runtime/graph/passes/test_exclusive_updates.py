"""Of two additions to a variable at the same time, none is lost, whichever kind of variable it is."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train, variables_of
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

import tfps
from tfps.runtime.graph.passes import exclusive_updates

MANY = 20_000
STEPS = 60


@pytest.fixture(autouse=True)
def _unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with TensorFlow's own functions, which an earlier job of this process has replaced."""
    for kind in ("add", "sub", "min", "max"):
        name = f"resource_scatter_{kind}"
        monkeypatch.setattr(gen_resource_variable_ops, name, getattr(resource_variable_ops, name))


def meets(update: Any, read: Any) -> float:
    """Run an update in four threads, eight times each, and return what the first row has become."""
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        threads = [threading.Thread(target=lambda: [session.run(update) for _ in range(8)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return float(session.run(read))


@pytest.mark.parametrize(("is_resource", "in_function"), [(True, False), (True, True), (False, False)])
def test_rows_that_are_added_at_the_same_time_are_all_there(is_resource: bool, in_function: bool) -> None:
    """A row counts each addition of four threads, of a resource variable and of one that is passed by reference."""
    exclusive_updates.patch_scatter()
    with tf.Graph().as_default() as graph:
        rows = tf.get_variable("rows", [4], initializer=tf.zeros_initializer(), use_resource=is_resource)
        ids, ones = tf.zeros([MANY], tf.int32), tf.ones([MANY])

        def add() -> Any:
            return tf.scatter_add(rows, ids, ones)

        update = tf2.function(add, autograph=False)() if in_function else add()
        exclusive_updates.lock_references(graph)
        assert meets(update.op if isinstance(update, tf.Tensor) else update, rows.read_value()[0]) == 32 * MANY


def test_rows_that_an_optimizer_of_the_model_adds_to_are_all_there() -> None:
    """They are, where the model itself runs the update. Elsewhere, TensorFlow's optimizers are unchanged."""
    exclusive_updates.patch_scatter()
    with tf.Graph().as_default():
        rows = tf.get_variable("rows", [4], initializer=tf.zeros_initializer(), use_resource=True)
        gradient = tf.IndexedSlices(-tf.ones([MANY]), tf.zeros([MANY], tf.int32), dense_shape=[4])
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        with exclusive_updates.of_model():
            update = optimizer.apply_gradients([(gradient, rows)])
        optimizer.apply_gradients([(gradient, rows)])
        kinds = [op.type for op in rows.handle.consumers() if "Scatter" in op.type]
        assert kinds == ["ResourceScatterNdAdd", "ResourceScatterAdd"]
        assert meets(update, rows.read_value()[0]) == 32 * MANY


def test_a_whole_variable_that_is_added_to_by_reference_loses_nothing() -> None:
    """``tf.assign_add`` of a TensorFlow 1.x variable, without a lock of its own, counts each addition."""
    with tf.Graph().as_default() as graph:
        sums = tf.get_variable("sums", [MANY], initializer=tf.zeros_initializer(), use_resource=False)
        update = tf.assign_add(sums, tf.ones([MANY])).op
        assert not update.get_attr("use_locking")
        exclusive_updates.lock_references(graph)
        assert meets(update, tf.reduce_min(sums)) == 32


@pytest.mark.parametrize("kind", ["add", "sub", "min", "max"])
@pytest.mark.parametrize(
    ("ids", "updates"),
    [(1, [5.0, -6.0]), ([0, 2, 0], 3.0), ([0, 2, 0], -3.0), (2, 7.0), ([[1], [1]], [[[4.0, -4.0]]] * 2)],
)
def test_an_exclusive_update_is_tensorflows_own(kind: str, ids: Any, updates: Any) -> None:
    """Rows get the values that ``tf.raw_ops`` gives, for one number, one row, or rows that occur twice."""
    exclusive_updates.patch_scatter()
    raw = getattr(tf.raw_ops, f"ResourceScatter{kind.title()}")
    with tf.Graph().as_default(), tf.Session() as session:
        first = np.float32([[1, 2], [3, 4], [5, 6]])
        mine, theirs = (tf.get_variable(name, initializer=first, use_resource=True) for name in ("mine", "theirs"))
        made = getattr(tf, f"scatter_{kind}")(mine, ids, updates)
        session.run(tf.global_variables_initializer())
        session.run([made, raw(resource=theirs.handle, indices=ids, updates=tf.constant(updates))])
        np.testing.assert_array_equal(*session.run([mine.read_value(), theirs.read_value()]))
        kinds = {op.type for op in mine.handle.consumers()}
        assert kinds >= {f"ResourceScatterNd{kind.title()}"}


def by_optimizer(rows: Any, ids: Any, ones: Any) -> Any:
    """Add to rows as an optimizer does."""
    return tf.train.GradientDescentOptimizer(1.0).apply_gradients([(tf.IndexedSlices(-ones, ids, [4]), rows)])


@pytest.mark.parametrize(
    ("add", "is_resource"), [(tf.scatter_add, True), (tf.scatter_add, False), (by_optimizer, True)]
)
@pytest.mark.parametrize("flags", [{"steps_per_run": 8, "runs_in_flight": 3}, {}])
def test_workers_lose_no_row_that_a_model_adds_to(
    tmp_path: Path, flags: dict[str, Any], add: Any, is_resource: bool
) -> None:
    """Two workers, with several runs under way, add to one row in UPDATE_OPS."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([1])).repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        given = {"trainable": False, "use_resource": is_resource}
        seen = tf.get_variable("seen", [4], initializer=tf.zeros_initializer(), **given)
        ids = tf.zeros([MANY], tf.int32) + tf.cast(features["x"] * 0.0, tf.int32)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, add(seen, ids, tf.ones([MANY])))
        return tfps.ModelSpec(loss=-weight * features["x"], optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(input_fn, model_fn), 1, 2, max_steps=STEPS, model_dir=str(tmp_path), **flags)
    saved = variables_of(tmp_path)
    assert saved["weight"] == STEPS
    assert saved["seen"].tolist() == [STEPS * MANY, 0, 0, 0]
