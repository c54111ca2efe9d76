"""No NaN or Inf reaches a parameter server: a step whose loss or gradient holds one fails before any of it is applied.

A worker checks what a step has computed, all of it, before it sends any of it. ``CheckNumerics``
(tensorflow/core/kernels/check_numerics_op.cc) fails the run, nothing of that step was applied, and ``complaint`` tells
from the error what was found, and in which step of a run of several.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.unroll import copy_number

_TOLD = re.compile(r"tfps: ([^\n]*?) : Tensor had (NaN|Inf|Inf and NaN) values\s+\[\[\{\{node ([^}]*)\}")


class Finite(tf.train.Optimizer):  # type: ignore[misc]
    """A ``tf.compat.v1.train.Optimizer`` that applies what another one does, if the loss and all gradients are finite.

    Args:
        optimizer: The other one.
        name_of: From a variable to its name for people.
        room: How many times as large as they are gradients have to be finite: they may be summed, or rounded.
        sent: Tensors that are looked at elsewhere, and have to be finite before anything is applied.
        first: From gradients and the variables that they change, what else has to run before anything is applied.

    Attributes:
        updated: The model's variables that it updates, once gradients have been computed.
    """

    def __init__(
        self,
        optimizer: Any,
        name_of: Callable[[Any], str],
        room: float = 1.0,
        sent: Sequence[Any] = (),
        first: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] = lambda _gradients, _variables: (),
    ) -> None:
        super().__init__(optimizer._use_locking, optimizer.get_name())
        self._optimizer, self._name_of, self._room, self._sent, self._first = optimizer, name_of, room, sent, first
        self.updated: Sequence[Any] = ()
        self._without: Sequence[tuple[Any, Any]] = ()

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of gradient and variable, none of which can be had before all of them are checked."""
        found = self._optimizer.compute_gradients(loss, *args, **kwargs)
        pairs = [pair for pair in found if pair[0] is not None]
        self._without = [pair for pair in found if pair[0] is None]
        self.updated = getattr(self._optimizer, "updated", [variable for _, variable in pairs])
        named = [(_numbers(gradient), f"the gradient of {self._name_of(variable)}") for gradient, variable in pairs]
        named = [(numbers, name) for numbers, name in named if numbers.dtype.is_floating]
        with tf.name_scope("tfps/finite/"):
            before = [*self._sent, *self._first([gradient for gradient, _ in pairs], self.updated)]
            if named:
                loss_first = tf.check_numerics(loss, "tfps: the loss")  # told rather than what follows from it
                with tf.control_dependencies([loss_first]):
                    before += [loss_first, _checked(named, self._room)]
            with tf.control_dependencies(before):
                return [(_same(gradient), variable) for gradient, variable in pairs]

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply them as the other optimizer does, which also gets the variables that have no gradient."""
        return self._optimizer.apply_gradients([*grads_and_vars, *self._without], global_step, name)


def _checked(named: Sequence[tuple[Any, str]], room: float) -> Any:
    """Return a tensor that can be had if some tensors are finite.

    Their squares are summed, which is quick; only where the sum is not finite, which large numbers do as well, each
    number is looked at.
    """
    squares = tf.add_n([tf.cast(tf.nn.l2_loss(numbers), tf.float32) for numbers, _ in named])

    def exactly() -> Any:
        checks = [tf.check_numerics(_with_room(numbers, room), f"tfps: {name}") for numbers, name in named]
        with tf.control_dependencies(checks):
            return tf.constant(True)

    return tf.cond(tf.is_finite(squares), lambda: tf.constant(True), exactly)


def _with_room(numbers: Any, room: float) -> Any:
    """Return numbers as large as their sum may be; those of few bits are summed as float32."""
    return numbers * room if room > 1 and numbers.dtype.size > 2 else numbers


def _numbers(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _same(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


@dataclass(frozen=True)
class Complaint:
    """What was not finite, for people, and in which step of its run, from 0."""

    what: str
    index: int


def complaint(error: Any) -> Complaint | None:
    """Return what an error of a run says of numbers that are not finite; ``None`` if it is about something else.

    It may be of any class: what was cancelled for that error is told along with it, and sometimes first.
    """
    told = _TOLD.search(error.message)
    if told is None:
        return None
    what, kind, node = told.groups()
    value = kind.lower().replace("inf and nan", "nan")
    what = f"the loss is {value}" if what == "the loss" else f"{what} holds {kind}"
    return Complaint(what, copy_number(node))
