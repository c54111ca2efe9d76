"""Variables whose names do not show which trained variable they are: those that a mode makes in another order."""

import contextlib
import re
from collections.abc import Callable, Mapping

import pytest
import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.runtime.graph import variable_names
from tfps.runtime.graph.graph_scope import new_graph
from tfps.runtime.graph.placement import VARIABLES
from tfps.tf_types import Operation


def one(name: str | None = None) -> tf.Variable:
    """Make a variable."""
    return tf.Variable(1.0, name=name)


def two(name: str | None = None) -> tf.Variable:
    """Make a variable at another line."""
    return tf.Variable(2.0, name=name)


def in_turn(is_training: bool) -> None:
    """Make two variables without names in the order of the mode."""
    if is_training:
        one()
        two()
    else:
        two()
        one()


def named(is_training: bool) -> None:
    """Make two variables with names of their own in the order of the mode."""
    for make in (one, two) if is_training else (two, one):
        make(make.__name__)


def in_a_loop(is_training: bool) -> None:
    """Make variables without names at one line; training makes one more."""
    for _ in range(3 if is_training else 2):
        one()


def by_a_helper(is_training: bool) -> None:
    """Make variables at one line of a helper, which does not show which is which."""
    if is_training:
        one()
    one()
    if not is_training:
        one()


def numbered_by_hand(is_training: bool) -> None:
    """Make variables and layers whose own names have numbers in the order of the mode."""
    order = (1, 2) if is_training else (2, 1)
    with tf.variable_scope(f"tower_{order[0]}"):
        tf.get_variable("weight", [])
    with tf.variable_scope(f"tower_{order[1]}"):
        tf.get_variable("weight", [])
    tf.keras.layers.Dense(2, name=f"head_{order[0]}")(tf.zeros([1, 2]))
    tf.keras.layers.Dense(2, name=f"head_{order[1]}")(tf.zeros([1, 2]))


def at_other_lines(is_training: bool) -> None:
    """Make variables without names in one order, at lines of which one makes another variable in training."""
    if is_training:
        one()
    two()
    if not is_training:
        tf.Variable(3.0)


def averaged(is_training: bool) -> None:
    """Make variables at one line in another scope, as for the averages of weights."""
    with tf.variable_scope("model" if is_training else "average"):
        one("weight")
    with tf.variable_scope("average" if is_training else "model"):
        one("weight")


def layers(is_training: bool) -> None:
    """Make two layers in the order of the mode, and call them in one order."""
    makers: list[Callable[[], tf.keras.layers.Dense]] = [lambda: tf.keras.layers.Dense(2) for _ in "12"]
    made = [make() for make in makers]
    first, second = made if is_training else made[::-1]
    first(tf.zeros([1, 2]))
    second(tf.zeros([1, 2]))


def variables(make: Callable[[bool], None], is_training: bool) -> Mapping[str, Operation]:
    """Return the variables of a new graph, which TensorFlow and Keras number from the start, by name."""
    with new_graph(JobConfig()) as graph:
        make(is_training)
    return {op.name: op for op in graph.get_operations() if op.type in VARIABLES}


OTHERS = (named, in_a_loop, by_a_helper, numbered_by_hand, at_other_lines, averaged)


@pytest.mark.parametrize(("make", "found"), [(in_turn, 2), (layers, 2), *((make, 0) for make in OTHERS)])
def test_variables_that_a_mode_makes_in_another_order_are_found(make: Callable[[bool], None], found: int) -> None:
    """The line that makes a variable, or calls its layer, makes one with another number in training."""
    trained, evaluated = variables(make, True), variables(make, False)
    problems = variable_names.swapped(evaluated, trained, "eval")
    assert len(problems) == found
    for op, text in problems:
        assert text.startswith(f"mode='eval' makes the variable {op.name!r} where mode='train' makes ")
    assert variable_names.swapped(variables(make, True), trained, "eval") == []


def test_the_names_that_keras_gives_to_layers_are_known() -> None:
    """Each layer class of Keras that can be made with a number or without arguments, such as Conv2D and LeakyReLU."""
    named: dict[str, str] = {}
    with new_graph(JobConfig()):
        for kind in (kind for kind in vars(tf.keras.layers).values() if isinstance(kind, type)):
            for args in ((), (2,), (2, 2)):
                with contextlib.suppress(Exception):  # the layer needs other arguments
                    named[kind.__name__] = re.sub("(_[0-9]+)+$", "", kind(*args).name)
    unknown = {kind: name for kind, name in named.items() if name not in variable_names._kinds_of_layers()}
    assert not unknown
    assert {"Conv2D", "LeakyReLU", "GlobalMaxPooling1D", "Dense"} <= named.keys()
