"""PyTorch modules: parameters that are trained, and buffers, by their names in ``state_dict``.

Arrays share the memory of parameters and gradients on the CPU. bfloat16, which NumPy lacks, is float32 at the service:
gradients are widened exactly, and a module gets the parameters rounded.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from tfps.client.arrays import Rows
from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError
from tfps.text import one_line, show


class TorchModule:
    """A module.

    Args:
        model: The module.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = dict(_parameters(model))
        self._memory: Mapping[str, Array] = {}

    def values(self) -> Mapping[str, Array]:
        """Return the parameters that require a gradient; one that is used in several places has its first name."""
        return {name: _array(name, one) for name, one in self._trained()}

    def buffers(self) -> Mapping[str, Array]:
        """Return the buffers that ``state_dict`` has."""
        return {name: _array(name, one) for name, one in _buffers(self._model)}

    def memory(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, Array] | None:
        """Return the memory of contiguous tensors on the CPU that have no part of it in common."""
        own, needed = self._own(specs), {name for name, _ in self._trained()}
        found = {name: _memory(one, specs[name]) for name, one in own.items()}
        arrays = {name: array for name, array in found.items() if array is not None}
        if arrays.keys() != specs.keys() or needed - arrays.keys() or _overlap(arrays.values()):
            return None
        _change(own.values())
        self._memory = arrays
        return arrays

    def assign(self, values: Mapping[str, Array]) -> Any:
        """Copy the values into the parameters and buffers, where they are: other tensors may share their memory.

        Raises:
            ServiceError: If the value of a trained one is missing, or one has another shape; none is changed then.
        """
        import torch  # noqa: PLC0415  the model is one of PyTorch

        own = self._own(values)
        for name, _ in self._trained():
            if name not in values:
                raise ServiceError(f"{show(name)} is no parameter of the service.")
        own = {name: one for name, one in own.items() if values[name] is not self._memory.get(name)}
        for name, one in own.items():
            _check_fits(name, values[name], one)
        with torch.no_grad():
            for name, one in own.items():
                value = values[name] if values[name].flags.writeable else values[name].copy()  # or PyTorch warns
                one.copy_(torch.from_numpy(value))
        return self._model

    def gradients(self, given: Any) -> Mapping[str, Array | Rows]:
        """Return the gradients of the parameters that have one: their ``grad``, or those given.

        Args:
            given: ``None``; or tensors by name, as of ``torch.func.grad``; or one for each parameter that is trained,
                or ``None`` for some, as of ``torch.autograd.grad``.

        Raises:
            ServiceError: If there is none, or those given are not one for each.
        """
        own = {name: one.grad for name, one in self._trained()}
        if given is not None and not isinstance(given, Mapping):
            if len(given) != len(own):
                expected = f"expected {len(own)}, one for each parameter that is trained"
                raise ServiceError(f"gradients: {expected}, given {len(given)}.")
            given = dict(zip(own, given, strict=True))
        chosen = own if given is None else given
        found = {name: _gradient(name, gradient) for name, gradient in chosen.items() if gradient is not None}
        if not found:
            raise ServiceError("no parameter has a gradient: call backward before.")
        return found

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, one) for name, one in self._parameters.items() if one.requires_grad)

    def _own(self, names: Collection[str]) -> dict[str, Any]:
        """Return the parameters and buffers of these names, as far as there are some."""
        own = self._parameters
        if any(name not in own for name in names):
            own = own | dict(_buffers(self._model))
        return {name: one for name, one in own.items() if name in names}


def _memory(tensor: Any, spec: TensorSpec) -> Array | None:
    """Return the memory of a tensor on the CPU; ``None`` if it has not the numbers of a value, one after the other."""
    import torch  # noqa: PLC0415

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference():
        return None
    try:
        array: Array = tensor.detach().numpy()
    except (TypeError, RuntimeError):  # on another device, or of a dtype that NumPy lacks
        return None
    is_own = not array.nbytes or _address(array) == tensor.data_ptr()
    return array if is_own and array.flags.c_contiguous and spec.fits(array, spec.is_buffer) else None


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _overlap(arrays: Iterable[Array]) -> bool:
    """Return whether two arrays have some memory in common."""
    places = sorted((_address(one), one.nbytes) for one in arrays if one.nbytes)
    return any(begin + size > after for (begin, size), (after, _) in pairwise(places))


def _change(tensors: Iterable[Any]) -> None:
    """Note that values change, as ``copy_`` does: ``backward`` then refuses gradients that need the old ones."""
    import torch  # noqa: PLC0415

    for one in tensors:
        torch.autograd.graph.increment_version(one)


def _check_fits(name: str, value: Array, own: Any) -> None:
    """Check that a tensor can have a value: floating-point numbers may be rounded, nothing else.

    Raises:
        ServiceError: If it cannot.
    """
    import torch  # noqa: PLC0415

    if torch.nn.parameter.is_lazy(own) or own.is_meta:
        raise ServiceError(f"{show(name)}: the module has no values yet: give it a first batch, or a device.")
    if not _may_change(own):
        raise ServiceError(
            f"{show(name)}: the tensor cannot be changed: it is sparse, expanded, or made for inference."
        )
    if value.shape != tuple(own.shape):
        raise ServiceError(f"{show(name)}: the service has {list(value.shape)}, the module {list(own.shape)}.")
    dtype = _dtype(value.dtype)
    if dtype != own.dtype and not (dtype.is_floating_point and own.dtype.is_floating_point):
        raise ServiceError(f"{show(name)}: the service has {value.dtype.name}, the module {own.dtype}.")


def _may_change(tensor: Any) -> bool:
    """Return whether PyTorch copies dense values into a tensor."""
    import torch  # noqa: PLC0415

    if tensor.layout != torch.strided or (tensor.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return not any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


@cache
def _dtype(of: "np.dtype[Any]") -> Any:
    """Return PyTorch's dtype for one of NumPy."""
    import torch  # noqa: PLC0415

    return torch.from_numpy(np.empty(0, of)).dtype


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a module by name."""
    for name, one in _unwrapped(model).named_parameters():
        yield _own_name(name), one


def _buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers of a module by name; not those that are no part of its state."""
    module = _unwrapped(model)
    saved = module.state_dict()
    for name, one in module.named_buffers():
        if name in saved:
            yield _own_name(name), one


def _own_name(name: str) -> str:
    return name.replace("_orig_mod.", "")  # a part of a module may be compiled


def _unwrapped(model: Any) -> Any:
    """Return a module that is in ``DataParallel``, or is compiled."""
    from torch.nn import parallel  # noqa: PLC0415

    while True:
        if isinstance(model, (parallel.DataParallel, parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile has made it
            model = model._orig_mod
        else:
            return model


def _gradient(name: str, gradient: Any) -> Array | Rows:
    """Return a gradient as an array; a sparse one as the rows that it has, each once."""
    import torch  # noqa: PLC0415

    if not isinstance(gradient, torch.Tensor) or gradient.layout == torch.strided:
        return _array(name, gradient)
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        return _array(name, gradient.to_dense())
    rows = gradient.coalesce()
    return Rows(_array(name, rows.indices()[0]), _array(name, rows.values()))


def _array(name: str, tensor: Any) -> Array:
    import torch  # noqa: PLC0415

    try:
        own = (tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)).detach()
        array: Array = (own.float() if own.dtype == torch.bfloat16 else own).numpy(force=True)
    except (TypeError, ValueError, RuntimeError) as error:  # such as float8, or a lazy module that has no shape yet
        raise ServiceError(f"{show(name)}: cannot be sent: {one_line(str(error))}") from None
    return array
