"""Connections that fail in time. Does not import TensorFlow.

TensorFlow's gRPC channels have no keepalive. What the other side does not acknowledge the kernel sends again and again,
each time after twice as long. So where the network was cut with something on its way, a task would find out only as
long after the network's return as it was cut, although the other side has been started again long since. Linux can
bound that for each socket: TCP_USER_TIMEOUT, see tcp(7) and RFC 5482. gRPC sets it where there is a keepalive only.
"""

import ctypes
import os
import socket
import threading
import time

TIMEOUT_SECS = 20.0  # as long as a PS may be mute
_EVERY_SECS = 5.0


def keep_bounded() -> None:
    """Let this process's TCP connections fail when something has not been acknowledged for ``TIMEOUT_SECS``.

    Those that come later, too; there is nothing to do it with but on Linux.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT") and os.path.isdir("/proc/self/fd"):
        threading.Thread(target=_keep_bounded, name="sockets", daemon=True).start()


def _keep_bounded() -> None:
    while True:
        bound_all()
        time.sleep(_EVERY_SECS)


def bound_all() -> None:
    """Do it for all that there are now; who listens hands it on, and what is no TCP socket stays as it is."""
    milliseconds = ctypes.c_uint(int(1000 * TIMEOUT_SECS))
    option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ctypes.byref(milliseconds), ctypes.sizeof(milliseconds)
    libc = ctypes.CDLL(None)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        libc.setsockopt(descriptor, *option)
