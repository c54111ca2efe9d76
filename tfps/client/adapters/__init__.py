"""Models of other libraries as parameters by name. A library is imported only for a model that is its own."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfps.client.adapters import keras_model, pytree, torch_module
from tfps.client.message import Array
from tfps.client.rows import Rows
from tfps.errors import ServiceError


class Adapter(Protocol):
    """What a library's models offer."""

    def values(self, model: Any) -> Mapping[str, Array]:
        """Return the parameters by name, without a copy where that is possible."""

    def buffers(self, model: Any) -> Mapping[str, Array]:
        """Return what no optimizer changes, such as the averages of batch norm, by name."""

    def assign(self, model: Any, values: Mapping[str, Array]) -> Any:
        """Give a model the values of some parameters; return the model, or a new one where models do not change."""

    def gradients(self, model: Any, gradients: Any) -> Mapping[str, Array | Rows]:
        """Return the gradients by name: those given, or the model's own."""


def adapter_of(model: Any) -> Adapter:
    """Return the adapter for a model: a Keras 3 model or layer, a PyTorch module, or a pytree of JAX.

    Raises:
        ServiceError: If it is none of these.
    """
    keras = sys.modules.get("keras")
    if keras and isinstance(model, keras.Layer):
        return keras_model  # also where its backend is PyTorch
    torch = sys.modules.get("torch")
    if torch and isinstance(model, torch.nn.Module):
        return torch_module
    if isinstance(model, (Mapping, Sequence)) and not isinstance(model, str):
        return pytree
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise ServiceError(
        f"{kind} is no PyTorch module, Keras 3 model or pytree of JAX: use init, pull and push with arrays."
    )
