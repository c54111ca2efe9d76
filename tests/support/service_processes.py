"""A parameter service whose servers are processes that nobody but the test starts again."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from support.processes import PATIENCE, Process, processes

from tfps.client.client import Client
from tfps.client.connect import connect
from tfps.cluster.ports import held_ports

QUICK = ("--optimizer=sgd", "--learning_rate=1", "--save_checkpoint_secs=0.5", "--steps_to_validate=1")


def client(hosts: str, worker: int = 0) -> Client:
    """Return a client that is patient on slow machines."""
    return connect(hosts, worker=worker, start_timeout_secs=60 * PATIENCE, retry_secs=60 * PATIENCE)


class ByHand:
    """Servers that nobody but the test starts again."""

    def __init__(self, directory: Path, ports: list[int], started: list[Process], *flags: str) -> None:
        self._directory, self._started, self._flags = directory, started, flags
        self.hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.tasks = [self.start(index) for index in range(len(ports))]

    def start(self, index: int) -> Process:
        """Start a server."""
        own = [f"--ps_hosts={self.hosts}", f"--task_index={index}", f"--model_dir={self._directory / 'job'}"]
        output = self._directory / f"ps-{index}-{len(self._started)}.out"
        given = {flag.partition("=")[0] for flag in self._flags}
        quick = [flag for flag in QUICK if flag.partition("=")[0] not in given]
        self._started.append(Process(output, "run", "--serve", *own, *quick, *self._flags))
        return self._started[-1]

    def replace(self, index: int) -> None:
        """Kill a server, and start it again."""
        self.tasks[index].signal(signal.SIGKILL)
        self.tasks[index].wait(10)
        self.tasks[index] = self.start(index)


@contextlib.contextmanager
def by_hand(directory: Path, num_ps: int, *flags: str) -> Iterator[ByHand]:
    """Run servers as their own processes."""
    with held_ports(num_ps) as ports, processes() as started:
        yield ByHand(directory, ports, started, *flags)
