"""How long a connection waits for the other side: by real sockets of this process."""

import contextlib
import os
import socket
import threading
import time

import pytest
from support.cluster import target_of

from tfps.cluster.spec import Task
from tfps.runtime.process import tcp_timeout


def bound_of(sock: socket.socket) -> int:
    """Return a socket's bound, in milliseconds; 0 is none."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_every_tcp_connection_is_bounded_and_nothing_else_is_touched() -> None:
    """Who listens, who calls, and who is accepted later, but not who has a bound; pipes do not mind."""
    ends, pair = os.pipe(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.create_connection(listens.getsockname()) as calls:
        accepted = listens.accept()[0]
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7_000)
        tcp_timeout.set_user_timeouts()
        assert [bound_of(each) for each in (listens, calls, accepted)] == [20_000, 20_000, 7_000]
        with socket.create_connection(listens.getsockname()), listens.accept()[0] as later:
            assert bound_of(later) == 20_000
        calls.sendall(b"still there")
        assert accepted.recv(100) == b"still there"
        accepted.close()
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"
    for descriptor in ends:
        os.close(descriptor)
    for each in pair:
        each.close()


def test_a_task_keeps_its_connections_bounded() -> None:
    """One thread does it for all servers of a process, from when the first is started."""
    for task in (Task("ps", 0), Task("worker", 0)):
        assert target_of(task)
    assert [thread.name for thread in threading.enumerate()].count("sockets") == 1


def test_connections_to_a_names_former_address_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a name means another host, what waits for the old one fails at once; other connections stay."""
    monkeypatch.setattr(tcp_timeout, "_LOOK_UP_EVERY_SECS", 0.05)
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        moved, other = [stack.enter_context(socket.create_connection(one.getsockname())) for one in listening]
        means = {"w1:1": {"127.0.0.1"}}
        monkeypatch.setattr(
            tcp_timeout, "_looked_up", lambda address: means["w1:1"] if address.startswith("w1") else set()
        )
        tcp_timeout.follow_names([f"w1:{listening[0].getsockname()[1]}", "127.0.0.1:1"])
        time.sleep(0.3)
        moved.settimeout(0.1)
        with pytest.raises(TimeoutError):
            moved.recv(1)
        means["w1:1"] = {"10.0.0.1"}
        moved.settimeout(100)
        assert moved.recv(1) == b""
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.recv(1)
