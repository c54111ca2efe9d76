"""Waiting for bytes with a limit."""

import contextlib
import socket
import threading
import time

import pytest

from tfps.client.sources import Attentive, Buffered, Hurried


def test_who_waits_asks_now_and_then() -> None:
    """Bytes that come later are received; the check is made only while nothing comes."""
    checks: list[float] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        source, buffer = Attentive(ours, 0.1, lambda: checks.append(time.monotonic())), memoryview(bytearray(4))
        theirs.sendall(b"ab")
        assert source.recv_into(buffer) == 2
        assert not checks
        threading.Timer(0.5, theirs.sendall, [b"c"]).start()
        assert source.recv_into(buffer) == 1
        assert 2 <= len(checks) <= 5
        assert ours.gettimeout() is None
        theirs.close()
        assert source.recv_into(buffer) == 0


def test_what_the_check_raises_ends_the_wait() -> None:
    """And the socket is as before."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def check() -> None:
            raise ConnectionRefusedError("frozen")

        with pytest.raises(ConnectionRefusedError, match="frozen"):
            Attentive(ours, 0.1, check).recv_into(memoryview(bytearray(4)))
        assert ours.gettimeout() is None


def test_a_byte_now_and_then_is_not_enough() -> None:
    """The time is that of all that is received."""
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with ours, theirs:
        source, began = Hurried(ours, 0.6), time.monotonic()
        with pytest.raises(TimeoutError):
            list(iter(lambda: source.recv_into(memoryview(bytearray(1))), 0))
        assert 0.5 < time.monotonic() - began < 5
        over.set()
        thread.join()


class Scripted:
    """A connection on which so many bytes arrive at a time; keeps how many were asked for."""

    def __init__(self, content: bytes, *arrivals: int) -> None:
        self._content, self._arrivals, self.asked = memoryview(content), list(arrivals), list[int]()

    def recv_into(self, buffer: memoryview) -> int:
        """Return the next ones, or fewer if there is no more room."""
        self.asked.append(len(buffer))
        count = min(len(buffer), self._arrivals.pop(0) if self._arrivals else 0)
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


def test_small_messages_need_one_call() -> None:
    """What comes together is received together; large parts go to their place; nothing is lost between."""
    content = bytes(range(256)) * 1024
    connection = Scripted(content, 500, 90_000, 20_000, 7)
    source, found = Buffered(connection), bytearray()

    def take(size: int) -> None:
        part, done = memoryview(bytearray(size)), 0
        while done < size and (count := source.recv_into(part[done:])):
            done += count
        found.extend(part[:done])

    for size in (8, 100, 392):
        take(size)
    assert connection.asked == [1 << 16]
    take(100_000)
    assert connection.asked == [1 << 16, 100_000, 1 << 16]  # the rest of the large part is a small one
    take(10_007)
    take(1)
    assert bytes(found) == content[:110_507]
    assert len(connection.asked) == 5
