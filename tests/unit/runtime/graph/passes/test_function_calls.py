"""Claims about functions that a model calls: their changes come after what their arguments wait for."""

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import model_of, ones, train, variables_of
from tensorflow.python.ops import cond_v2, while_v2

import tfps

pytestmark = pytest.mark.slow

STEPS = 96


def doubling_and_halving(constant: bool) -> Any:
    """Return a model that doubles a variable and then halves it in a function, whose argument alone gives that order.

    The function returns 1, which is the gradient, so the weight counts the steps in which the order was kept.
    """

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        state = tf.get_variable("state", [], initializer=tf.ones_initializer(), trainable=False)
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())

        @tf2.function(autograph=False)
        def halve(x: Any) -> Any:
            return x + state.assign(state * 0.5)

        with tf.control_dependencies([state.assign_add(1.0)]):
            made = halve(tf.zeros([]) if constant else features["x"] * 0.0)
        optimizer = tfps.make_optimizer(params, "sgd", learning_rate=1.0)
        loss = -weight * tf.stop_gradient(made)
        return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=optimizer)

    return model_fn


def halving_in_a_branch(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be the same model with an ``If`` in place of a function; in it, all is in order."""
    state = tf.get_variable("state", [], initializer=tf.ones_initializer(), trainable=False)
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    with tf.control_dependencies([state.assign_add(1.0)]):
        zero = tf.identity(features["x"] * 0.0)

    def halve() -> Any:
        with tf.control_dependencies([state.assign(state * 0.5)]):
            return zero + state.read_value()

    made = cond_v2.cond_v2(zero < 1.0, halve, lambda: zero - 7.0)
    optimizer = tfps.make_optimizer(params, "sgd", learning_rate=1.0)
    loss = -weight * tf.stop_gradient(made)
    return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=optimizer)


@pytest.mark.parametrize("flags", [{"steps_per_run": 8}, {}])
def test_a_branch_comes_after_what_its_input_waits_for(tmp_path: Path, flags: dict[str, Any]) -> None:
    """An ``If`` that changes a variable is not copied: control edges do not reach all of it."""
    train(model_of(ones, halving_in_a_branch), 1, 1, max_steps=STEPS, model_dir=str(tmp_path), **flags)
    saved = variables_of(tmp_path)
    assert (saved["weight"], saved["state"]) == (STEPS, 1.0)


@pytest.mark.parametrize(
    ("constant", "num_ps", "flags"),
    [
        (True, 1, {"steps_per_run": 8}),
        (False, 2, {"steps_per_run": 8}),
        (True, 1, {"steps_per_run": 8, "wire": "plain"}),
        (False, 2, {"steps_per_run": 1}),
    ],
)
def test_a_function_comes_after_what_its_argument_waits_for(
    tmp_path: Path, constant: bool, num_ps: int, flags: dict[str, Any]
) -> None:
    """Also where TensorFlow puts the function's body in the place of the call, as it does in runs of several steps."""
    model = model_of(ones, doubling_and_halving(constant))
    train(model, num_ps, 1, max_steps=STEPS, model_dir=str(tmp_path), **flags)
    saved = variables_of(tmp_path)
    assert (saved["weight"], saved["state"]) == (STEPS, 1.0)


def summing_in_loops(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a loop in its loss, whose gradient is 3, and one that counts to 2, both ``While`` operations."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    count = tf.get_variable("turns", [], initializer=tf.zeros_initializer(), trainable=False)

    def counted(index: Any) -> Any:
        with tf.control_dependencies([count.assign_add(features["x"])]):
            return index + 1

    _, total = while_v2.while_loop(
        lambda index, _: index < 3,
        lambda index, total: (index + 1, total + weight * tf.cast(index, tf.float32)),
        [0, 0.0],
    )
    end = while_v2.while_loop(lambda index: index < 2, counted, [0])
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, end)
    return tfps.ModelSpec(loss=total * features["x"], optimizer=tf.train.GradientDescentOptimizer(1.0))


@pytest.mark.parametrize("flags", [{"steps_per_run": 8}, {"wire": "plain", "steps_per_run": 1, "runs_in_flight": 1}])
def test_a_loop_has_a_gradient(tmp_path: Path, flags: dict[str, Any]) -> None:
    """It adds inputs to the loop, which already has control inputs."""
    train(model_of(ones, summing_in_loops), 1, 1, model_dir=str(tmp_path), max_steps=STEPS, **flags)
    found = variables_of(tmp_path)
    assert (found["weight"], found["turns"]) == (-3 * STEPS, 2 * STEPS)
