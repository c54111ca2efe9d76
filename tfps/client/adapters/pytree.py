"""Pytrees of JAX: nested dicts, lists and tuples of arrays, by the paths to them: ``layers/0/kernel``.

Without JAX, the same for NumPy's arrays.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tfps.client.arrays import check_fits
from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError
from tfps.text import show


class Pytree:
    """A tree.

    Args:
        tree: The tree.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def values(self) -> Mapping[str, Array]:
        """Return the arrays by their paths.

        Raises:
            ServiceError: If two arrays have the same path, or something is no array.
        """
        return _named(self._tree)

    def buffers(self) -> NoReturn:
        """Refuse: a tree does not say which arrays an optimizer changes.

        Raises:
            ServiceError: Always.
        """
        raise ServiceError("a pytree has no buffers: give them by name to init and push, as buffers={name: array}.")

    def memory(self, specs: Mapping[str, TensorSpec]) -> None:
        """Return nothing: arrays of JAX do not change."""
        del specs

    def assign(self, values: Mapping[str, Array]) -> Any:
        """Return a tree of the same form with other values: arrays of JAX where the old ones are."""
        return _mapped(self._tree, values, "")

    def gradients(self, given: Any) -> Mapping[str, Array]:
        """Return the gradients, which are a tree of the same form, or this tree itself.

        Raises:
            ServiceError: If there is none.
        """
        found = _named(self._tree if given is None else given)
        if not found:
            raise ServiceError("gradients: the tree has no array.")
        return found


def _named(tree: Any) -> Mapping[str, Array]:
    """Return the arrays by their paths.

    Raises:
        ServiceError: If two arrays have the same path, or something is no array.
    """
    found: dict[str, Array] = {}
    for name, leaf in _leaves(tree, ""):
        if name in found:
            raise ServiceError(f"{show(name)} is the path of two arrays: rename one.")
        found[name] = _array(name, leaf)
    return found


def _array(name: str, leaf: Any) -> Array:
    """Return a leaf as an array; objects of other classes are leaves, too, and are none."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # such as keys of random numbers in JAX
        array: Array = np.asarray(leaf)
        if array.dtype.kind not in "OU":
            return array
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    raise ServiceError(f"{show(name)}: {kind} is no array: a tree has dicts, lists and tuples of arrays.")


def _children(tree: Any) -> Iterator[tuple[str, Any]] | None:
    if isinstance(tree, Mapping):
        return ((str(key), value) for key, value in tree.items())
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return ((str(index), value) for index, value in enumerate(tree))
    return None


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None and tree is not None:
        yield path, tree
    for name, child in children or ():
        yield from _leaves(child, f"{path}/{name}" if path else name)


def _mapped(tree: Any, values: Mapping[str, Array], path: str) -> Any:
    def child(name: object, value: Any) -> Any:
        return _mapped(value, values, f"{path}/{name}" if path else str(name))

    if isinstance(tree, Mapping):
        return _as(tree, {key: child(key, value) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(child(index, value) for index, value in enumerate(tree)))
    if isinstance(tree, (list, tuple)):
        return type(tree)(child(index, value) for index, value in enumerate(tree))
    if tree is None:
        return None
    if path not in values:
        raise ServiceError(f"{show(path)} is no parameter.")
    check_fits(path, TensorSpec.of(values[path]), TensorSpec.of(_array(path, tree)))
    if type(tree).__module__.startswith(("jax", "jaxlib")):
        from jax import numpy  # noqa: PLC0415  the leaf is one of JAX

        return numpy.asarray(values[path])
    return values[path]


def _as(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return items as a mapping of the same class."""
    if not isinstance(tree, dict):
        return type(tree)(items)  # type: ignore[call-arg]
    made = copy.copy(tree)  # a class of its own may want other arguments
    made.update(items)
    return made
