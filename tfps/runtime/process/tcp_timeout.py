"""Connections that fail in time. Does not import TensorFlow.

TensorFlow's gRPC channels have no keepalive. What the other side does not acknowledge the kernel sends again and again,
each time after twice as long. So where the network was cut with something on its way, a task would find out only as
long after the network's return as it was cut, although the other side has been started again long since. Linux can
bound that for each socket: TCP_USER_TIMEOUT, see tcp(7) and RFC 5482. gRPC sets it where there is a keepalive only. It
also bounds how long a side that stands still may leave its full buffer as it is.

Nor does a channel notice when the name of its task means another host: a worker that was started again at another
address is reached only when the connection to the old one has failed. So who connects to workers looks their names up.
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

TIMEOUT_SECS = 20.0  # as long as a PS may be mute
_EVERY_SECS, _NAME = 5.0, "sockets"
_LOOK_UP_EVERY_SECS = 1.0
_MOST_FILES = 1 << 16

log = logging.getLogger(__name__)


def start() -> None:
    """Let this process's TCP connections fail when something has not been acknowledged for ``TIMEOUT_SECS``.

    Those that come later, too, but for those with a bound of their own; only Linux has such bounds.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT") and os.path.isdir("/proc/self/fd") and not _is_kept():
        threading.Thread(target=_keep_bounded, name=_NAME, daemon=True).start()


def allow_many() -> None:
    """Let this process have as many connections as it may: a PS that 1,024 idle ones fill would take no worker's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
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
    """Do it for all that there are now; who listens hands it on, and what is no TCP socket stays as it is."""
    libc, option = ctypes.CDLL(None), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    present, wanted = ctypes.c_uint(), ctypes.c_uint(int(1000 * TIMEOUT_SECS))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        size = ctypes.c_uint(ctypes.sizeof(present))
        known = libc.getsockopt(descriptor, *option, ctypes.byref(present), ctypes.byref(size)) == 0
        if known and not present.value:
            libc.setsockopt(descriptor, *option, ctypes.byref(wanted), ctypes.sizeof(wanted))


def follow_names(addresses: Sequence[str]) -> None:
    """Give up the connections to a name's former address when it has another; then gRPC looks the name up, too."""
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
                log.info("%s is another host now", address)
                give_up(gone, split(address)[1])
            known[address] = now or known.get(address, set())
        time.sleep(_LOOK_UP_EVERY_SECS)


def _looked_up(address: str) -> set[str]:
    """Return the addresses of a name; none while there are none."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def give_up(hosts: set[str], port: int) -> None:
    """End this process's TCP connections to some hosts' port; what waits for them fails now."""
    for descriptor in _remote(hosts, port):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _remote(hosts: set[str], port: int) -> Iterator[int]:
    """Yield the file descriptors of connections to some hosts' port."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            host, found, *_ = connection.getpeername()
            if host.removeprefix("::ffff:") in hosts and found == port:
                yield descriptor
