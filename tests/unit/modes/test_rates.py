"""Claims about what an update reads and does not change, such as a learning rate in a variable."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import model_of, ones, session_config, shared_servers, target_of, train, variables_of

import tfps
from tfps.cluster.spec import Task
from tfps.modes.updates import atomic_update, update_ops
from tfps.modes.updates.moments import Moments

pytestmark = pytest.mark.slow

STEPS = 3
WORKER = "/job:worker/task:0"
PS = ("/job:ps/task:0", "/job:ps/task:1")


class _Crossing(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Adds to each of two variables what the worker computes from the other's old value."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        (one, first), (other, second) = grads_and_vars
        old = [second.read_value(), first.read_value()]
        with tf.device(WORKER):
            added = [one + 2 * old[0], other - 3 * old[1]]
        with tf.control_dependencies(old):
            return tf.group(*(var.assign_add(add) for var, add in zip((first, second), added, strict=True)))


def _decayed(_rate: Any) -> Any:
    step = tf.train.get_global_step()
    return tf.train.AdamOptimizer(lambda: tf.train.exponential_decay(0.5, step, 1, 0.5))


def _by_step(rate: Any) -> Any:
    """Return Adam with a rate that its update reads, and that depends on the step as well."""
    step = tf.train.get_global_step()
    return tf.train.AdamOptimizer(lambda: rate / (1.0 + tf.cast(step.read_value(), tf.float32)))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": tf.train.AdamOptimizer,
    "adam, decayed": _decayed,
    "adam, by step": _by_step,
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, rate),
    "rmsprop": lambda rate: tf.train.RMSPropOptimizer(rate, centered=True),
    "adagrad": tf.train.AdagradOptimizer,
    "crossing": _Crossing,
}


def _values(make: Any, places: Sequence[str], rate_place: str, apply: Any) -> dict[str, Any]:
    """Return the variables after some steps whose gradients are the variables' old values and 1."""
    with tf.Graph().as_default() as graph:
        weights = []
        for index, place in enumerate(places):
            with tf.device(place):
                weights.append(tf.get_variable(f"weight{index}", [2], initializer=tf.ones_initializer()))
        with tf.device(rate_place):
            rate = tf.get_variable("rate", [], initializer=tf.constant_initializer(0.1), trainable=False)
            step = tf.train.get_or_create_global_step()
        pairs = [(weight.read_value() + 1.0, weight) for weight in weights]
        done, reset = apply(make(rate), pairs, step)
        assert not _has_cycle(graph)
        variables = {one.op.name: one for one in tf.global_variables() if not one.op.name.startswith("tfps/")}
        init = tf.group(tf.global_variables_initializer(), *reset)
        config = session_config("/job:ps", WORKER)
        with tf.Session(target_of(Task("worker", 0)), graph=graph, config=config) as session:
            session.run(init)
            for _ in range(STEPS):
                session.run(done)
            found: dict[str, Any] = session.run(variables)
            return found


def _has_cycle(graph: Any) -> bool:
    """Return whether operations of a graph without loops wait for each other."""
    left = {op: {tensor.op for tensor in op.inputs} | set(op.control_inputs) for op in graph.get_operations()}
    while ready := [op for op, before in left.items() if left.keys().isdisjoint(before)]:
        for op in ready:
            del left[op]
    return bool(left)


def _plainly(optimizer: Any, pairs: Any, step: Any) -> Any:
    with tf.control_dependencies([gradient for gradient, _ in pairs]):
        updated = optimizer.apply_gradients(pairs)
    with tf.control_dependencies([updated]):
        return step.assign_add(1, read_value=False), []


def _atomically(optimizer: Any, pairs: Any, step: Any) -> Any:
    moments, apply = Moments(2, 1), optimizer.apply_gradients
    with mock.patch.object(optimizer, "apply_gradients", lambda pairs, _step: apply(pairs)):
        update = atomic_update.apply(optimizer, pairs, step, moments, 0)
    return [update.counted, *update.others], [moments.reset([0])]


@pytest.mark.parametrize("rate_place", PS)
@pytest.mark.parametrize("places", [PS, PS[::-1]])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_ps_waits_for_another_in_a_cycle(name: str, places: Sequence[str], rate_place: str) -> None:
    """An update on two PS ends, with the values of one machine, wherever the learning rate and the powers are."""
    with shared_servers():
        found = _values(OPTIMIZERS[name], places, rate_place, _atomically)
        expected = _values(OPTIMIZERS[name], [WORKER] * 2, WORKER, _plainly)
    assert found.keys() == expected.keys()
    for variable, value in expected.items():
        np.testing.assert_array_equal(found[variable], value, variable)
    assert found["global_step"] == STEPS


@pytest.mark.parametrize("first", [0, 1])
def test_a_job_with_a_learning_rate_in_a_variable_ends(tmp_path: Path, first: int) -> None:
    """Several steps in one run, of two workers: the powers of beta are those of all updates."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        shapes = [[10, 4], [4, 4], [4, 4]][first:]
        weights = [tf.get_variable(f"w{index}", shape) for index, shape in enumerate(shapes)]
        loss = tf.add_n([tf.reduce_sum(weight) for weight in weights]) * tf.reduce_mean(features["x"])
        rate = tf.get_variable("rate", [], initializer=tf.constant_initializer(0.1), trainable=False)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.AdamOptimizer(rate, 0.5, 0.5))

    train(model_of(ones, model_fn), 2, 2, 60, model_dir=str(tmp_path), max_steps=40)
    found = variables_of(tmp_path)
    powers = [value for name, value in found.items() if "_power" in name]
    assert (found["global_step"], powers) == (40, [np.float32(0.5**41)] * 2)


def test_only_changes_wait_for_the_gradients() -> None:
    """A rate that is read in a branch or a table does not. One that the model changes in a branch or a loop does."""
    with tf.Graph().as_default(), tf.device(PS[0]):
        step = tf.train.get_or_create_global_step()
        weight, rate = (tf.get_variable(name, [], trainable=name == "weight") for name in ("weight", "rate"))
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, -1, -2)
        warm = tf.cond(step < 10, lambda: rate.read_value() * 0.1, rate.read_value)
        assigned: list[Any] = []

        def change(value: Any) -> Any:
            assigned.append(rate.assign(value, read_value=False))
            with tf.control_dependencies(assigned[-1:]):
                return tf.identity(value) + 1.0

        branch = tf.cond(step < 10, lambda: change(1.0), lambda: 1.0)
        loop = tf.while_loop(lambda value: value < 2.0, change, [0.0])
        gradient = tf.placeholder(tf.float32, [])
        reads = warm + table.lookup(step)
        optimizer = tf.train.GradientDescentOptimizer(reads + branch + loop)
        atomic_update.apply(optimizer, [(gradient, weight)], step, Moments(1, 1), 0)
        assert gradient.op not in update_ops.ancestors([reads.op])
        assert [gradient.op in update_ops.ancestors([op]) for op in assigned] == [True, True]
