"""Updates that come again and again, as TensorFlow functions: without the Python code of the optimizer in each of them.

An update of the same parameters is made into a function the second time. That takes about as long as a hundred updates.
Clients may push some parameters now and others then, so there are only so many functions. Further updates go without.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.client.message import Array
from tfps.client.rows import Rows
from tfps.runtime.service.parameters.aggregate import Gradient
from tfps.tf_types import Variable

_MOST = 32  # functions
_MOST_SEEN = 1024  # sets of parameters that were updated once

Pair = tuple[Gradient, Variable]
"""A gradient and its variable."""


class CompiledUpdates:
    """Applies gradients with an optimizer.

    Args:
        optimizer: The optimizer, which has its slots already.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._functions: dict[object, tuple[Any, Sequence[Any]]] = {}
        self._seen: set[object] = set()

    def apply(self, pairs: Sequence[Pair]) -> None:
        """Apply gradients. Not by two threads at the same time."""
        key = tuple((id(variable), isinstance(gradient, Rows)) for gradient, variable in pairs)
        known = self._functions.get(key)
        if known is None and key in self._seen and len(self._functions) < _MOST:
            function = self._made(pairs)
            known = self._functions[key] = function, tuple(function.captured_inputs)
        if known is None:
            if len(self._seen) < _MOST_SEEN:
                self._seen.add(key)
            self._optimizer.apply_gradients([(_tensor(gradient, variable), variable) for gradient, variable in pairs])
        else:
            function, captured = known
            given = [part for gradient, _ in pairs for part in _parts(gradient)]
            # The call itself, without what ``function(*given)`` does in Python. TensorFlow uses the arrays' own memory.
            tf.raw_ops.StatefulPartitionedCall(args=[*given, *captured], Tout=[], f=function)

    def _made(self, pairs: Sequence[Pair]) -> Any:
        """Return a function of the parts of all gradients, in their order."""
        variables = [variable for _, variable in pairs]
        are_rows = [isinstance(gradient, Rows) for gradient, _ in pairs]

        def update(*parts: Any) -> None:
            left = iter(parts)
            gradients = [
                _slices(next(left), next(left), variable) if is_rows else next(left)
                for is_rows, variable in zip(are_rows, variables, strict=True)
            ]
            with tf.device("CPU:0"):
                self._optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        announced = [
            spec for (_, variable), rows in zip(pairs, are_rows, strict=True) for spec in _specs(variable, rows)
        ]
        return tf.function(update, autograph=False, input_signature=announced).get_concrete_function()


def _parts(gradient: Gradient) -> tuple[Array, ...]:
    return (gradient.values, gradient.ids) if isinstance(gradient, Rows) else (gradient,)


def _tensor(gradient: Gradient, variable: Variable) -> Any:
    if isinstance(gradient, Rows):
        return _slices(_shared(gradient.values), _shared(gradient.ids), variable)
    return _shared(gradient)


def _shared(array: Array) -> Any:
    """Return an array as a tensor: with the same memory if TensorFlow can use that; ``tf.constant`` never does."""
    return tf.raw_ops.Identity(input=array)


def _slices(values: Any, ids: Any, variable: Variable) -> Any:
    return tf.IndexedSlices(values, ids, tf.constant(variable.shape.as_list(), tf.int64))


def _specs(variable: Variable, are_rows: bool) -> list[Any]:
    kind = variable.dtype.base_dtype
    if not are_rows:
        return [tf.TensorSpec(variable.shape, kind)]
    return [tf.TensorSpec([None, *variable.shape[1:]], kind), tf.TensorSpec([None], tf.int64)]
