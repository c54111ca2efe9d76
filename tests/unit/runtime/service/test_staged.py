"""Parts of pushes that wait for their update."""

from unittest import mock

import pytest

from tfps.errors import ServiceError
from tfps.runtime.service.pushes import PushId
from tfps.runtime.service.staged import StagedParts


def test_parts_are_taken_once() -> None:
    """All of an update, or none."""
    parts: StagedParts[str] = StagedParts()
    parts.put(PushId("a", 1), "A")
    parts.put(PushId("b", 1), "B")
    with pytest.raises(ServiceError, match="1 of 2 parts of an update are not here"):
        parts.take([PushId("a", 1), PushId("c", 1)])
    assert parts.take([PushId("b", 1), PushId("a", 1)]) == ["B", "A"]
    with pytest.raises(ServiceError):
        parts.take([PushId("a", 1)])


def test_a_later_push_replaces_an_earlier_one() -> None:
    """The earlier one came too late for its update, or was never decided."""
    parts: StagedParts[str] = StagedParts()
    parts.put(PushId("a", 1), "old")
    parts.put(PushId("a", 2), "new")
    with pytest.raises(ServiceError):
        parts.take([PushId("a", 1)])
    parts.drop(PushId("a", 1))
    parts.put(PushId("a", 1), "late")
    assert parts.take([PushId("a", 2)]) == ["new"]


def test_those_of_clients_that_are_gone_are_forgotten_after_a_while() -> None:
    """One that waits long for other workers keeps its part; so does one that comes back."""
    parts: StagedParts[str] = StagedParts()
    with mock.patch("time.monotonic", return_value=0.0) as clock:
        for client in "abc":
            parts.put(PushId(client, 1), client)
        parts.left("b")
        parts.left("c")
        clock.return_value = 500.0
        parts.put(PushId("c", 1), "c")
        clock.return_value = 700.0
        parts.left("nobody")
    assert parts.take([PushId("a", 1), PushId("c", 1)]) == ["a", "c"]
    with pytest.raises(ServiceError):
        parts.take([PushId("b", 1)])


def test_a_new_generation_has_none() -> None:
    """Clients send theirs again."""
    parts: StagedParts[str] = StagedParts()
    parts.put(PushId("a", 1), "A")
    parts.drop(PushId("a", 1))
    parts.put(PushId("b", 1), "B")
    parts.clear()
    with pytest.raises(ServiceError, match="2 of 2 parts"):
        parts.take([PushId("a", 1), PushId("b", 1)])
