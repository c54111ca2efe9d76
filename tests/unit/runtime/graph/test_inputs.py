"""Claims about the input of a graph: nothing is counted for a batch that does not come."""

from pathlib import Path
from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train, variables_of
from support.processes import summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.runtime.graph import builder, inputs, placement
from tfps.runtime.graph.cancel_safe_iterator import CancelSafeIterator

BATCHES = 7


def batches(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` whose evaluation has ``BATCHES`` batches."""
    return dataset_of([1.0] * BATCHES).batch(1) if mode == "eval" else dataset_of([1.0]).repeat().batch(1)


def counting(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose metrics count batches in a branch and in a loop, and do not look at the batch."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    local = {"initializer": tf.zeros_initializer(), "collections": [tf.GraphKeys.LOCAL_VARIABLES]}
    branch, loop = (tf.get_variable(name, [], trainable=False, **local) for name in ("branch", "loop"))

    def turn(index: Any) -> Any:
        with tf.control_dependencies([loop.assign_add(1.0)]):
            return index + 1

    counted = {
        "branch": tf.cond(tf.random.uniform([]) < 2.0, lambda: branch.assign_add(1.0), lambda: tf.constant(0.0)),
        "loop": tf.while_loop(lambda index: index < 1, turn, [tf.constant(0)]),
    }
    return tfps.ModelSpec(
        loss=weight * tf.reduce_mean(features["x"]),
        optimizer=tf.train.GradientDescentOptimizer(1.0),
        eval_metric_ops={name: (one.read_value(), counted[name]) for name, one in (("branch", branch), ("loop", loop))},
    )


def test_a_branch_or_a_loop_waits_for_the_batch(tmp_path: Path) -> None:
    """The run that finds the end of the input counts nothing, wherever a metric counts."""
    train(model_of(batches, counting), 1, 1, 60, model_dir=str(tmp_path), max_steps=5)
    found = summary(tmp_path)["eval"]
    assert (found["branch"], found["loop"]) == (BATCHES, BATCHES)


def on_both(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a variable on each of two PS."""
    first, second = (tf.get_variable(name, [], initializer=tf.zeros_initializer()) for name in ("first", "second"))
    return tfps.ModelSpec(
        loss=(first + second) * tf.reduce_sum(features["x"]), optimizer=tf.train.GradientDescentOptimizer(1.0)
    )


def started(input_fn: Any, mode: str = "async") -> list[str]:
    """Return the tasks whose part of a run has started before worker 1 reads a batch."""
    cluster = Cluster(("a:1", "b:1"), ("c:1", "d:1"))
    built = builder.training(JobConfig(mode=mode), cluster, Task("worker", 1), model_of(input_fn, on_both))
    read = inputs.next_of(built.iterator)
    assert not [op for op in read.control_inputs if op.inputs or op.control_inputs], "it waits for more than the start"
    return sorted(placement.task_of(op) for op in read.control_inputs)


def of_ones(change: Any) -> Any:
    """Return an ``input_fn`` of a changed dataset of seven batches of ones."""
    return lambda mode, *_: None if mode == "eval" else change(dataset_of([1.0] * 7).batch(1))


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
def test_a_batch_of_an_input_that_may_end_is_read_when_each_ps_has_started(mode: str) -> None:
    """TensorFlow does not cancel a part that it sends when the worker's has failed: the run would never end."""
    assert started(of_ones(lambda data: data), mode) == ["ps/0", "ps/1"]


def same(*parts: Any) -> Any:
    """Return an element as it is."""
    return parts


@pytest.mark.parametrize(
    ("change", "may_end"),
    [
        (lambda data: data.repeat(), False),
        (lambda data: data.shuffle(3).repeat().map(same).shuffle(3).prefetch(2), False),
        (lambda data: data.unbatch().repeat().batch(2, drop_remainder=True).map(same, 2), False),
        (lambda data: data.repeat().with_options(tf.data.Options()), False),
        (lambda data: data.repeat(3), True),
        (lambda data: data.repeat().take(70), True),
        (lambda data: data.repeat().filter(lambda features, _: tf.reduce_all(features["x"] < 2.0)), True),
        (lambda data: data.repeat(2).repeat().take(9).shuffle(3), True),
        (lambda data: data.filter(lambda *_: tf.random.uniform([]) < 0.9).repeat(), True),
    ],
)
def test_only_an_input_that_may_end_waits(change: Any, may_end: bool) -> None:
    """The message costs a short step some percent of its time."""
    with tf.Graph().as_default():
        data = change(dataset_of([1.0] * 7).batch(1))
        batches, iterator = inputs._batches(data), CancelSafeIterator(data)
        iterator.get_next()
        assert inputs._may_end(inputs.next_of(iterator), batches) == may_end


UNKNOWN, INFINITE = -2, -1


def numbers(count: int = 20) -> Any:
    """Return a dataset of numbers."""
    return tf.data.Dataset.range(count)


def draws() -> Any:
    """Return an endless dataset of random numbers."""
    return tf.data.Dataset.random(1)


def is_drawn(_: Any) -> Any:
    """Be true for about half of the elements, others in each epoch."""
    return tf.random.uniform([], seed=1) < 0.5


def is_even(number: Any) -> Any:
    """Be true for the same elements in each epoch."""
    return tf.equal(number % 2, 0)


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (numbers, 20),
        (lambda: numbers().repeat(), INFINITE),
        (lambda: numbers().filter(is_even).shuffle(9).repeat(), INFINITE),
        (lambda: numbers().shuffle(9).filter(is_even).batch(2).repeat(), INFINITE),
        (lambda: numbers().shuffle(9).interleave(tf.data.Dataset.range).repeat(), INFINITE),
        (lambda: numbers().filter(is_even).map(is_drawn).repeat(), INFINITE),
        (lambda: numbers().repeat().filter(is_even), UNKNOWN),
        (lambda: numbers().filter(is_drawn).repeat(), UNKNOWN),
        (lambda: numbers().filter(is_drawn).repeat().take(7), UNKNOWN),
        (lambda: numbers().map(is_drawn).filter(lambda drawn: drawn).repeat(), UNKNOWN),
        (lambda: numbers().shuffle(9).take(3).filter(is_even).repeat(), UNKNOWN),
        (lambda: numbers().shuffle(9).batch(2).filter(lambda pair: is_even(pair[0])).repeat(), UNKNOWN),
        (lambda: numbers().shuffle(9).apply(tf.data.experimental.take_while(is_even)).repeat(), UNKNOWN),
        (lambda: numbers().flat_map(lambda _: numbers().filter(is_drawn)).repeat(), UNKNOWN),
        (lambda: tf.data.experimental.RandomDataset(1).take(5).filter(is_even).repeat(), UNKNOWN),
        (lambda: tf.data.Dataset.choose_from_datasets([draws(), draws()], numbers().map(lambda n: n % 2)), UNKNOWN),
        (lambda: tf.data.Dataset.sample_from_datasets([numbers(), draws()], seed=1), UNKNOWN),
        (lambda: tf.data.Dataset.zip((numbers(), draws())), 20),
        (draws, INFINITE),
        (lambda: tf.data.Dataset.from_generator(lambda: iter([1]), tf.int64).repeat().take(7), UNKNOWN),
    ],
)
def test_an_input_that_may_have_an_empty_epoch_may_end(made: Any, size: int) -> None:
    """``repeat()`` ends at an epoch without elements, though TensorFlow calls it infinite."""
    with tf.Graph().as_default(), tf.Session() as session:
        assert session.run(inputs._batches(made())) == size


def test_batches_that_are_not_used_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Should an input end that TensorFlow and the rules above call infinite, batches of the last run may be lost."""
    monkeypatch.setattr(inputs, "_batches", lambda _: tf.constant(INFINITE, tf.int64))
    thirty = model_of(lambda mode, *_: None if mode == "eval" else dataset_of([1.0] * 30).batch(1), adding)
    train(thirty, 1, 1, 60, model_dir=str(tmp_path), max_steps=200, steps_per_run=8)
    values = variables_of(tmp_path)
    assert values["weight"] == values["global_step"] <= 30
    assert sum("ended in a run of 8 steps" in line for line in caplog.messages) == 1


def subsampled(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` that ends at an epoch without elements: after 39 for one worker, never for the others."""
    if mode == "eval":
        return None
    data = numbers(100)
    if context.input_pipeline_id == 1:
        data = numbers().filter(lambda _: tf.random.uniform([], seed=11) < 0.12)
    return data.repeat().map(lambda number: ({"x": tf.cast(number, tf.float32)}, 0.0)).batch(1)


def adding(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose weight counts the updates."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = 0.0 * tf.reduce_sum(features["x"]) - weight
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


@pytest.mark.parametrize("steps", [None, 8])
def test_an_input_that_ends_in_an_empty_epoch_ends_at_the_exact_step(tmp_path: Path, steps: int | None) -> None:
    """No update is made twice for what the worker whose input ended has given back."""
    flags = {"max_steps": 150, "steps_per_run": steps, "runs_in_flight": 1, "model_dir": str(tmp_path)}
    train(model_of(subsampled, adding), 1, 2, 60, **flags)
    found = variables_of(tmp_path)
    assert (found["global_step"], found["weight"]) == (150, 150)


def test_a_variable_may_have_the_name_of_a_number_in_the_input(tmp_path: Path) -> None:
    """``repeat(3)`` makes a constant ``count``, in training only: a model's variable has that name all the same."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = dataset_of([1.0] * 8)
        return data if mode == "eval" else data.repeat(3)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=features["x"] * count, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(input_fn, model_fn), 1, 1, max_steps=5, model_dir=str(tmp_path))
    assert variables_of(tmp_path) == {"count": -5, "global_step": 5}
