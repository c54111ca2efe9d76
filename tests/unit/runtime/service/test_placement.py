"""The first values: what is announced to the first server is what each server takes."""

import numpy as np
import pytest

from tfps.client.message import TensorSpec
from tfps.errors import NotReadyError, ServiceError
from tfps.runtime.service.placement import FirstValues, Placement, check_finite, specs_as_text, specs_of

SPEC = TensorSpec(np.dtype("float32"), (3,))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"w": TensorSpec(np.dtype("float32"), (1 << 40,))},
            r"w: expected float32\[3\], given float32\[1099511627776\]",
        ),
        ({}, r"w: expected float32\[3\], given nothing"),
        ({"w": SPEC, "x": SPEC}, r"x: expected nothing, given float32\[3\]"),
    ],
)
def test_other_values_than_were_announced(given: dict[str, TensorSpec], problem: str) -> None:
    """Are refused before they arrive."""
    values = FirstValues()
    values.expect("a", {"w": SPEC})
    values.check("a", {"w": SPEC})
    with pytest.raises(ServiceError, match=problem):
        values.check("a", given)


def test_one_client_gives_them() -> None:
    """All of them, before they are kept; a later one begins again."""
    values = FirstValues()
    with pytest.raises(NotReadyError):
        values.check("", {})
    values.expect("a", {"w": SPEC})
    with pytest.raises(NotReadyError):
        values.check("b", {"w": SPEC})
    with pytest.raises(NotReadyError):
        values.check_complete("a")
    values.got("a")
    values.check_complete("a")
    values.expect("b", {"w": SPEC})
    for giver in ("a", "b"):
        with pytest.raises(NotReadyError):
            values.check_complete(giver)


@pytest.mark.parametrize(("value", "problem"), [(np.nan, "w: the first value has NaN"), (-np.inf, "w: .* has Inf")])
def test_values_that_are_not_finite(value: float, problem: str) -> None:
    """Could never be saved."""
    check_finite({"w": np.ones(3)})
    with pytest.raises(ServiceError, match=problem):
        check_finite({"w": np.array([1.0, value])})


def test_specs_as_text() -> None:
    """What one server writes, another one reads."""
    specs = {"w": SPEC, "é": TensorSpec(np.dtype("float64"), ())}
    assert specs_of(specs_as_text(specs)) == specs


def test_a_client_that_gives_nothing_is_not_waited_for_without_end() -> None:
    """Another one gives the values then, and the first one's come too late."""
    specs = {"w": TensorSpec(np.dtype(np.float32), (2,))}
    placement = Placement(1, giver_secs=0.3)
    late = placement.begin(specs, "one")
    given = placement.begin(specs, "other")
    assert given not in ("", late)
    with pytest.raises(NotReadyError):
        placement.end(late)
    placement.end(given)
    assert placement.begin(specs, "third") == ""
