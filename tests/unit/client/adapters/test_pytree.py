"""Trees of arrays as parameters: names, values and gradients of nested dicts, lists and tuples."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.service import service

from tfps.client.adapters import adapter_of
from tfps.client.adapters.pytree import Pytree
from tfps.errors import ServiceError


class Layer(NamedTuple):
    """A layer, as libraries of JAX have them."""

    kernel: Any
    bias: Any


TREE = {"layers": [Layer(np.ones([2, 3]), np.zeros(3)), (np.float32(4.0), None)], "scale": np.array(2.0)}


def test_names_are_the_paths() -> None:
    """``None`` has no value."""
    found = Pytree(TREE).values()
    assert list(found) == ["layers/0/0", "layers/0/1", "layers/1/0", "scale"]
    assert found["layers/0/0"] is TREE["layers"][0].kernel


def test_a_new_tree_has_the_same_form() -> None:
    """And the given values; the old one stays as it is."""
    values = {name: value + 1 for name, value in Pytree(TREE).values().items()}
    made = Pytree(TREE).assign(values)
    assert type(made["layers"][0]) is Layer
    assert made["layers"][1][1] is None
    np.testing.assert_array_equal(made["layers"][0].kernel, np.full([2, 3], 2.0))
    np.testing.assert_array_equal(TREE["layers"][0].kernel, np.ones([2, 3]))
    assert made["scale"] == 3


def test_a_value_that_is_missing_is_named() -> None:
    """With its path."""
    with pytest.raises(ServiceError, match="scale is no parameter"):
        Pytree({"scale": np.array(1.0)}).assign({})


@pytest.mark.parametrize("leaf", [object(), "text", {1, 2}])
def test_a_leaf_that_is_no_array_is_named(leaf: object) -> None:
    """With its path and its class."""
    with pytest.raises(ServiceError, match=f"a/0: builtins.{type(leaf).__name__} is no array: a tree has dicts"):
        Pytree({"a": [leaf]}).values()


def test_gradients_are_a_tree_of_the_same_form() -> None:
    """Given beside the model, or instead of it."""
    gradients = {"layers": [Layer(np.ones([2, 3]), np.ones(3)), (np.float32(1.0), None)], "scale": np.array(5.0)}
    assert Pytree(TREE).gradients(gradients)["scale"] == 5
    assert Pytree(gradients).gradients(None)["scale"] == 5


@pytest.mark.parametrize("model", ["text", 3, object()])
def test_what_is_no_model_is_refused(model: object) -> None:
    """Its class is named."""
    with pytest.raises(ServiceError, match="is no PyTorch module, Keras 3 model or pytree of JAX"):
        adapter_of(model)
    assert isinstance(adapter_of({"w": np.ones(2)}), Pytree)


def test_paths_are_of_one_array() -> None:
    """Two that are the same are refused; a mapping of another class stays one."""
    with pytest.raises(ServiceError, match="a/b is the path of two arrays"):
        Pytree({"a/b": np.ones(1), "a": {"b": np.ones(1)}}).values()
    tree = collections.defaultdict(list, {"w": np.ones(2)})
    made = Pytree(tree).assign({"w": np.zeros(2)})
    assert type(made) is collections.defaultdict
    assert made["w"].sum() == 0
    assert tree["w"].sum() == 2


def test_a_tree_of_other_shapes_or_dtypes_is_refused() -> None:
    """With the path, what is expected and what is given."""
    tree = {"l": [np.zeros(3, np.float32)]}
    for other in (np.zeros(7, np.float32), np.zeros(3, np.float16)):
        with pytest.raises(ServiceError, match="l/0: the service has float32"):
            Pytree({"l": [other]}).assign(Pytree(tree).values())
    with pytest.raises(ServiceError, match="the tree has no array"):
        Pytree(tree).gradients({"l": [None]})


def test_a_tree_does_not_say_what_a_buffer_is() -> None:
    """So it is an error to ask for them, and nothing is given."""
    with service() as running, running.client() as ps:
        with pytest.raises(ServiceError, match="a pytree has no buffers: give them by name"):
            ps.init_module({"w": np.ones(2, np.float32)}, buffers=True)
        with pytest.raises(ServiceError, match="no parameters yet"):
            ps.pull()
