"""Make TCP connections fail in time. Does not import TensorFlow.

TensorFlow's gRPC channels have no keepalive. The kernel sends unacknowledged data again and again, each time after
twice as long. So if the network is cut while data is on its way, a task notices the failure late. It needs as long
after the network's return as the cut lasted, although the other side restarted long ago. Linux can bound this for each
socket: TCP_USER_TIMEOUT, see tcp(7) and RFC 5482. gRPC sets the option only with a keepalive. The option also bounds
how long a stopped peer may leave its full buffer unread.

A channel also does not notice when the name of its task moves to another host. A worker that restarted at another
address can be reached only after the connection to the old one has failed. So a task that connects to workers looks up
their names.
"""

import contextlib
import ctypes
import ipaddress
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from tfps.cluster.addresses import split
from tfps.timeouts import TCP_TIMEOUT_SECS

_EVERY_SECS, _NAME = 5.0, "sockets"
_LOOK_UP_EVERY_SECS = 1.0
_MAX_FILES = 1 << 16

log = logging.getLogger(__name__)


def start() -> None:
    """Make this process's TCP connections fail when data is not acknowledged for ``TCP_TIMEOUT_SECS``.

    This covers later connections, too, but none that already has such a bound. Only Linux has these bounds.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT") and os.path.isdir("/proc/self/fd") and not _is_kept():
        threading.Thread(target=_keep_bounded, name=_NAME, daemon=True).start()


def allow_many() -> None:
    """Raise this process's limit on connections: a PS with 1,024 idle ones could accept no worker's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_kept() -> bool:
    return any(thread.name == _NAME for thread in threading.enumerate())


def _keep_bounded() -> None:
    while True:
        with contextlib.suppress(OSError):
            set_user_timeouts()
        time.sleep(_EVERY_SECS)


def set_user_timeouts() -> None:
    """Set the timeout on all present TCP sockets that have none; listening sockets pass it on to new ones."""
    libc, option = ctypes.CDLL(None), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    present, wanted = ctypes.c_uint(), ctypes.c_uint(int(1000 * TCP_TIMEOUT_SECS))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        size = ctypes.c_uint(ctypes.sizeof(present))
        known = libc.getsockopt(descriptor, *option, ctypes.byref(present), ctypes.byref(size)) == 0
        if known and not present.value:
            libc.setsockopt(descriptor, *option, ctypes.byref(wanted), ctypes.sizeof(wanted))


def follow_names(addresses: Sequence[str]) -> None:
    """Watch names in a thread: drop connections to a name's former address, so that gRPC looks it up again."""
    named = [address for address in addresses if not _is_ip(split(address)[0])]
    if named and os.path.isdir("/proc/self/fd"):
        threading.Thread(target=_follow_names, args=(named,), name="names", daemon=True).start()


def _is_ip(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _follow_names(addresses: Sequence[str]) -> None:
    known: dict[str, set[str]] = {}
    while True:
        for address in addresses:
            now = _looked_up(address)
            if gone := known.get(address, set()) - now if now else set():
                log.info("%s now resolves to another host", address)
                give_up(gone, split(address)[1])
            known[address] = now or known.get(address, set())
        time.sleep(_LOOK_UP_EVERY_SECS)


def _looked_up(address: str) -> set[str]:
    """Return the addresses of a name; empty while it has none."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def give_up(hosts: set[str], port: int) -> None:
    """End this process's TCP connections to a port of some hosts, so that calls waiting for them fail now."""
    for descriptor in _remote(hosts, port):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _remote(hosts: set[str], port: int) -> Iterator[int]:
    """Yield the file descriptors of connections to a port of some hosts."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            host, found, *_ = connection.getpeername()
            if host.removeprefix("::ffff:") in hosts and found == port:
                yield descriptor
