"""Compare libraries for the wire of the service, by what clients do in training: push an array, and get the sum.

Each candidate's server does the same with NumPy (``wires.store``), and checks a token. Clients are processes. The last
candidate is the service of tfps itself. Writes the tables of WIRES.md.
Usage: scripts/bench/wire [--rounds=3] [--wire=NAME ...] [--out=FILE]
"""

import argparse
import importlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from wires import security
from wires.security import Security

WIRES: Mapping[str, str] = {
    "sockets": "plain sockets, safetensors",
    "http_stdlib": "HTTP/1.1, standard library",
    "zeromq": "ZeroMQ",
    "grpc_bytes": "gRPC, bytes",
    "flight": "Arrow Flight",
    "tfps_service": "tfps, the whole service",
}
_START_SECS, LONGEST_SECS = 180.0, 300.0
_HEAD = """Written by `scripts/bench/wire --rounds={rounds}` on {cores} cores of one machine: the median of the rounds.
Every sum is checked. A message is a push and its answer; CPU time is that of the server and all clients together.
"""


class Found(NamedTuple):
    """What was measured: messages a second, and milliseconds of CPU time for each."""

    rate: float
    cpu_ms: float


class Load(NamedTuple):
    """What the clients do: ``count`` messages each."""

    title: str
    num_bytes: int
    clients: int
    count: int
    is_encrypted: bool = False


LOADS = (
    Load("8 kB, 1 client", 8_192, 1, 1_000),
    Load("8 kB, 25 clients", 8_192, 25, 100),
    Load("1 MB, 1 client", 1 << 20, 1, 100),
    Load("1 MB, 25 clients", 1 << 20, 25, 8),
    Load("64 MB, 1 client", 1 << 26, 1, 6),
    Load("64 MB, 2 clients", 1 << 26, 2, 4),
    Load("TLS: 8 kB, 25 clients", 8_192, 25, 60, True),
    Load("TLS: 1 MB, 25 clients", 1 << 20, 25, 6, True),
    Load("TLS: 64 MB, 1 client", 1 << 26, 1, 4, True),
)


def _serve(wire: str, port: int, secure: Security) -> None:
    importlib.import_module(f"wires.{wire}").serve(port, secure)


def _push(wire: str, port: int, secure: Security, load: Load, barrier: Barrier) -> None:
    client = importlib.import_module(f"wires.{wire}").Client(port, secure)
    ones, name = np.ones(load.num_bytes // 4, np.float32), f"{load.num_bytes}-{load.clients}"
    for _ in range(2):
        client.push_pull(name, ones)
    barrier.wait()
    for _ in range(load.count):
        client.push_pull(name, ones)
    barrier.wait()
    total = client.push_pull(name, np.zeros_like(ones))
    assert abs(total[0]) == abs(total[-1]) == load.clients * (load.count + 2), total
    barrier.wait()


def cpu_secs(processes: Sequence[BaseProcess]) -> float:
    """Return the CPU time that processes have used so far."""
    fields = [Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split() for each in processes]
    return sum(int(user) + int(system) for *_, user, system in (each[:13] for each in fields)) / os.sysconf(
        "SC_CLK_TCK"
    )


@contextmanager
def running(
    serve: Callable[[int, Security], None], push: Callable[..., None], secure: Security, load: Any
) -> Iterator[tuple[BaseProcess, Sequence[BaseProcess], Barrier]]:
    """Run a server and ``load.clients`` clients; return them, and the barrier of the clients and the caller."""
    context = multiprocessing.get_context("fork")  # this process has imported none of the libraries
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = context.Process(target=serve, args=(port, secure), daemon=True)
    server.start()
    barrier = context.Barrier(load.clients + 1)
    clients = [
        context.Process(target=push, args=(port, secure, load, barrier), daemon=True) for _ in range(load.clients)
    ]
    try:
        _wait_for(port)
        for client in clients:
            client.start()
        yield server, clients, barrier
    finally:
        for process in (*clients, server):
            if process.pid:
                process.kill()
                process.join()


def _measure(wire: str, load: Load, secure: Security) -> Found:
    """Measure one candidate."""
    with running(partial(_serve, wire), partial(_push, wire), secure, load) as (server, clients, barrier):
        barrier.wait(LONGEST_SECS)
        began, used = time.perf_counter(), cpu_secs([server, *clients])
        barrier.wait(LONGEST_SECS)
        secs, used = time.perf_counter() - began, cpu_secs([server, *clients]) - used
        barrier.wait(LONGEST_SECS)
    count = load.clients * load.count
    return Found(count / secs, 1000 * used / count)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_SECS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"no server on port {port}")


def tables(found: Mapping[tuple[str, Load], Sequence[Found]], wires: Sequence[str], rounds: int) -> str:
    """Return the tables of WIRES.md."""
    lines = [_HEAD.format(rounds=rounds, cores=len(os.sched_getaffinity(0)))]
    for place, title in enumerate(("messages a second", "ms of CPU time a message")):
        lines += [f"| {title} | {' | '.join(load.title for load in LOADS)} |", "|---|" + "---:|" * len(LOADS)]
        for wire in wires:
            cells = [_shown(statistics.median(one[place] for one in found[wire, load])) for load in LOADS]
            lines.append(f"| {WIRES[wire]} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(prog="scripts/bench/wire", description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wire", action="append", choices=WIRES)
    parser.add_argument("--out", type=Path, default=Path("runs/wires.md"), help="file for the table")
    flags = parser.parse_args()
    wires = flags.wire or list(WIRES)
    found: dict[tuple[str, Load], list[Found]] = {}
    with tempfile.TemporaryDirectory() as directory:
        secure = security.make(Path(directory))
        for number in range(1, flags.rounds + 1):
            for load in LOADS:
                for wire in wires:
                    one = _measure(wire, load, secure._replace(is_encrypted=load.is_encrypted))
                    found.setdefault((wire, load), []).append(one)
                    shown = f"{one.rate:10,.4g} a second, {one.cpu_ms:8.4g} ms"
                    print(f"{number}  {load.title:<22} {WIRES[wire]:<28} {shown}", flush=True)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(tables(found, wires, flags.rounds))


if __name__ == "__main__":
    sys.exit(main())
