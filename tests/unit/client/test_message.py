"""Messages of the service: what is sent arrives, the format is that of safetensors, and garbage is refused."""

import json
import socket
import struct
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tfps.client import message as messages
from tfps.client import receive
from tfps.client.message import DTYPES, Message
from tfps.errors import ProtocolError


def passed(pair: tuple[socket.socket, socket.socket], message: Message) -> Message:
    """Send a message from one end, and return what arrives at the other."""
    sender = threading.Thread(target=messages.send, args=(pair[0], message))
    sender.start()
    found = receive.receive(pair[1])
    sender.join()
    assert found is not None
    return found


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4), (300, 200)])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_is_sent_arrives(pair: tuple[socket.socket, socket.socket], dtype: str, shape: tuple[int, ...]) -> None:
    """Texts and arrays of each dtype, of all sizes, in one message."""
    array = (np.random.default_rng(1).random(shape) * 100).astype(dtype)
    sent = Message({"method": "push", "id": "é\n"}, {"": array, "a/b": array[::-1] if shape else array, "c": array.T})
    found = passed(pair, sent)
    assert found.metadata == sent.metadata
    assert list(found.tensors) == list(sent.tensors)
    for name, given in sent.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], given)
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (given.dtype, given.shape)


def test_arrays_of_another_byte_order_arrive(pair: tuple[socket.socket, socket.socket]) -> None:
    """The values count."""
    array = np.arange(5, dtype=">f4")
    np.testing.assert_array_equal(passed(pair, Message({}, {"w": array})).tensors["w"], array)


def test_a_message_is_a_safetensors_file() -> None:
    """Its bytes, by hand: so any library for that format can read and write it."""
    content = b"".join(messages.encode(Message({"method": "push"}, {"w": np.array([[1.0, 2.0]], np.float32)})))
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert header == {
        "__metadata__": {"method": "push"},
        "w": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
    }
    assert content[8 + size :] == struct.pack("<ff", 1.0, 2.0)


def test_a_large_array_is_not_copied() -> None:
    """What is sent is the memory of the array itself."""
    array = np.zeros(1000, np.float32)
    _, body = messages.encode(Message({}, {"w": array}))
    array[0] = 7
    assert struct.unpack("<f", body[:4])[0] == 7


def test_an_unknown_dtype_is_refused() -> None:
    """The error names the array, its dtype, and what is known."""
    with pytest.raises(ProtocolError, match="w: dtype complex64 cannot be sent; known are float64, float32, float16"):
        messages.encode(Message({}, {"w": np.zeros(2, np.complex64)}))


def test_the_end_between_two_messages_is_no_error(pair: tuple[socket.socket, socket.socket]) -> None:
    """The other end has closed the connection."""
    pair[0].close()
    assert receive.receive(pair[1]) is None


@pytest.mark.parametrize("count", [1, 8, 20, -1])
def test_the_end_within_a_message_is_an_error(pair: tuple[socket.socket, socket.socket], count: int) -> None:
    """Whatever has arrived until then."""
    content = b"".join(messages.encode(Message({"method": "push"}, {"w": np.zeros(3)})))
    pair[0].sendall(content[:count])
    pair[0].close()
    with pytest.raises(ConnectionResetError):
        receive.receive(pair[1])


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        struct.pack("<Q", 1) + b"{",
        struct.pack("<Q", 8) + b"not JSON",
        struct.pack("<Q", 8) + b"[1,2,3] ",
        struct.pack("<Q", 8) + b"\xff" * 8,
    ],
)
def test_garbage_is_refused(pair: tuple[socket.socket, socket.socket], content: bytes) -> None:
    """It is an error of the protocol, without a traceback of another kind."""
    pair[0].sendall(content)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="no message of tfps"):
        receive.receive(pair[1])


SEPARATORS = pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as here", "as Python's json"])


@SEPARATORS
@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 64]},
        {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 33, "data_offsets": [0, 4]},
        {"dtype": "O", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        7,
    ],
)
def test_arrays_that_cannot_be_are_refused(
    pair: tuple[socket.socket, socket.socket], entry: Any, separators: tuple[str, str]
) -> None:
    """Before room is made for them."""
    content = json.dumps({"__metadata__": {}, "w": entry}, separators=separators).encode()
    pair[0].sendall(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ProtocolError, match="no message of tfps"):
        receive.receive(pair[1])


@SEPARATORS
@pytest.mark.parametrize("entries", [{}, {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}])
@pytest.mark.parametrize("metadata", [7, {"method": 7}, ["push"]])
def test_metadata_are_texts(
    pair: tuple[socket.socket, socket.socket], metadata: object, entries: Any, separators: tuple[str, str]
) -> None:
    """As the format says."""
    content = json.dumps({"__metadata__": metadata, **entries}, separators=separators).encode()
    pair[0].sendall(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ProtocolError, match="no message of tfps"):
        receive.receive(pair[1])


_ENTRY = '"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
_METADATA = r'"__metadata__": {"a": "{\"w\":}", "\u00fc": ",\"__metadata__\":{"}'


