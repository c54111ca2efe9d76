"""Measure how many small pushes a second a server of the parameter service takes from many clients, and their CPU time.

Each client is a process, and pushes gradients of 8 kB and of 40 bytes in one message. The sum is checked.
Usage: scripts/bench/pushes [--clients=25] [--count=400] [--kb=8]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import wire
from wires import security
from wires.security import Security
from wires.tfps_service import serve

import tfps


def _push(port: int, secure: Security, flags: argparse.Namespace, barrier: wire.Barrier) -> None:
    gradients = {"w": np.ones(flags.kb * 256, np.float32), "b": np.ones(10, np.float32)}
    with tfps.connect(f"127.0.0.1:{port}", token=secure.token, start_timeout_secs=180) as ps:
        ps.init({name: np.zeros_like(gradient) for name, gradient in gradients.items()})
        ps.push(gradients)
        barrier.wait()
        for _ in range(flags.count):
            ps.push(gradients)
        barrier.wait()
        assert {float(value[-1]) for value in ps.pull().values()} == {-flags.clients * (flags.count + 1)}
        barrier.wait()


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(prog="scripts/bench/pushes", description=__doc__, allow_abbrev=False)
    for name, default in (("clients", 25), ("count", 400), ("kb", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        secure = security.make(Path(directory))
        with wire.running(serve, _push, secure, flags) as (server, clients, barrier):
            barrier.wait(wire.LONGEST_SECS)
            began, used = time.perf_counter(), [wire.cpu_secs([server]), wire.cpu_secs(clients)]
            barrier.wait(wire.LONGEST_SECS)
            secs, ended = time.perf_counter() - began, [wire.cpu_secs([server]), wire.cpu_secs(clients)]
            barrier.wait(wire.LONGEST_SECS)
    pushes, cores = flags.clients * flags.count, len(os.sched_getaffinity(0))
    server_ms, client_ms = (1000 * (after - before) / pushes for before, after in zip(used, ended, strict=True))
    print(f"{pushes / secs:,.0f} pushes a second of {flags.clients} clients on {cores} cores", end="; ")
    print(f"CPU time of a push: server {server_ms:.2f} ms, client {client_ms:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
