"""The program of the page ``service-jax``: two processes with a linear model of JAX."""

from pathlib import Path

import numpy as np
import pytest
from support.page_programs import accuracy, in_one_process, run, trained

pytest.importorskip("jax")

PAGE = "service-jax.md"
NAMES = ("layer/kernel", "layer/bias")


def test_sync_is_the_arithmetic_of_one_process(tmp_path: Path) -> None:
    """The halves have the same size, so the mean of their gradients is that of all images."""
    output = run(PAGE, tmp_path, "sync", "job", JAX_PLATFORMS="cpu")
    found = trained(tmp_path / "job", *NAMES)
    weights, bias = in_one_process(2, 50, 0.1, is_sync=True)
    assert (found.updates, found.dropped) == (50, 0)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.bias, bias, rtol=1e-4, atol=1e-5)
    assert output.splitlines() == [f"worker {worker}: accuracy {accuracy(weights, bias):.3f}" for worker in range(2)]


def test_async_applies_each_gradient_once(tmp_path: Path) -> None:
    """And learns at least as much as with half of the updates, which sync makes."""
    run(PAGE, tmp_path, "async", "job", JAX_PLATFORMS="cpu")
    found = trained(tmp_path / "job", *NAMES)
    assert (found.updates, found.dropped) == (100, 0)
    assert accuracy(found.weights, found.bias) > accuracy(*in_one_process(2, 50, 0.1, is_sync=True)) - 0.03
