"""Claims about the updates that the chief repeats: nothing of one happens before its gradients have arrived."""

from pathlib import Path
from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train, variables_of

import tfps

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
