"""A real Ray cluster of two nodes on this machine, with token authentication, ended by the ids of its processes."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from support.processes import alive, environment, run_tfps, wait_gone

HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the machine's own address
NOT_NICE = {"RAY_worker_niceness": "0"}  # by itself Ray lets all others on the machine go first
_UP_SECS = 400.0
_NO_STATISTICS = "--disable-usage-stats"
_MEMORY = "--object-store-memory=100000000"


class RayCluster:
    """The cluster.

    Attributes:
        address: Of the dashboard, ``host:port``.
        env: What a client needs to be let in; the token is in a file.
        token: The token.
    """

    def __init__(self, directory: Path) -> None:
        self.token = secrets.token_hex(32)
        (directory / "token").write_text(self.token)
        self.env = {"RAY_AUTH_TOKEN_PATH": str(directory / "token"), "HOME": str(directory)}
        self._gcs, self._dashboard = _free_ports(2)
        self.address = f"127.0.0.1:{self._dashboard}"
        self._directory = directory

    @property
    def driver_env(self) -> dict[str, str]:
        """What a program needs that is a driver of the cluster."""
        own = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"{HEAD}:{self._gcs}", "RAY_USAGE_STATS_ENABLED": "0"}
        return {**self.env, **own, **NOT_NICE}

    def start(self) -> None:
        """Start both nodes, and wait until they are up."""
        self._try_to(self._start_both)

    def start_head(self) -> None:
        """Start one node, without a dashboard."""
        self._try_to(lambda: self._start_first("--include-dashboard=false", "--num-cpus=2"))

    def _try_to(self, start: Callable[[], None]) -> None:
        for tries_left in (2, 1, 0):
            try:
                start()
                return
            except AssertionError:  # on a busy machine a raylet misses the 30 s that Ray gives it
                if not tries_left:
                    raise
                self.end()

    def _start_both(self) -> None:
        self._start_first("--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard}", "--num-cpus=4")
        self._start(OTHER, f"--address={HEAD}:{self._gcs}", "--num-cpus=2", _MEMORY)
        deadline = time.monotonic() + _UP_SECS
        while (up := self._alive()) < 2:
            assert time.monotonic() < deadline, f"{up} of 2 nodes are up"
            time.sleep(0.5)

    def _start_first(self, *flags: str) -> None:
        self._start(HEAD, "--head", f"--port={self._gcs}", f"--temp-dir={self._directory}", _MEMORY, *flags)

    def _start(self, ip: str, *flags: str) -> None:
        ended = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}", *flags, _NO_STATISTICS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_UP_SECS,
            cwd=self._directory,
            env=environment(**self.env, RAY_AUTH_MODE="token", **NOT_NICE),
            start_new_session=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout

    def _alive(self) -> int:
        """Return how many nodes the cluster has."""
        url = f"http://{self.address}/api/v0/nodes"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
            nodes = json.load(answer)["data"]["result"]["result"]
            return sum(node["state"] == "ALIVE" for node in nodes)
        return 0

    def tfps(self, *args: str, timeout: float = 150, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run ``tfps ARGS`` as a user of the cluster."""
        return run_tfps(*args, timeout=timeout, cwd=self._directory, **{**self.env, **env})

    def submit(self, *flags: str) -> str:
        """Submit a job; return its handle."""
        ended = self.tfps("submit", "--to=ray", f"--address={self.address}", *flags)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip()

    def wait_for(self, handle: str, text: str, secs: float = 400) -> str:
        """Wait until a job's log says ``text``; return the log."""
        deadline = time.monotonic() + secs
        while text not in (said := self.tfps("logs", handle).stdout):
            assert time.monotonic() < deadline, f"{text!r} is not said:\n{said}\n{self.tfps('status', handle).stdout}"
            time.sleep(1)
        return said

    def processes(self) -> list[int]:
        """Return all processes that descend from the cluster's: they have its token's path in their environment."""
        mine = f"RAY_AUTH_TOKEN_PATH={self.env['RAY_AUTH_TOKEN_PATH']}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mine in _read(pid, "environ")]

    def lose(self, ip: str) -> None:
        """Lose a node: kill its raylet, without which none of its workers lives on."""
        [raylet] = [pid for pid in self.processes() if f"--node_ip_address={ip}".encode() in _read(pid, "cmdline")]
        os.kill(raylet, signal.SIGKILL)

    def end(self) -> None:
        """End every process."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            pids = self.processes()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + 5
            while alive(pids) and time.monotonic() < deadline:
                time.sleep(0.1)
        wait_gone(self.processes(), 10)


def _read(pid: int, name: str) -> list[bytes]:
    """Return a file of a process, split by NULs; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:
        return []


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def short_path() -> Iterator[Path]:
    """Yield a directory for Ray, whose sockets' names have no room for a longer one."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Yield a running cluster of two nodes; nothing of it is left in the end."""
    with _running(RayCluster.start) as cluster:
        yield cluster


@contextlib.contextmanager
def ray_node() -> Iterator[RayCluster]:
    """Yield a running cluster of one node for programs on this machine; nothing of it is left in the end."""
    with _running(RayCluster.start_head) as cluster:
        yield cluster


@contextlib.contextmanager
def _running(start: Callable[[RayCluster], None]) -> Iterator[RayCluster]:
    with short_path() as directory:
        cluster = RayCluster(directory)
        try:
            start(cluster)
            yield cluster
        finally:
            cluster.end()
