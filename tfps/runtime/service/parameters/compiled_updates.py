"""Updates that come again and again, as TensorFlow functions: without the Python code of the optimizer in each of them.

An update of the same parameters is made into a function the second time. That takes about as long as a hundred updates.
Clients may push some parameters now and others then, so there are only so many functions. Further updates go without.

Such a function also reads the parameters that it has updated, for whoever pulls next: an operation less for each. A
read takes no copy, unless rows of the parameter were updated: TensorFlow copies it at each read from then on
(``copy_on_read_mode`` in tensorflow/core/framework/resource_var.h), so it is read only when somebody wants it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.client.arrays import Rows
from tfps.client.message import Array
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
        self._functions: dict[object, _Function] = {}
        self._seen: set[object] = set()
        self._copied: set[int] = set()  # the ids of variables that TensorFlow copies at each read

    def is_copied(self, variable: Variable) -> bool:
        """Return whether a read of a variable copies it, because rows of it were updated."""
        return id(variable) in self._copied

    def apply(self, pairs: Sequence[Pair]) -> Mapping[int, Any]:
        """Apply gradients. Not by two threads at the same time.

        Returns:
            By index of a pair, the new value of its variable, where the update has read it.
        """
        self._copied |= {id(variable) for gradient, variable in pairs if isinstance(gradient, Rows)}
        key = tuple((id(one), isinstance(gradient, Rows), self.is_copied(one)) for gradient, one in pairs)
        known = self._functions.get(key)
        if known is None and key in self._seen and len(self._functions) < _MOST:
            known = self._functions[key] = self._made(pairs)
        if known is None:
            if len(self._seen) < _MOST_SEEN:
                self._seen.add(key)
            self._optimizer.apply_gradients([(_tensor(gradient, variable), variable) for gradient, variable in pairs])
            return {}
        given = [part for gradient, _ in pairs for part in _parts(gradient)]
        # The call itself, without what ``function(*given)`` does in Python. TensorFlow uses the arrays' own memory.
        values = tf.raw_ops.StatefulPartitionedCall(args=[*given, *known.captured], Tout=known.dtypes, f=known.function)
        return dict(zip(known.read, values or (), strict=True))

    def _made(self, pairs: Sequence[Pair]) -> "_Function":
        """Return a function of the parts of all gradients, in their order."""
        variables = [variable for _, variable in pairs]
        are_rows = [isinstance(gradient, Rows) for gradient, _ in pairs]
        read = [index for index, variable in enumerate(variables) if not self.is_copied(variable)]

        def update(*parts: Any) -> list[Any]:
            left = iter(parts)
            gradients = [
                _slices(next(left), next(left), variable) if is_rows else next(left)
                for is_rows, variable in zip(are_rows, variables, strict=True)
            ]
            with tf.device("CPU:0"):
                self._optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
                return [read_value(variables[index]) for index in read]

        announced = [
            spec for (_, variable), rows in zip(pairs, are_rows, strict=True) for spec in _specs(variable, rows)
        ]
        made = tf.function(update, autograph=False, input_signature=announced).get_concrete_function()
        return _Function(made, tuple(made.captured_inputs), read, [variables[index].dtype for index in read])


@dataclass(frozen=True)
class _Function:
    """A TensorFlow function that makes an update.

    Attributes:
        function: The function, of the parts of the gradients and of what it has captured.
        captured: What it has captured: variables and numbers.
        read: The indices of the variables whose new values it returns.
        dtypes: The dtypes of these.
    """

    function: Any
    captured: Sequence[Any]
    read: Sequence[int]
    dtypes: Sequence[Any]


def read_value(variable: Variable) -> Any:
    """Return a variable's value, without a copy; its own ``read_value`` takes one operation more."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


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
