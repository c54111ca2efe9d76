"""Messages that arrive in arrays that there are already: all of a message, or none."""

import socket
import threading

import numpy as np
import pytest

from tfps.client import message as messages
from tfps.client.message import Message
from tfps.client.receive import receive
from tfps.client.sources import Buffered

SENT = {
    "large": np.arange(60_000, dtype=np.float32).reshape(300, 200),
    "scalar": np.array(7, np.int64),
    "none": np.zeros([0, 3], np.float32),
    "odd": np.arange(3, dtype=np.uint8),
    "after": np.arange(4.0),
}


def passed(pair: tuple[socket.socket, socket.socket], into: dict[str, np.ndarray]) -> Message:
    """Send ``SENT`` from one end, and return what arrives at the other."""
    sender = threading.Thread(target=messages.send, args=(pair[0], Message({"id": "7"}, SENT)))
    sender.start()
    found = receive(Buffered(pair[1]), into=into)
    sender.join()
    assert found is not None
    assert found.metadata == {"id": "7"}
    for name, array in SENT.items():
        np.testing.assert_array_equal(found.tensors[name], array)
    return found


def test_arrays_arrive_where_they_are_wanted(pair: tuple[socket.socket, socket.socket]) -> None:
    """In any part of other memory, of which the rest stays; more arrays than come do no harm."""
    around = np.full([900, 200], -1, np.float32)
    into = {name: np.empty_like(array) for name, array in SENT.items()}
    into |= {"large": around[300:600], "other": np.full(2, 5.0)}
    found = passed(pair, into)
    assert all(found.tensors[name] is into[name] for name in SENT)
    assert (around[:300] == -1).all()
    assert (around[600:] == -1).all()
    assert into["other"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("large", np.zeros([200, 300], np.float32)),
        ("scalar", np.zeros([1], np.int64)),
        ("scalar", np.array(0, np.int32)),
        ("after", np.zeros(4, ">f8")),
        ("odd", None),
    ],
)
def test_none_arrives_there_if_one_does_not_fit(
    pair: tuple[socket.socket, socket.socket], name: str, other: np.ndarray | None
) -> None:
    """Another shape, dtype or byte order, or a name that is missing."""
    into = {key: np.zeros_like(array) for key, array in SENT.items() if key != name}
    into |= {} if other is None else {name: other}
    found = passed(pair, into)
    assert not any(np.shares_memory(found.tensors[key], array) for key, array in into.items())
    assert not any(array.any() for array in into.values())


def test_the_end_within_an_array_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    """Not a message of which a part is old."""
    content = b"".join(messages.encode(Message({}, SENT)))
    pair[0].sendall(content[: len(content) // 2])
    pair[0].close()
    with pytest.raises(ConnectionResetError, match="within a message"):
        receive(pair[1], into={name: np.zeros_like(array) for name, array in SENT.items()})
