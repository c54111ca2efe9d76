"""Claims about the updates that the chief repeats: nothing of one happens before its gradients have arrived."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import cluster_of, dataset_of, model_of, train, variables_of

import tfps
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.runtime.graph import builder
from tfps.runtime.graph.passes.unrolling import copy_number
from tfps.runtime.graph.placement import ancestors

pytestmark = pytest.mark.slow

STEPS = 20


def loop(counter: Any) -> Any:
    """Add 1 in a loop."""

    def turn(index: Any) -> Any:
        with tf.control_dependencies([counter.assign_add(1.0)]):
            return index + 1

    return tf.while_loop(lambda index: index < 1, turn, [tf.constant(0)])


def branch(counter: Any) -> Any:
    """Add 1 in a branch."""
    return tf.cond(tf.random.uniform([]) < 2.0, lambda: counter.assign_add(1.0), lambda: counter.assign_add(0.0))


def branch_in_loop(counter: Any) -> Any:
    """Add 1 in a branch in a loop."""

    def turn(index: Any) -> Any:
        with tf.control_dependencies([branch(counter)]):
            return index + 1

    return tf.while_loop(lambda index: index < 1, turn, [tf.constant(0)])


def loop_in_branch(counter: Any) -> Any:
    """Add 1 in a loop in a branch."""
    return tf.cond(tf.random.uniform([]) < 2.0, lambda: loop(counter), lambda: tf.constant(0))


def loop_in_loop(counter: Any) -> Any:
    """Add 1 in a loop in a loop."""

    def turn(index: Any) -> Any:
        with tf.control_dependencies([loop(counter)]):
            return index + 1

    return tf.while_loop(lambda index: index < 1, turn, [tf.constant(0)])


def branch_in_branch(counter: Any) -> Any:
    """Add 1 in a branch in a branch."""
    return tf.cond(tf.random.uniform([]) < 2.0, lambda: branch(counter), lambda: tf.constant(0.0))


KINDS = (loop, branch, branch_in_loop, loop_in_branch, loop_in_loop, branch_in_branch)


class _Counting(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Counts its updates in branches and loops that do not depend on a gradient."""

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients, and count."""
        zeros = tf.zeros_initializer()
        counters = [tf.get_variable(kind.__name__, [], initializer=zeros, trainable=False) for kind in KINDS]
        counted = [kind(counter) for kind, counter in zip(KINDS, counters, strict=True)]
        return tf.group(super().apply_gradients(*args, **kwargs), *counted)


def _ones(mode: str, params: Any, context: Any) -> Any:
    return None if mode == "eval" else dataset_of([1.0]).repeat().batch(1)


def _model(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    other = tf.get_variable("other", [2], initializer=tf.zeros_initializer())
    loss = weight * tf.reduce_mean(features["x"]) + tf.reduce_sum(other)
    return tfps.ModelSpec(loss=loss, optimizer=_Counting(-1.0))


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_branch_or_a_loop_of_the_optimizer_runs_once_per_update(tmp_path: Path, num_ps: int) -> None:
    """It waits for the gradients of its update, also when nothing in it uses one; a resume starts from the same."""
    for steps in (STEPS, 2 * STEPS):
        train(model_of(_ones, _model), num_ps, 2, 60, mode="sync", model_dir=str(tmp_path), max_steps=steps)
        found = variables_of(tmp_path)
        assert {kind.__name__: found[kind.__name__] for kind in KINDS} == {kind.__name__: steps for kind in KINDS}
        assert found["weight"] == steps


def _rate_of_local_variable() -> tuple[Any, Any]:
    """Return a count of this worker's steps in a variable of its own, and a rate that reads it."""
    zeros = tf.zeros_initializer()
    count = tf.get_variable("count", [], initializer=zeros, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    return count.assign_add(1.0), count.read_value


def _rate_of_python() -> tuple[Any, Any]:
    """Return a count of this worker's steps in Python, and a rate that reads it."""
    count = itertools.count(1)
    last = [0]
    counted = tf.py_func(lambda: last.__setitem__(0, next(count)), [], [])
    return counted, tf.py_func(lambda: np.float32(last[0]), [], tf.float32)


@pytest.mark.parametrize("made", [_rate_of_local_variable, _rate_of_python])
@pytest.mark.parametrize("flags", [{}, {"steps_per_run": 8}, {"steps_per_run": 1, "wire": "plain"}])
def test_an_optimizer_that_uses_state_of_the_worker_finds_that_of_the_step(
    tmp_path: Path, made: Any, flags: dict[str, Any]
) -> None:
    """An update reads what the chief's step has left, and that step has to be the one whose gradients it applies."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weights = [tf.get_variable(f"w{i}", [], initializer=tf.zeros_initializer()) for i in range(8)]
        counted, rate = made()
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, counted)
        loss = tf.add_n(weights) * tf.reduce_mean(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))

    train(model_of(_ones, model_fn), 1, 1, 60, mode="sync", model_dir=str(tmp_path), max_steps=STEPS, **flags)
    found = variables_of(tmp_path)
    assert {found[f"w{i}"] for i in range(8)} == {-sum(range(1, STEPS + 1))}


def _of_several(rate: Any) -> int:
    """Return how many updates are in a run, for a rate that a function makes."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = weight * tf.reduce_mean(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate()))

    config = JobConfig(mode="sync")
    built = builder.training(config, cluster_of(1, 1), Task("worker", 0), model_of(_ones, model_fn))
    return max(copy_number(op.name) for op in ancestors([built.updates]))


def _warm_up() -> Any:
    """Return a rate of the step, in a branch that reads the variable."""
    step = tf.train.get_global_step()
    early = lambda: 0.1 * tf.cast(step, tf.float32)  # noqa: E731
    return tf.cond(step < 10, early, lambda: tf.train.exponential_decay(0.1, step, 10, 0.9))


def test_a_rate_in_a_branch_leaves_several_updates_in_a_run() -> None:
    """Only what acts outside TensorFlow in a branch leaves one."""
    told = lambda: tf.py_func(lambda: np.float32(1.0), [], tf.float32)  # noqa: E731
    rates = (lambda: 0.1, _warm_up, told, lambda: tf.cond(tf.random.uniform([]) < 0.5, told, lambda: 0.1))
    assert [_of_several(rate) for rate in rates] == [8, 8, 8, 1]


def test_each_update_has_the_rate_of_its_step(tmp_path: Path) -> None:
    """Also if a branch reads the step: updates of one run keep their order."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        step = tf.train.get_global_step()
        number = lambda: -tf.cast(step, tf.float32)  # noqa: E731
        rate = tf.cond(step < STEPS // 2, number, lambda: 100.0 * number())
        loss = weight * tf.reduce_mean(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))

    train(model_of(_ones, model_fn), 2, 2, 60, mode="sync", model_dir=str(tmp_path), max_steps=STEPS)
    half = range(STEPS // 2)
    assert variables_of(tmp_path)["weight"] == sum(half) + 100 * sum(number + STEPS // 2 for number in half)


class _Telling(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Calls Python in each third update, in a branch."""

    def __init__(self, told: list[float]) -> None:
        super().__init__(1.0)
        self._told = told

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients, count, and tell the count."""
        counter = tf.get_variable("counter", [], initializer=tf.zeros_initializer(), trainable=False)
        count = counter.assign_add(1.0)
        third = tf.equal(tf.floormod(count, 3.0), 0.0)
        told = tf.cond(third, lambda: tf.group(tf.py_func(self._told.append, [count], [])), tf.no_op)
        return tf.group(super().apply_gradients(*args, **kwargs), told)


def test_a_call_of_python_in_a_branch_of_the_optimizer_does_not_stop_the_job(tmp_path: Path) -> None:
    """Where the branch is not taken, the call does not run, and the updates after it still do."""
    told: list[float] = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * tf.reduce_mean(features["x"]), optimizer=_Telling(told))

    train(model_of(_ones, model_fn), 1, 1, 60, mode="sync", model_dir=str(tmp_path), max_steps=STEPS)
    assert variables_of(tmp_path)["weight"] == -STEPS
    assert told == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]


def _falling(changed: bool, is_shown: bool, of_batch: bool = False) -> Any:
    """Return a model whose rate falls with a count: its change, or what it holds after a change in ``UPDATE_OPS``."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        own = tf.get_variable("own", [], initializer=tf.zeros_initializer(), trainable=False)
        counted = own.assign_add(1.0)
        if not changed:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, counted)
        rate = 1.0 / (1.0 + (counted if changed else own.read_value()))
        rate = rate * features["x"][0] if of_batch else rate
        loss = weight * tf.reduce_mean(features["x"])
        shown = {"rate": rate} if is_shown else {}
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate), log_tensors=shown)

    return model_fn


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_a_rate_that_a_step_and_an_update_would_change_is_named(wire: str) -> None:
    """The message names the variable, and what it says to do works; a rate of the batch has its own message."""

    def build(*args: Any) -> Any:
        config = JobConfig(mode="sync", wire=wire)
        return builder.training(config, cluster_of(1, 1), Task("worker", 0), model_of(_ones, _falling(*args)))

    with pytest.raises(ModelError, match="the optimizer needs the change of own, which each step makes because log_te"):
        build(True, True)
    with pytest.raises(ModelError, match="the optimizer needs the batch, perhaps for its learning rate"):
        build(True, True, True)
    build(True, False)
    build(False, True)
