"""What the tests of a client share."""

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(30)
    yield ends
    for end in ends:
        end.close()
