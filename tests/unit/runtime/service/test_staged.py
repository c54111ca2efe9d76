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


def test_parts_that_are_left_out_are_forgotten_with_those_that_are_taken() -> None:
    """To look at a part forgets nothing."""
    parts: StagedParts[str] = StagedParts()
    for client in "abc":
        parts.put(PushId(client, 1), client.upper())
    assert [parts.part(PushId(client, 1)) for client in "aab"] == ["A", "A", "B"]
    with pytest.raises(ServiceError, match="1 of 2 parts"):
        parts.take([PushId("a", 1)], [PushId("d", 1)])
    assert parts.take([PushId("b", 1)], [PushId("a", 1)]) == ["B"]
    assert parts.part(PushId("c", 1)) == "C"
    for client in "ab":
        with pytest.raises(ServiceError, match="push 1: a part of it is not here"):
            parts.part(PushId(client, 1))


def test_a_later_push_replaces_an_earlier_one() -> None:
    """The earlier one came too late for its update, or was never decided."""
    parts: StagedParts[str] = StagedParts()
    parts.put(PushId("a", 1), "old")
    parts.put(PushId("a", 2), "new")
    with pytest.raises(ServiceError):
        parts.take([PushId("a", 1)])
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
    parts.put(PushId("b", 1), "B")
    parts.clear()
    with pytest.raises(ServiceError, match="2 of 2 parts"):
        parts.take([PushId("a", 1), PushId("b", 1)])


def test_a_held_part_is_not_replaced() -> None:
    """A client that was interrupted pushes again while its last push waits; both are taken."""
    parts: StagedParts[str] = StagedParts()
    parts.put(PushId("a", 1), "first")
    parts.hold(PushId("a", 1), [])
    parts.put(PushId("a", 1), "sent again")
    parts.put(PushId("a", 2), "second")
    parts.hold(PushId("a", 2), [1])
    parts.put(PushId("a", 3), "never decided")
    parts.put(PushId("a", 4), "fourth")
    assert parts.take([PushId("a", 1)]) == ["first"]
    assert parts.take([PushId("a", 2)]) == ["second"]
    with pytest.raises(ServiceError, match="1 of 1 parts"):
        parts.take([PushId("a", 3)])


def test_only_what_is_under_way_stays_held() -> None:
    """The first server says which these are: a part of another push would stay for ever."""
    parts: StagedParts[str] = StagedParts()
    for number in range(1, 4):
        parts.put(PushId("a", number), "A")
        parts.hold(PushId("a", number), [1][: number - 1])
    with pytest.raises(ServiceError):
        parts.take([PushId("a", 2)])
    assert parts.take([PushId("a", 1), PushId("a", 3)]) == ["A", "A"]


def test_what_is_not_here_cannot_be_held() -> None:
    """Nor is a client served that leaves push after push behind."""
    parts: StagedParts[str] = StagedParts()
    with pytest.raises(ServiceError, match="push 1: a part of it is not here"):
        parts.hold(PushId("a", 1), [])
    parts.put(PushId("a", 9), "A")
    with pytest.raises(ServiceError, match="8 pushes of this client are under way"):
        parts.hold(PushId("a", 9), range(1, 9))


def test_a_part_is_held_as_long_as_its_push_is_open() -> None:
    """Whether a request is about it, or it waits for others after its client is gone."""
    waiting = {PushId("a", 1), PushId("a", 2)}
    parts: StagedParts[str] = StagedParts(waiting.__contains__)
    ends = [parts.use(PushId("a", number), "A") for number in (1, 2, 3)]
    again = parts.use(PushId("a", 3), "A")
    for end in ends:
        end()
    assert parts.held("a") == [1, 2, 3]
    again()
    assert parts.held("a") == [1, 2]
    waiting.remove(PushId("a", 2))
    assert parts.held("a") == [1]
    with mock.patch("time.monotonic", return_value=0.0) as clock:
        parts.left("a")
        clock.return_value = 1e6
        parts.left("b")
    assert parts.take([PushId("a", 1)]) == ["A"]
