"""Trees of real JAX arrays as parameters of a service: names, values, gradients, dtypes, and what is refused."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.service import Running, service

from tfps.errors import ServiceError

jax = pytest.importorskip("jax")
jnp = jax.numpy


class Layer(NamedTuple):
    """A layer of two arrays."""

    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    """A class that only JAX knows as a tree."""

    kernel: Any


@pytest.fixture
def running() -> Iterator[Running]:
    """Yield a service whose updates subtract the gradients."""
    with service() as found:
        yield found


def tree(value: float) -> dict[str, Any]:
    """Return a tree of each kind of node, with the same value everywhere."""
    full = lambda *shape: jnp.full(shape, value, jnp.float32)  # noqa: E731
    return {"layers": [Layer(full(2, 3), full(3)), (full(), None)], "scale": {"by": full(1)}}


def test_a_tree_goes_there_and_back(running: Running) -> None:
    """Same form, arrays of JAX, and the update is in each; gradients come from ``jax.grad`` of the tree itself."""

    def loss(model: Any) -> Any:
        return sum((index + 1) * leaf.sum() for index, leaf in enumerate(jax.tree.leaves(model)))

    with running.client() as ps:
        model = ps.init_module(tree(1.0))
        assert ps.push_grads(model, jax.jit(jax.grad(loss))(model)) == 1
        found = ps.pull_into(model)
        names = sorted(ps.pull())
    assert names == ["layers/0/0", "layers/0/1", "layers/1/0", "scale/by"]
    assert jax.tree.structure(found) == jax.tree.structure(model)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    for index, leaf in enumerate(jax.tree.leaves(found)):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, -index, np.float32))
    np.testing.assert_array_equal(model["scale"]["by"], [1.0])


def test_the_first_values_count(running: Running) -> None:
    """The second client gets a tree of them."""
    with running.client() as ps, running.client(1) as other:
        ps.init_module(tree(2.0))
        found = other.init_module(tree(7.0))
    assert {float(leaf.max()) for leaf in jax.tree.leaves(found)} == {2.0}


def test_gradients_alone_are_a_tree(running: Running) -> None:
    """A parameter without a gradient, ``None``, stays as it is."""
    with running.client() as ps:
        model = ps.init_module({"a": jnp.ones(2), "b": jnp.ones(2)})
        ps.push_grads({"a": jnp.ones(2), "b": None})
        found = ps.pull_into(model)
    np.testing.assert_array_equal(found["a"], [0.0, 0.0])
    np.testing.assert_array_equal(found["b"], [1.0, 1.0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_stay(running: Running, dtype: str) -> None:
    """float64 is there with x64 only."""
    with jax.enable_x64(True), running.client() as ps:
        model = ps.init_module({"w": jnp.full(2, 1.0 + 2.0**-10, dtype)})
        assert model["w"].dtype == dtype
        ps.push_grads({"w": jnp.full(2, 2.0**-10, dtype)})
        found = ps.pull_into(model)
    assert found["w"].dtype == dtype
    np.testing.assert_array_equal(found["w"], [1.0, 1.0])


def test_a_gradient_of_another_dtype_is_refused(running: Running) -> None:
    """A float32 gradient of a float64 parameter, as a client without x64 has it; nothing changes."""
    with running.client() as ps:
        ps.init({"w": np.zeros(2, np.float64)})
        with pytest.raises(ServiceError, match=r"w: expected float64\[2\], given float32\[2\]"):
            ps.push_grads({"w": jnp.ones(2)})
        np.testing.assert_array_equal(ps.pull()["w"], [0.0, 0.0])


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: jnp.ones(3, jnp.bfloat16), r"a/b: expected float16, float32 or float64, given bfloat16\[3\]"),
        (lambda: jnp.arange(3), r"a/b: expected float16, float32 or float64, given int32\[3\]"),
        (lambda: Registered(jnp.ones(3)), r"a/b: .*Registered is no array: a tree has dicts, lists and tuples"),
        (lambda: jax.random.key(0), r"a/b: jax.*Array is no array"),
    ],
    ids=["bfloat16", "int32", "dataclass", "key"],
)
def test_what_cannot_be_a_parameter_is_refused(running: Running, leaf: Any, message: str) -> None:
    """With its path; others can still give the first values."""
    with running.client() as ps:
        with pytest.raises(ServiceError, match=message):
            ps.init_module({"a": {"b": leaf()}})
        assert ps.init_module({"a": jnp.ones(2)})["a"].shape == (2,)


def test_a_class_that_only_jax_knows_is_refused(running: Running) -> None:
    """By its name, and with what to use instead."""
    with (
        running.client() as ps,
        pytest.raises(ServiceError, match="Registered is no PyTorch module, Keras 3 model or pytree"),
    ):
        ps.init_module(Registered(jnp.ones(3)))


def test_the_lines_of_the_page(running: Running) -> None:
    """The page ``service`` has them: a tree of two, and ``push_grads`` with the tree and its gradients."""
    loss = lambda tree, x, y: ((x @ tree["w"] + tree["b"] - y) ** 2).mean()  # noqa: E731
    x, y = jnp.ones([4, 3]), jnp.full(4, 2.0)
    with running.client() as ps:
        model = ps.init_module({"w": jnp.zeros(3), "b": jnp.zeros(())})
        ps.push_grads(model, jax.grad(loss)(model, x, y))
        model = ps.pull_into(model)
    np.testing.assert_allclose(model["w"], [4.0, 4.0, 4.0])
    np.testing.assert_allclose(model["b"], 4.0)
