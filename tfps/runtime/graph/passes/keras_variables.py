"""What Keras knows of its variables and TensorFlow does not: which are frozen, and which have a constraint.

A Keras layer may be frozen, before or after it is built. Its variables are trainable for TensorFlow all the same. Keras
keeps no list of them, so this module notes each one as it is created, from the stack of calls.
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

Noted = list[tuple[Any, Variable]]
"""Pairs of Keras's variable, and TensorFlow's variable in it."""


@contextlib.contextmanager
def noted() -> Iterator[Noted]:
    """Note the variables that Keras creates in the context."""
    found: Noted = []

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        made = next_creator(**kwargs)
        if (owner := _owner()) is not None:
            found.append((owner, made))
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
    frozen = {made.ref() for owner, made in found if not owner.trainable}
    trained = graph.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    trained[:] = [variable for variable in trained if variable.ref() not in frozen]
    _check_constraints(model, [(owner, made) for owner, made in found if made.ref() not in frozen])


def _check_constraints(model: Model, trained: Sequence[tuple[Any, Variable]]) -> None:
    for owner, made in trained:
        if owner.constraint is not None:
            place = where(model, made.op.traceback or []) or model.line_of("model_fn")
            raise ModelError(
                f"--model={model.name}: {place}: the Keras variable {made.op.name!r} has a constraint, which would be "
                "ignored: leave it out, and add kernel.assign(constraint(kernel.value)) to tf.GraphKeys.UPDATE_OPS."
            )


def _owner() -> Any:
    """Return the variable of Keras that is being created, if Keras has made the innermost call that is Keras's."""
    frame = inspect.currentframe()
    while frame is not None and _KERAS not in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals.get("self")
    return owner if all(hasattr(owner, name) for name in ("trainable", "constraint")) else None
