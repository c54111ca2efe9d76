"""Models of other libraries as parameters by name. A library is imported only for a model that is its own."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfps.client.adapters.keras_model import KerasModel
from tfps.client.adapters.pytree import Pytree
from tfps.client.adapters.torch_module import TorchModule
from tfps.client.arrays import Rows
from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError


class Adapter(Protocol):
    """What a library's model offers."""

    def values(self) -> Mapping[str, Array]:
        """Return the parameters by name, without a copy where that is possible."""

    def buffers(self) -> Mapping[str, Array]:
        """Return what no optimizer changes, such as the averages of batch norm, by name."""

    def memory(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, Array] | None:
        """Return by name the memory of the model where values may arrive, before ``assign`` is called with them.

        Args:
            specs: What the service has. If one part of it cannot arrive there, or the model needs more, there is none.
        """

    def assign(self, values: Mapping[str, Array]) -> Any:
        """Give the model the values of some parameters; return the model, or a new one where models do not change.

        Args:
            values: By name. What is in the arrays of ``memory`` is there already.
        """

    def gradients(self, given: Any) -> Mapping[str, Array | Rows]:
        """Return the gradients by name: those given, or the model's own."""


def adapter_of(model: Any) -> Adapter:
    """Return the adapter for a model: a Keras 3 model or layer, a PyTorch module, or a pytree of JAX.

    Raises:
        ServiceError: If it is none of these.
    """
    keras = sys.modules.get("keras")
    if keras and isinstance(model, keras.Layer):
        return KerasModel(model)  # also where its backend is PyTorch
    torch = sys.modules.get("torch")
    if torch and isinstance(model, torch.nn.Module):
        return TorchModule(model)
    if isinstance(model, (Mapping, Sequence)) and not isinstance(model, str):
        return Pytree(model)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise ServiceError(
        f"{kind} is no PyTorch module, Keras 3 model or pytree of JAX: use init, pull and push with arrays."
    )
