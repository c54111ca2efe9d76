"""Keras 3 models and layers, whatever their backend: variables by their ``path``."""

from collections.abc import Mapping
from typing import Any

from tfps.client.arrays import check_fits
from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError
from tfps.text import did_you_mean, show


class KerasModel:
    """A model or a layer.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def values(self) -> Mapping[str, Array]:
        """Return the trainable variables."""
        found = {one.path: _array(one) for one in self._model.trainable_variables}
        if len(found) < len(self._model.trainable_variables):
            raise ServiceError("two variables have the same path: give their layers different names.")
        return found

    def buffers(self) -> Mapping[str, Array]:
        """Return the floating-point variables that are not trained: not the states of random numbers."""
        own = {one.path: _array(one) for one in self._model.non_trainable_variables}
        return {path: array for path, array in own.items() if array.dtype.kind == "f"}

    def memory(self, specs: Mapping[str, TensorSpec]) -> None:
        """Return nothing: backends have their own memory."""
        del specs

    def assign(self, values: Mapping[str, Array]) -> Any:
        """Give the variables the values.

        Raises:
            ServiceError: If a trainable one is no parameter, or has another shape; none is changed then.
        """
        if not self._model.trainable_variables:
            raise ServiceError("the model has no trainable variables yet: build it before.")
        for one in self._model.trainable_variables:
            if one.path not in values:
                raise ServiceError(f"{show(one.path)} is no parameter.{did_you_mean(one.path, values)}")
        known = [one for one in self._model.variables if one.path in values]
        for one in known:
            check_fits(one.path, TensorSpec.of(values[one.path]), TensorSpec.of(_array(one)))
        for one in known:
            one.assign(values[one.path])
        return self._model

    def gradients(self, given: Any) -> Mapping[str, Array]:
        """Return the given gradients, one for each trainable variable in their order, or ``None`` for some.

        Raises:
            ServiceError: If none are given, or as many as there are no variables.
        """
        own = self._model.trainable_variables
        if given is None or len(given) != len(own):
            count = "none" if given is None else str(len(given))
            raise ServiceError(f"gradients: expected {len(own)}, one for each trainable variable, given {count}.")
        found = {one.path: _array(gradient) for one, gradient in zip(own, given, strict=True) if gradient is not None}
        if not found:
            raise ServiceError("gradients: no variable has one.")
        return found


def _array(tensor: Any) -> Array:
    from keras import ops  # noqa: PLC0415  the model is one of Keras

    array: Array = ops.convert_to_numpy(tensor)
    return array
