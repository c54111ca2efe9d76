"""async applies every push once, under 1,000 random kills and reconnects of its clients: counted in the parameters."""

import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from pushing_client import DENSE, Own, push_until
from support.cutting_proxy import CuttingProxy
from support.processes import PATIENCE
from support.service_processes import by_hand, client

BREAKS, KILLS, CLIENTS, SLOTS = 1000, 200, 4, 400
SECS = 240.0 * PATIENCE


@dataclass
class Clients:
    """Clients, each with a number of its own in ``counts``; those that are killed have a successor.

    Attributes:
        hosts: The addresses that they connect to.
        directory: Of their journals.
        killed: The slots of those that were killed in a push.
    """

    hosts: str
    directory: Path
    killed: set[int] = field(default_factory=set)
    started: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pushing_client"])
        self.over = self._context.Event()

    def start(self) -> None:
        """Start another one."""
        slot = len(self.started)
        own = Own(self.hosts, slot, slot, SLOTS, self.journal(slot), SECS)
        self.started.append(self._context.Process(target=push_until, args=(self.over, own)))
        self.started[-1].start()

    def journal(self, slot: int) -> Path:
        """Return the file in which a client writes down its pushes."""
        return self.directory / f"{slot}.txt"

    def pushes(self, slot: int) -> tuple[int, list[int]]:
        """Return how many pushes a client has begun, and the steps of those that have returned."""
        lines = self.journal(slot).read_text().splitlines() if self.journal(slot).exists() else []
        return lines.count("b"), [int(line.split()[1]) for line in lines if line.startswith("d")]

    def kill(self, slot: int) -> bool:
        """Kill a client with SIGKILL; return whether that was in a push."""
        process = self.started[slot]
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join(30 * PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        begun, returned = self.pushes(slot)
        self.killed.add(slot)
        return begun > len(returned)

    def end(self) -> None:
        """Let those that live end after their present push."""
        self.over.set()
        for slot, process in enumerate(self.started):
            process.join(60 * PATIENCE)
            assert process.exitcode == (-signal.SIGKILL if slot in self.killed else 0), slot


@pytest.mark.slow
@pytest.mark.timeout(SECS + 120 * PATIENCE)
def test_every_push_counts_once_under_a_thousand_kills_and_reconnects(tmp_path: Path) -> None:
    """A push that has returned is in all parameters once, one whose client was killed in none or in all of them."""
    seed = int(os.environ.get("TFPS_KILLS_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"TFPS_KILLS_SEED={seed}")
    random_, in_push = random.Random(seed), 0
    with by_hand(tmp_path, 2, "--save_checkpoint_secs=600") as servers:  # a service that begins again loses pushes
        proxies = [
            CuttingProxy(int(host.rpartition(":")[2]), seed + i) for i, host in enumerate(servers.hosts.split(","))
        ]
        clients = Clients(",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies), tmp_path)
        try:
            for _ in range(CLIENTS):
                clients.start()
            deadline, live = time.monotonic() + SECS, list(range(CLIENTS))
            while (cuts := sum(proxy.cuts for proxy in proxies)) + in_push < BREAKS or in_push < KILLS:
                assert time.monotonic() < deadline, f"{cuts} cuts and {in_push} kills in {SECS:g} s"
                time.sleep(0.3 * random_.random())
                slot = random_.choice(live)
                if clients.pushes(slot)[0] and len(clients.started) < SLOTS:
                    in_push += clients.kill(slot)
                    live[live.index(slot)] = len(clients.started)
                    clients.start()
            for proxy in proxies:
                proxy.is_cutting = False
            clients.end()
        finally:
            for process in clients.started:
                process.kill()
            for proxy in proxies:
                proxy.close()
        print(f"{cuts} connections cut, {in_push} clients killed in a push")
        with client(servers.hosts) as ps:
            _check(ps.pull(), ps.step, clients)


def _check(found: dict[str, np.ndarray], step: int, clients: Clients) -> None:
    """Count the pushes in the parameters."""
    for name in DENSE:
        np.testing.assert_array_equal(found[name], np.full(5, step, np.float32))
    assert found["counts"].sum() == step
    steps = []
    for slot in range(len(clients.started)):
        begun, returned = clients.pushes(slot)
        steps += returned
        most = begun if slot in clients.killed else len(returned)
        assert len(returned) <= found["counts"][slot] <= most, (slot, begun, returned, found["counts"][slot])
        assert begun - len(returned) <= (slot in clients.killed)
    assert len(set(steps)) == len(steps)  # in async each push has an update of its own
