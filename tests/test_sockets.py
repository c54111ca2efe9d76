"""How long a connection waits for the other side: by real sockets of this process."""

import os
import socket
import threading

from cluster_in_process import target_of

from tfps.cluster import Task
from tfps.runtime import sockets


def bound_of(sock: socket.socket) -> int:
    """Return a socket's bound, in milliseconds; 0 is none."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_every_tcp_connection_is_bounded_and_nothing_else_is_touched() -> None:
    """Who listens, who calls, and who is accepted later, but not who has a bound; pipes do not mind."""
    ends, pair = os.pipe(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.create_connection(listens.getsockname()) as calls:
        accepted = listens.accept()[0]
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7_000)
        sockets.bound_all()
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
