"""A parameter service that lasts as long as a ``with`` block of a Python program, in processes of its own."""

import collections
import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from tfps.client.connect import HOSTS
from tfps.errors import ServiceError
from tfps.timeouts import KILL_AFTER_SECS

_LOG_LINES = 10
_SERVING = "training: serving on"
_END_SECS = KILL_AFTER_SECS + 3.0


class Service:
    """A service in processes of its own: a context of its addresses, or until ``close``.

    Attributes:
        address: The addresses of the servers, for ``tfps.connect``.
    """

    def __init__(self, running: contextlib.ExitStack, address: str) -> None:
        self._running, self.address = running, address

    def close(self) -> None:
        """Save, and end the servers."""
        self._running.close()

    def __enter__(self) -> str:
        return self.address

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tfps service at {self.address}>"


def serve(
    num_ps: int = 1,
    optimizer: str = "sgd",
    learning_rate: float = 0.01,
    model_dir: str | os.PathLike[str] | None = None,
    **flags: object,
) -> Service:
    """Serve parameters on this machine, and return the service. Needs TensorFlow.

    Runs ``tfps launch --serve`` with these flags. It ends with ``close``, with a block, or with this process.

    Args:
        num_ps: The number of servers.
        optimizer: Their optimizer, a value of ``--optimizer``.
        learning_rate: Its learning rate.
        model_dir: The directory of checkpoints and logs; ``None`` for a temporary one.
        flags: Other flags of ``tfps launch --serve`` by name, like ``mode="sync", num_workers=25``.

    Raises:
        ServiceError: If the service cannot start; quotes its errors.

    Example::

        with tfps.serve(optimizer="sgd", learning_rate=0.1) as address, tfps.connect(address) as ps:
            ps.init({"w": w})
            ps.push({"w": gradient})

        service = tfps.serve(num_ps=2)  # in a notebook
        ps = tfps.connect(service.address)
        service.close()
    """
    given = {"num_ps": num_ps, "optimizer": optimizer, "learning_rate": learning_rate, **flags}
    with contextlib.ExitStack() as stack:
        directory = model_dir or stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        argv = [f"--{name}={_text(value)}" for name, value in {**given, "model_dir": directory}.items()]
        address = stack.enter_context(_running(argv))
        return Service(stack.pop_all(), address)


def _text(value: object) -> str:
    return str(int(value) if isinstance(value, bool) else value)


@contextlib.contextmanager
def _running(argv: Sequence[str]) -> Iterator[str]:
    """Run ``tfps launch --serve`` with some flags while this context lasts; return the addresses."""
    command = [sys.executable, "-m", "tfps.client.attended", "launch", "--serve", *argv]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that Ctrl-C is for this process
    )
    assert process.stdout
    assert process.stdin
    os.register_at_fork(after_in_child=process.stdin.close)  # the service ends with this process, not with a child
    said: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
    addresses: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, said, addresses), daemon=True)
    reader.start()
    try:
        if (found := addresses.get()) is None:
            raise ServiceError("the service did not start:\n" + "\n".join(f"    {line}" for line in said))
        yield found
    finally:
        _end(process)
        reader.join()


def _read(output: IO[str], said: collections.deque[str], addresses: queue.Queue[str | None]) -> None:
    """Run in a thread: read what the service says. Its addresses count when it serves."""
    found = ""
    for line in output:
        said.append(line.rstrip())
        found = line.rstrip().removeprefix(f"{HOSTS}=") if line.startswith(f"{HOSTS}=") else found
        if _SERVING in line:
            addresses.put(found)
    addresses.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """Let the service save and end; kill it if it does not."""
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(_END_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
