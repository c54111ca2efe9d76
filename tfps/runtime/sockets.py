"""Connections that fail in time. Does not import TensorFlow.

TensorFlow's gRPC channels have no keepalive. What the other side does not acknowledge the kernel sends again and again,
each time after twice as long. So where the network was cut with something on its way, a task would find out only as
long after the network's return as it was cut, although the other side has been started again long since. Linux can
bound that for each socket: TCP_USER_TIMEOUT, see tcp(7) and RFC 5482. gRPC sets it where there is a keepalive only. It
also bounds how long a side that stands still may leave its full buffer as it is.
"""

import contextlib
import ctypes
import os
import socket
import threading
import time

TIMEOUT_SECS = 20.0  # as long as a PS may be mute
_EVERY_SECS, _NAME = 5.0, "sockets"


def keep_bounded() -> None:
    """Let this process's TCP connections fail when something has not been acknowledged for ``TIMEOUT_SECS``.

    Those that come later, too, but for those with a bound of their own; only Linux has such bounds.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT") and os.path.isdir("/proc/self/fd") and not _is_kept():
        threading.Thread(target=_keep_bounded, name=_NAME, daemon=True).start()


def _is_kept() -> bool:
    return any(thread.name == _NAME for thread in threading.enumerate())


def _keep_bounded() -> None:
    while True:
        with contextlib.suppress(OSError):
            bound_all()
        time.sleep(_EVERY_SECS)


def bound_all() -> None:
    """Do it for all that there are now; who listens hands it on, and what is no TCP socket stays as it is."""
    libc, option = ctypes.CDLL(None), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    present, wanted = ctypes.c_uint(), ctypes.c_uint(int(1000 * TIMEOUT_SECS))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        size = ctypes.c_uint(ctypes.sizeof(present))
        known = libc.getsockopt(descriptor, *option, ctypes.byref(present), ctypes.byref(size)) == 0
        if known and not present.value:
            libc.setsockopt(descriptor, *option, ctypes.byref(wanted), ctypes.sizeof(wanted))