@pytest.mark.parametrize(
    "header",
    [
        f"{{{_METADATA},{_ENTRY}}}",
        f"{{{_ENTRY}, {_METADATA}}}",
        f"  {{ {_METADATA} , {_ENTRY} }}",
        f"{{{_METADATA},{_ENTRY}}}".replace(": ", ":"),
        f"{{{_METADATA},{_ENTRY}}}".replace(": ", ":") + 70_000 * " ",
        f"{{{_METADATA},{_ENTRY}}}".replace(": ", ":").replace("\\u00fc", "\u00fc"),
    ],
)
def test_a_header_is_any_json(pair: tuple[socket.socket, socket.socket], header: str) -> None:
    """Clients in other languages write it with other blanks, and in another order; a second time it is the same."""
    content = header.encode()
    for number in (1.0, 2.0):
        pair[0].sendall(struct.pack("<Q", len(content)) + content + struct.pack("<ff", number, 0.5))
        found = receive.receive(pair[1])
        assert found is not None
        assert found.metadata == {"a": '{"w":}', "\u00fc": ',"__metadata__":{'}
        np.testing.assert_array_equal(found.tensors["w"], np.array([number, 0.5], np.float32))


@pytest.mark.parametrize("end", ["", "}}", ",}", ',"w":}', ',"w"}', '}, "w": 1'])
def test_a_header_that_is_no_json_is_refused(pair: tuple[socket.socket, socket.socket], end: str) -> None:
    """Wherever it ends to be it."""
    content = ('{"__metadata__":{"method":"push"}' + end).encode()
    pair[0].sendall(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ProtocolError, match="no message of tfps"):
        receive.receive(pair[1])


@pytest.mark.parametrize("blanks", [0, 70_000])
def test_of_metadata_that_come_twice_the_last_count(pair: tuple[socket.socket, socket.socket], blanks: int) -> None:
    """As in JSON, and in a header of any length; there is no array of that name."""
    content = ('{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"}}' + " " * blanks).encode()
    pair[0].sendall(struct.pack("<Q", len(content)) + content)
    assert receive.receive(pair[1]) == Message({"a": "c"}, {})
    content = b'{"__metadata__":{},"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    pair[0].sendall(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ProtocolError, match="metadata"):
        receive.receive(pair[1])


def test_arrays_of_the_same_names_arrive_as_they_are(pair: tuple[socket.socket, socket.socket]) -> None:
    """Whatever came before under that name."""
    for array in (np.arange(6.0), np.arange(6.0).reshape(2, 3), np.arange(6), np.arange(6.0).reshape(2, 3).T):
        for _ in range(2):
            found = passed(pair, Message({}, {"w": array})).tensors["w"]
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)


def test_headers_of_all_kinds_take_no_memory_for_good(pair: tuple[socket.socket, socket.socket]) -> None:
    """Those that may come again are kept: the small ones, and not many of them."""
    tracemalloc.start()
    try:
        for names, size in ((10, 30_000), (1_000, 1)):
            for number in range(20):
                parts = {f"{number}{'n' * size}{index}": np.zeros(0) for index in range(names)}
                assert len(passed(pair, Message({}, parts)).tensors) == names
        del parts
        assert tracemalloc.get_traced_memory()[0] < 2e6
    finally:
        tracemalloc.stop()


def test_a_receiver_may_refuse_what_is_announced(pair: tuple[socket.socket, socket.socket]) -> None:
    """10 GB are announced, and none of them is made room for; then the connection can go on."""
    header = {"__metadata__": {"method": "push"}, "w": {"dtype": "U8", "shape": [10**10], "data_offsets": [0, 10**10]}}
    content = json.dumps(header).encode()
    pair[0].sendall(struct.pack("<Q", len(content)) + content)

    announced = receive.receive_header(pair[1])
    assert announced is not None
    assert announced.num_bytes == 10**10
    messages.send(pair[1], Message({"error": "too large"}))
    assert receive.receive(pair[0]) == Message({"error": "too large"}, {})


def test_arrays_that_are_not_wanted_can_be_skipped(pair: tuple[socket.socket, socket.socket]) -> None:
    """The next message arrives whole."""
    first, second = Message({}, {"w": np.ones(100_000)}), Message({"id": "2"})
    sender = threading.Thread(target=lambda: [messages.send(pair[0], one) for one in (first, second)])
    sender.start()
    header = receive.receive_header(pair[1])
    assert header is not None
    receive.skip_tensors(pair[1], header)
    found = receive.receive(pair[1])
    sender.join()
    assert found is not None
    assert found.metadata == {"id": "2"}


def test_small_arrays_that_share_memory_are_arrays_like_others(pair: tuple[socket.socket, socket.socket]) -> None:
    """They are aligned, though some are sent from an odd address on, and a change of one changes no other."""
    sent = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(4.0), "e": np.zeros(0), "c": np.array(7, np.int16)}
    found = passed(pair, Message({}, sent)).tensors
    assert all(array.flags.aligned and array.flags.writeable for array in found.values())
    found["b"][:] = 9
    found["a"][:] = 1
    np.testing.assert_array_equal(found["c"], 7)
    np.testing.assert_array_equal(found["b"], [9] * 4)


def test_a_message_may_arrive_byte_by_byte() -> None:
    """As a network may cut it: also within the size of the header, and within small arrays."""
    sent = Message({"id": "7"}, {"a": np.arange(3, dtype=np.uint8), "b": np.arange(4.0)})
    left = b"".join(messages.encode(sent)) * 2

    class Slow:
        def recv_into(self, buffer: memoryview, /) -> int:
            nonlocal left
            buffer[:1], left = left[:1], left[1:]
            return 1

    for _ in range(2):
        found = receive.receive(Slow())
        assert found is not None
        assert found.metadata == sent.metadata
        np.testing.assert_array_equal(found.tensors["b"], np.arange(4.0))
        np.testing.assert_array_equal(found.tensors["a"], [0, 1, 2])
    assert not left
