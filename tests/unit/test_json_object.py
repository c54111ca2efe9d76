"""JSON that others have written is read with types."""

from typing import Any

import pytest

from tfps.json_object import JsonObject


@pytest.mark.parametrize(
    ("value", "text", "number", "integer", "boolean"),
    [
        ("a", "a", None, None, None),
        (7, None, 7, 7, None),
        (7.0, None, 7.0, 7, None),
        (7.5, None, 7.5, None, None),
        (float("inf"), None, float("inf"), None, None),
        (10**400, None, 10**400, 10**400, None),
        (True, None, True, 1, True),
        (None, None, None, None, None),
        ([1], None, None, None, None),
    ],
)
def test_a_value_of_another_type_is_none(value: Any, text: Any, number: Any, integer: Any, boolean: Any) -> None:
    """Each kind of entry is its value, or ``None``; a whole number may have been written with a point."""
    entries = JsonObject({"x": value})
    assert (entries.text("x"), entries.number("x"), entries.integer("x"), entries.boolean("x")) == (
        *(text, number),
        *(integer, boolean),
    )
    assert entries.text("y") is None


def test_collections_hold_what_has_the_right_type() -> None:
    """What does not fit in a list or an object is left out; where there is none, it is empty."""
    entries = JsonObject({"list": ["a", 1, None], "object": {"a": 1.5, "b": "c"}, "objects": {"a": {"x": 1}, "b": 2}})
    assert entries.texts("list") == ["a"]
    assert entries.integers("list") == [1]
    assert entries.integers("object") is None
    assert (entries.texts("object"), entries.numbers("list")) == ([], {})
    assert entries.numbers("object") == {"a": 1.5}
    assert {name: inner.integer("x") for name, inner in entries.objects("objects").items()} == {"a": 1, "b": None}
    assert JsonObject(["no", "object"]).content == {}
