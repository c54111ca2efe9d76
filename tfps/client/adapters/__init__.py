"""Models of other libraries as parameters by name. A library is imported only for a model that is its own."""

import sys
from collections.abc import Collection, Mapping, Sequence
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

    def memory(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return by name the memory of the model that values may be written into; ``assign`` has to follow.

        Args:
            names: What the service has. If the model is trained with more, there is none.
        """

    def assign(self, values: Mapping[str, Array]) -> Any:
        """Give the model the values of some parameters; return the model, or a new one where models do not change.

        Args:
            values: By name. What is in the arrays of ``memory`` is there already.
        """

    def gradients(self, given: Any) -> Mapping[str, Array | Rows]:
        """Return the gradients by name: those given, or the model's own."""


def memory_for(specs: Mapping[str, TensorSpec], adapter: Adapter) -> Mapping[str, Array] | None:
    """Return the memory of a model if all that a service has can arrive there, and ``None`` otherwise.

    Args:
        specs: What the service has.
        adapter: That of the model.
    """
    own = adapter.memory(specs)
    fits = own.keys() == specs.keys() and all(spec.fits(own[name], spec.is_buffer) for name, spec in specs.items())
    return own if fits else None


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
