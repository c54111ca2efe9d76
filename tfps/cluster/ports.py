"""Reserve free ports of this machine for tasks, and check whether a port is free.

For a port in use, ``tf.train.Server`` reports only that it "could not start". Where gRPC sets ``SO_REUSEPORT``, it
shares the port without a message. Does not import TensorFlow.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

from tfps.cluster.addresses import split
from tfps.cluster.probe import connect
from tfps.errors import OWN_LIMITS, ConfigError


@contextlib.contextmanager
def held_ports(count: int, first: int | None = None) -> Iterator[list[int]]:
    """Reserve ports, which the system assigns to no other process while the context lasts.

    Args:
        count: How many.
        first: The first of ports that follow each other; ``None`` for any that are free.

    Raises:
        ConfigError: If a port that is asked for is taken.
    """
    for number in range(first or 0, first + count if first else 0):
        check_port(f"127.0.0.1:{number}", "--port_base")
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for index, holder in enumerate(holders):
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # gRPC releases differ in which of these they set
                holder.setsockopt(socket.SOL_SOCKET, option, 1)
            holder.bind(("", first + index if first else 0))
        yield [holder.getsockname()[1] for holder in holders]


def check_port(address: str, flag: str) -> None:
    """Check that this machine can listen on a task's port.

    A port that is bound but not listened on is reserved by a launcher for this task (``held_ports``).

    Raises:
        ConfigError: If another process listens there, or the port cannot be used.
    """
    port = split(address)[1]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(("", port))
        taken = answers(f"127.0.0.1:{port}")
        why = "is taken by another process"
    except OSError as error:
        taken = True
        why = "is taken by another process" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    if taken:
        raise ConfigError(f"{flag}: port {port} of {address} {why}: end that process or give another port.")


def answers(address: str) -> bool:
    """Return whether something accepts connections at ``host:port``, or this process cannot open any to find out."""
    try:
        connect(address).close()
    except OSError as error:
        return error.errno in OWN_LIMITS
    return True
