"""What Keras knows of its variables and TensorFlow does not: which are frozen, and which have a constraint.

A Keras layer may be frozen, before or after it is built. Its variables are trainable for TensorFlow all the same. Keras
trains what the outermost layer lists as its ``trainable_variables``, and has no list of the layers that a model calls.
So this module notes them, and each variable as it is created, from the stack of calls::

    model_fn --> net(x) --> encoder(x) --> dense(x)       net is asked; what encoder alone would list does not matter
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.errors import ModelError
from tfps.models.model import Model, where
from tfps.tf_types import Graph, Operation, Variable

_KERAS = "/keras/src/"
_NAMED = 3  # variables in a message

log = logging.getLogger(__name__)


@dataclass
class Noted:
    """What a model makes with Keras.

    Attributes:
        variables: TensorFlow's variables, each with the objects of Keras around it, the innermost first: Keras's
            variable, and the layers whose methods created it.
        outermost: The layers that the model itself calls.
        layers: These, and those that they call.
    """

    variables: list[tuple[Sequence[Any], Variable]] = field(default_factory=list)
    outermost: list[Any] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)

    def note_calls(self, layers: Sequence[Any]) -> None:
        """Note that each of these layers calls the one before."""
        _add(self.outermost, layers[-1:])
        _add(self.layers, layers)

    def trained(self) -> Sequence[Any]:
        """Return Keras's variables that are to be trained.

        A variable that no outermost layer holds is trained unless itself or its own layer is frozen.
        """
        held = {id(one) for layer in self.outermost for one in layer.variables}
        trained = {id(one) for layer in self.outermost for one in layer.trainable_variables}
        return [
            owners[0]
            for owners, _ in self.variables
            if (id(owners[0]) in trained if id(owners[0]) in held else all(one.trainable for one in owners[:2]))
        ]


_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noted() -> Iterator[Noted]:
    """Note the variables that Keras creates in the context, and the layers that are called."""
    found = Noted()

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        made = next_creator(**kwargs)
        if owners := _owners():
            _watch_calls()
            found.variables.append((owners, made))
            if called := _called():
                found.note_calls(called)
        return made

    token = _noted.set(found)
    try:
        with tf.variable_creator_scope(create):
            yield found
    finally:
        _noted.reset(token)


def freeze(model: Model, graph: Graph, found: Noted) -> Collection[Operation]:
    """Take the frozen variables out of those that an optimizer trains.

    An optimizer may still have a list of variables that the model has made before.

    Args:
        model: The model.
        graph: Its training graph.
        found: What ``noted`` has noted.

    Returns:
        The operations that create the frozen variables.

    Raises:
        ModelError: If a variable that is trained has a constraint, which no optimizer would apply.
    """
    kept = {id(one) for one in found.trained()}
    frozen = {made.op for owners, made in found.variables if id(owners[0]) not in kept}
    trained = graph.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    trained[:] = [variable for variable in trained if variable.op not in frozen]
    _check_constraints(model, [(owners[0], made) for owners, made in found.variables if id(owners[0]) in kept])
    for layer in found.layers:
        inside = [] if layer.trainable else [one for one in layer.variables if id(one) in kept]
        if inside:
            log.warning(
                "the Keras layer %r is frozen, but Keras trains this in it: %s. The layer around it is not frozen, and "
                "neither is that. To freeze all that it holds, set its trainable = False after the model is called.",
                layer.name,
                ", ".join(one.path for one in inside[:_NAMED]) + (", ..." if len(inside) > _NAMED else ""),
            )
    return frozen


def _check_constraints(model: Model, trained: Sequence[tuple[Any, Variable]]) -> None:
    for owner, made in trained:
        if owner.constraint is not None:
            place = where(model, made.op.traceback or []) or model.line_of("model_fn")
            raise ModelError(
                f"--model={model.name}: {place}: the Keras variable {made.op.name!r} has a constraint, which would be "
                "ignored: leave it out, and add kernel.assign(constraint(kernel.value)) to tf.GraphKeys.UPDATE_OPS."
            )


def _watch_calls() -> None:
    """Let calls of Keras's layers be noted from now on; Keras has no hook for that.

    It is loaded when it creates its first variable, and calls that have begun by then are on the stack.
    """
    layer_class: Any = sys.modules["keras"].layers.Layer
    call = layer_class.__call__
    if hasattr(call, "is_noted"):
        return

    @functools.wraps(call)  # AutoGraph goes by the name of the module
    def call_noted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        found = _noted.get()
        if found and not _is_symbolic(args):
            found.note_calls([layer, *_called()])
        return call(layer, *args, **kwargs)

    call_noted.is_noted = True  # type: ignore[attr-defined]
    layer_class.__call__ = call_noted


def _owners() -> Sequence[Any]:
    """Return the variable of Keras that is being created, and the layers whose methods create it, the innermost first.

    Return nothing unless Keras's variable has made the innermost call that is Keras's.
    """
    frames = _frames()
    owner = next((_self(frame) for frame in frames if _KERAS in frame.f_code.co_filename.replace("\\", "/")), None)
    if not _has(owner, "trainable", "constraint"):
        return []
    return [owner, *_layers(frames)]


def _called() -> Sequence[Any]:
    """Return the layers that are being called with values, the innermost first."""
    frames = (frame for frame in _frames() if frame.f_code.co_name == "__call__" and _is_layer(_self(frame)))
    return _layers(frame for frame in frames if not _is_symbolic(frame.f_locals.get("args", ())))


def _is_symbolic(args: Sequence[Any]) -> bool:
    """Return whether a layer is called with Keras's symbols, as where a container builds it: the model calls that."""
    keras: Any = sys.modules["keras"]
    return any(isinstance(arg, keras.KerasTensor) for arg in keras.tree.flatten(args))


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the present calls, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _layers(frames: Iterator[FrameType]) -> Sequence[Any]:
    layers: list[Any] = []
    _add(layers, list(filter(_is_layer, map(_self, frames))))
    return layers


def _self(frame: FrameType) -> Any:
    return frame.f_locals.get("self")


def _is_layer(one: Any) -> bool:
    return _has(one, "trainable", "add_weight")


def _add(to: list[Any], new: Sequence[Any]) -> None:
    """Append what is not there yet; layers may define equality."""
    for one in new:
        if not any(one is other for other in to):
            to.append(one)


def _has(one: Any, *names: str) -> bool:
    return all(hasattr(one, name) for name in names)
