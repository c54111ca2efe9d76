"""What Keras knows of its variables and TensorFlow does not: which are frozen, and which have a constraint.

A Keras layer may be frozen, before or after it is built. Its variables are trainable for TensorFlow all the same. Keras
keeps no list of them, so this module notes each one as it is created, from the stack of calls. It has the layers too:
what a frozen layer contains is frozen, also if the layer has made it after it was frozen.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.errors import ModelError
from tfps.models.model import Model, where
from tfps.tf_types import Graph, Variable

_KERAS = "/keras/src/"

Noted = list[tuple[Sequence[Any], Variable]]
"""Pairs of Keras's variable with the layers around it, from the inside out, and TensorFlow's variable in it."""


@contextlib.contextmanager
def noted() -> Iterator[Noted]:
    """Note the variables that Keras creates in the context."""
    found: Noted = []

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        made = next_creator(**kwargs)
        if owners := _owners():
            found.append((owners, made))
        return made

    with tf.variable_creator_scope(create):
        yield found


def freeze(model: Model, graph: Graph, found: Noted) -> None:
    """Take the frozen variables out of those that an optimizer trains.

    Args:
        model: The model.
        graph: Its training graph.
        found: What ``noted`` has noted.

    Raises:
        ModelError: If a variable that is trained has a constraint, which no optimizer would apply.
    """
    frozen = {made.ref() for owners, made in found if not all(owner.trainable for owner in owners)}
    trained = graph.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    trained[:] = [variable for variable in trained if variable.ref() not in frozen]
    _check_constraints(model, [(owners[0], made) for owners, made in found if made.ref() not in frozen])


def _check_constraints(model: Model, trained: Sequence[tuple[Any, Variable]]) -> None:
    for owner, made in trained:
        if owner.constraint is not None:
            place = where(model, made.op.traceback or []) or model.line_of("model_fn")
            raise ModelError(
                f"--model={model.name}: {place}: the Keras variable {made.op.name!r} has a constraint, which would be "
                "ignored: leave it out, and add kernel.assign(constraint(kernel.value)) to tf.GraphKeys.UPDATE_OPS."
            )


def _owners() -> Sequence[Any]:
    """Return the variable of Keras that is being created, and the layers whose calls create it, the innermost first.

    Return nothing unless Keras's variable has made the innermost call that is Keras's.
    """
    frame = inspect.currentframe()
    while frame is not None and _KERAS not in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals.get("self")
    if not _has(owner, "trainable", "constraint"):
        return []
    layers: list[Any] = []
    while frame is not None:
        one = frame.f_locals.get("self")
        if _has(one, "trainable", "add_weight") and not any(one is layer for layer in layers):
            layers.append(one)
        frame = frame.f_back
    return [owner, *layers]


def _has(one: Any, *names: str) -> bool:
    return all(hasattr(one, name) for name in names)
