"""The faults of a parameter service: what each does. Each proves that it has happened."""

import contextlib
import json
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import network
import proc
import storage
from service import PORT, Run

from tfps.client import message as messages
from tfps.client import receive
from tfps.client.message import Message

_TRIES, _GARBAGE, _MANY = 20, 200, 1000
_MOST_MB = 200.0
_HELLO = {"method": "hello", "protocol": "1", "worker": "0", "token": "", "release": "faults"}


def client_killed(run: Run) -> None:
    """A client in a push; another one takes its place."""
    for _ in range(_TRIES):
        run.fault()
        in_push = run.kill_client(1)
        run.start_client(1)
        if in_push:
            return
        run.go_on()
    raise proc.NotInjectedError("no client was in a push")


def killed(index: int) -> Callable[[Run], None]:
    """Return the fault of a server that is killed."""

    def act(run: Run) -> None:
        pid = run.server(index)
        run.fault(loses=True)
        proc.kill([pid])
        run.healed()
        run.keep_resumed()

    return act


def restarted(run: Run) -> None:
    """All servers are stopped, and started again by the same command."""
    old = {run.server(0), run.server(1)}
    run.fault()
    if run.stop() != 143:
        raise proc.NotInjectedError("it did not stop as asked to")
    run.start()
    run.until(lambda: all(_listens(run, index) for index in (0, 1)), "servers")
    if old & {run.server(0), run.server(1)}:
        raise proc.NotInjectedError("a server is the old one")
    for worker, slot in list(run.live.items()):
        if not run.clients[slot].is_alive():  # it was told that the service ends
            run.start_client(worker)


def _listens(run: Run, index: int) -> bool:
    try:
        return run.server(index) > 0
    except proc.NotInjectedError:
        return False


def frozen(run: Run) -> None:
    """A server is frozen."""
    pid = run.server(1)
    run.fault()
    proc.stop(pid)
    time.sleep(5)
    proc.go_on(pid)
    run.healed()


def cut(kind: str, secs: float) -> Callable[[Run], None]:
    """Return the fault of a server that nobody reaches for some seconds."""

    def act(run: Run) -> None:
        rules = network._rules(PORT + 1, kind)
        run.fault()
        network._apply("-A", rules)
        try:
            network._prove(PORT + 1, ConnectionRefusedError if kind == "reset" else TimeoutError)
            time.sleep(secs)
            if not network._packets_hit():
                raise proc.NotInjectedError("no packet was hit")
        finally:
            network._apply("-D", rules)
        run.healed()

    return act


def unwritable(breaking: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Callable[[Run], None]:
    """Return the fault of a model directory that cannot be written until it is mended; clients push meanwhile."""

    def act(run: Run) -> None:
        run.fault()
        with breaking(run):
            run.until(lambda: run.has_said(storage._SAYS, run.at), "a word about the directory")
            run.go_on()
        run.healed()
        run.until(lambda: run.has_said(r"^(ps/0 +\| )?saved ", run.since), "a checkpoint")

    return act


@contextlib.contextmanager
def _connected(index: int, client: str = "") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", PORT + index), 30) as connection:
        if client:
            messages.send(connection, Message({**_HELLO, "client": client}))
            receive.receive(connection)
        yield connection


def _push_of(size: int) -> bytes:
    """Return the header of a push of so many numbers."""
    announced = {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}
    header = json.dumps({"__metadata__": {"method": "push", "push": "1", "servers": "{}"}, "d/a": announced}).encode()
    return struct.pack("<Q", len(header)) + header


def slow(run: Run) -> None:
    """Clients that have sent a half of a push, of a half of a header, or nothing since their hello."""
    whole = _push_of(5) + bytes(20)
    with contextlib.ExitStack() as stack:
        open_ = [stack.enter_context(_connected(n % 2, f"slow-{n}")) for n in range(20)]
        run.fault()
        for number, connection in enumerate(open_):
            connection.sendall(whole[: [4, 50, len(whole) - 7][number % 3]])
        for _ in range(5):
            run.go_on()
        time.sleep(3)
        for connection in open_[::3]:  # those with half of a size: still waited for
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if connection.recv(1) == b"":
                    raise proc.NotInjectedError("a slow client was closed")
    run.healed()


def garbage(run: Run) -> None:
    """Random bytes, headers that announce 10 GB, and headers that are none."""
    random_ = random.Random(run.at)
    before = [proc.resident_mb(run.server(index)) for index in (0, 1)]
    run.fault()
    sent = 0
    for number in range(_GARBAGE):
        kinds = [
            random_.randbytes(1 + random_.randrange(4096)),
            _push_of(2_500_000_000),
            b"\xff" * 8,
            bytes(64),
        ]
        client = f"garbage-{number}" if number % 3 else ""
        with contextlib.suppress(OSError), _connected(number % 2, client) as connection:
            connection.sendall(kinds[number % 4])
            sent += 1
    if sent < _GARBAGE / 2:
        raise proc.NotInjectedError(f"{sent} of {_GARBAGE} were sent")
    run.go_on()
    grown = max(proc.resident_mb(run.server(index)) - mb for index, mb in enumerate(before))
    if grown > _MOST_MB:
        raise RuntimeError(f"a server has grown by {grown:.0f} MB")
    run.healed()


def thousand(run: Run) -> None:
    """Connections: half of them say hello, the others nothing."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with contextlib.ExitStack() as stack:
        run.fault()
        open_ = [stack.enter_context(_connected(n % 2, f"idle-{n}" if n % 4 < 2 else "")) for n in range(_MANY)]
        handles = sum(len(os.listdir(f"/proc/{run.server(index)}/fd")) for index in (0, 1))
        if handles < _MANY / 2 or len(open_) < _MANY:
            raise proc.NotInjectedError(f"the servers have {handles} open files")
        for _ in range(3):
            run.go_on()
    run.healed()


@dataclass(frozen=True)
class Fault:
    """A row: what happens, what has to come of it, who does it, and the longest time without a push of anybody."""

    title: str
    expected: str
    act: Callable[[Run], None]
    pause: float | None = None


_NONE, _SAVED = "goes on; no push lost", "goes on from the last checkpoint"
FAULTS = {
    "client_killed": Fault("a client is killed in a push", _NONE, client_killed),
    "ps_killed": Fault("ps/1 is killed", _SAVED, killed(1)),
    "ps0_killed": Fault("ps/0 is killed", _SAVED, killed(0)),
    "ps_restarted": Fault("the service is stopped, and started again", _NONE, restarted),
    "ps_frozen_5s": Fault("ps/1 is frozen for 5 s", _NONE, frozen),
    "cut_reset_3s": Fault("ps/1 is cut off for 3 s: packets reset", _NONE, cut("reset", 3)),
    "cut_dropped_5s": Fault("ps/1 is cut off for 5 s: packets dropped", _NONE, cut("dropped", 5)),
    "disk_full": Fault(
        "the disk is full until a save fails", f"{_NONE}; saves when mended", unwritable(storage.full), 5.0
    ),
    "disk_read_only": Fault(
        "the disk is read-only for a save", f"{_NONE}; saves when mended", unwritable(storage.read_only), 5.0
    ),
    "slow_clients": Fault("20 slow clients, with half of a message", _NONE, slow, 5.0),
    "garbage": Fault("garbage on the ports, 200 times", f"{_NONE}; memory stays", garbage, 5.0),
    "thousand": Fault("a thousand connections", _NONE, thousand, 5.0),
}
