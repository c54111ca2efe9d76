"""Updates that come again and again, as TensorFlow functions: without the Python code of the optimizer in each of them.

An update of the same parameters is made into a function the second time. That takes about as long as a hundred updates.
Clients may push some parameters now and others then, so there are only so many functions. Further updates go without.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.tf_types import Variable

_MOST = 32  # functions
_MOST_SEEN = 1024  # sets of parameters that were updated once

Pair = tuple[Any, Variable]
"""A gradient, which is a tensor or ``tf.IndexedSlices`` with int64 ids, and its variable."""


class CompiledUpdates:
    """Applies gradients with an optimizer.

    Args:
        optimizer: The optimizer, which has its slots already.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._functions: dict[object, Any] = {}
        self._seen: set[object] = set()

    def apply(self, pairs: Sequence[Pair]) -> None:
        """Apply gradients. Not by two threads at the same time."""
        key = tuple((id(variable), isinstance(gradient, tf.IndexedSlices)) for gradient, variable in pairs)
        function = self._functions.get(key)
        if function is None and key in self._seen and len(self._functions) < _MOST:
            function = self._functions[key] = self._made(pairs)
        if function is None:
            if len(self._seen) < _MOST_SEEN:
                self._seen.add(key)
            self._optimizer.apply_gradients(pairs)
        else:
            given = [part for gradient, _ in pairs for part in _parts(gradient)]
            # The call itself, without what ``function(*given)`` does in Python: a fifth of the time.
            tf.raw_ops.StatefulPartitionedCall(args=[*given, *function.captured_inputs], Tout=[], f=function)

    def _made(self, pairs: Sequence[Pair]) -> Any:
        """Return a function of the parts of all gradients, in their order."""
        variables = [variable for _, variable in pairs]
        are_rows = [isinstance(gradient, tf.IndexedSlices) for gradient, _ in pairs]

        def update(*parts: Any) -> None:
            left = iter(parts)
            gradients = [
                _rows(next(left), next(left), variable) if is_rows else next(left)
                for is_rows, variable in zip(are_rows, variables, strict=True)
            ]
            with tf.device("CPU:0"):
                self._optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        announced = [
            spec for (_, variable), rows in zip(pairs, are_rows, strict=True) for spec in _specs(variable, rows)
        ]
        return tf.function(update, autograph=False, input_signature=announced).get_concrete_function()


def _parts(gradient: Any) -> tuple[Any, ...]:
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)


def _rows(values: Any, ids: Any, variable: Variable) -> Any:
    return tf.IndexedSlices(values, ids, tf.constant(variable.shape.as_list(), tf.int64))


def _specs(variable: Variable, are_rows: bool) -> list[Any]:
    kind = variable.dtype.base_dtype
    if not are_rows:
        return [tf.TensorSpec(variable.shape, kind)]
    return [tf.TensorSpec([None, *variable.shape[1:]], kind), tf.TensorSpec([None], tf.int64)]
