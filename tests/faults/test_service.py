"""A parameter service that is killed, frozen, stopped and flooded: what is in the parameters is counted by themselves.

Each push adds 1 to every number of every parameter, on all servers.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.processes import (
    PATIENCE,
    Process,
    children_of,
    load_variable,
    processes,
    session_leaders,
    summary,
    wait_gone,
)
from support.service_processes import QUICK, by_hand, client

from tfps.client.connect import connect
from tfps.errors import PeerLostError, ServiceEndedError, ServiceError

NAMES = ("a", "b", "c")
_PAUSE_SECS = 0.05
MINUS_ONES = {name: -np.ones(5, np.float32) for name in NAMES}


class Pushing:
    """Clients that push in the background until the service ends, and check what they read; one may be bad.

    They pause: a service tells of its steps each second, and has to do so before its last one also on a fast machine.
    """

    def __init__(self, hosts: str, clients: int = 2, bad: int | None = None) -> None:
        self._hosts, self._bad = hosts, bad
        self._pool = ThreadPoolExecutor(clients)
        self.over = threading.Event()
        self._counts: list[Future[int]] = [self._pool.submit(self._push, worker) for worker in range(clients)]

    def _push(self, worker: int) -> int:
        """Return how many pushes were applied."""
        count, factor = 0, np.float32(1e30 if worker == self._bad else 1)
        gradients = {name: value * factor for name, value in MINUS_ONES.items()}
        with client(self._hosts, worker) as ps, contextlib.suppress(ServiceEndedError):
            ps.init({name: np.zeros(5, np.float32) for name in NAMES})
            while not self.over.is_set():
                ps.push(gradients)
                count += 1
                found = {float(number) for value in ps.pull().values() for number in value}
                assert len(found) == 1, found
                time.sleep(_PAUSE_SECS)
        return count

    def counts(self) -> list[int]:
        """Return what each has counted."""
        return [count.result(60 * PATIENCE) for count in self._counts]


@contextlib.contextmanager
def launched(directory: Path, num_ps: int, *flags: str) -> Iterator[tuple[Process, str]]:
    """Run ``tfps launch --serve``; return its process, and the addresses."""
    with processes() as started:
        argv = [f"--num_ps={num_ps}", f"--model_dir={directory / 'job'}", *QUICK, *flags]
        started.append(Process(directory / f"launch-{time.monotonic_ns()}.out", "launch", "--serve", *argv))
        started[0].wait_for("TFPS_PS_HOSTS=", 60)
        [line] = [line for line in started[0].output().splitlines() if line.startswith("TFPS_PS_HOSTS=")]
        yield started[0], line.partition("=")[2]


def check_saved(directory: Path, step: int) -> None:
    """Fail unless the newest checkpoint has exactly ``step`` updates in every parameter."""
    assert load_variable(directory / "job", "global_step") == step
    for name in NAMES:
        np.testing.assert_array_equal(load_variable(directory / "job", name), np.full(5, step, np.float32))


@pytest.mark.parametrize("seed", range(3))
def test_a_server_of_launch_is_killed(tmp_path: Path, seed: int) -> None:
    """All begin again from the last checkpoint; clients go on by themselves, and the service ends by itself."""
    with launched(tmp_path, 2, "--max_steps=150") as (launch, hosts):
        pushing = Pushing(hosts)
        launch.wait_for_step(40 + 10 * seed, 60)
        os.kill(session_leaders(children_of(launch.pid))[seed % 2], signal.SIGKILL)
        assert launch.wait(90) == 0, launch.output()
        assert "restarted after SIGKILL" in launch.output()
        assert sum(pushing.counts()) >= 150
    check_saved(tmp_path, 150)
    assert summary(tmp_path / "job")["status"] == "done"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_alone_is_started_again(tmp_path: Path, lost: int) -> None:
    """The other one still has parameters, which are newer than the checkpoint: it begins again, too."""
    with by_hand(tmp_path, 2, "--max_steps=200") as servers:
        pushing = Pushing(servers.hosts)
        servers.tasks[0].wait_for_step(60, 60)
        servers.replace(lost)
        for task in servers.tasks:
            assert task.wait(90) == 0, task.output()
        assert "resumed from" in servers.tasks[0].output()
        assert sum(pushing.counts()) >= 200
    check_saved(tmp_path, 200)


@pytest.mark.parametrize("lost", [0, 1])
def test_krum_leaves_out_a_bad_worker_also_after_a_loss(tmp_path: Path, lost: int) -> None:
    """One push of the good ones is in each update, on both servers; none of the bad one, whose pushes are huge."""
    flags = ("--mode=sync", "--num_workers=5", "--aggregate=krum", "--max_steps=120")
    with by_hand(tmp_path, 2, *flags) as servers:
        pushing = Pushing(servers.hosts, clients=5, bad=lost)
        servers.tasks[0].wait_for_step(30, 60)
        servers.replace(lost)
        for task in servers.tasks:
            assert task.wait(90) == 0, task.output()
        assert "resumed from" in servers.tasks[0].output()
        assert min(pushing.counts()) >= 60
    check_saved(tmp_path, 120)


def test_a_server_that_never_comes_back(tmp_path: Path) -> None:
    """The first one gives up, and names it; so do the clients."""
    with by_hand(tmp_path, 2, "--start_timeout_secs=5") as servers, client(servers.hosts) as ps:
        ps.init({"a": np.zeros(3), "b": np.zeros(3)})
        ps.push({"a": np.ones(3)})
        servers.tasks[1].signal(signal.SIGKILL)
        assert servers.tasks[0].wait(60) == PeerLostError.exit_code, servers.tasks[0].output()
        assert servers.hosts.partition(",")[2] in servers.tasks[0].output()


def test_servers_that_are_stopped_resume(tmp_path: Path) -> None:
    """No update is lost, and the run is the same one for clients that wait."""
    with launched(tmp_path, 2) as (launch, hosts), client(hosts) as ps:
        ps.init({name: np.zeros(5, np.float32) for name in NAMES})
        steps = [ps.push(MINUS_ONES) for _ in range(20)]
        launch.signal(signal.SIGTERM)
        assert launch.wait(30) == 143, launch.output()
        check_saved(tmp_path, steps[-1])
    with launched(tmp_path, 1) as (launch, hosts), client(hosts) as ps:
        assert ps.step == 20
        assert ps.push(MINUS_ONES) == 21
        launch.signal(signal.SIGINT)
        assert launch.wait(30) == 143, launch.output()
    check_saved(tmp_path, 21)


@pytest.mark.parametrize("stopped", [[0], [0, 1]])
def test_clients_wait_for_servers_that_are_stopped(tmp_path: Path, stopped: list[int]) -> None:
    """As on a drained machine: the servers save, clients go on with those that come back, and no update is lost."""
    with by_hand(tmp_path, 2, "--save_checkpoint_secs=600") as servers:
        pushing = Pushing(servers.hosts)
        for step in (30, 60, 90):
            servers.tasks[0].wait_for_step(step, 60)
            for index in stopped:
                servers.tasks[index].signal(signal.SIGTERM)
            assert [servers.tasks[index].wait(30) for index in stopped] == [143] * len(stopped)
            for index in stopped:
                servers.tasks[index] = servers.start(index)
            servers.tasks[0].wait_for("resumed from", 60)
        servers.tasks[0].wait_for_step(120, 60)
        pushing.over.set()
        total = sum(pushing.counts())
        with client(servers.hosts) as ps:
            assert ps.step == total
            for value in ps.pull().values():
                np.testing.assert_array_equal(value, np.full(5, total, np.float32))


@pytest.mark.parametrize("index", [0, 1])
def test_a_frozen_server(tmp_path: Path, index: int) -> None:
    """For a few seconds: clients wait, and no update is lost or made twice."""
    with by_hand(tmp_path, 2) as servers:
        pushing = Pushing(servers.hosts)
        servers.tasks[0].wait_for_step(30, 60)
        servers.tasks[index].signal(signal.SIGSTOP)
        time.sleep(3)
        servers.tasks[index].signal(signal.SIGCONT)
        time.sleep(1)
        pushing.over.set()
        total = sum(pushing.counts())
        with client(servers.hosts) as ps:
            assert ps.step == total
        for task in servers.tasks:
            task.signal(signal.SIGTERM)
        assert [task.wait(30) for task in servers.tasks] == [143, 143]
    check_saved(tmp_path, total)


@pytest.mark.parametrize("index", [0, 1])
def test_a_server_that_stays_frozen(tmp_path: Path, index: int) -> None:
    """Its kernel goes on acknowledging; clients and ps/0 notice all the same, and name it."""
    with by_hand(tmp_path, 2, "--start_timeout_secs=5") as servers, connect(servers.hosts, retry_secs=5) as ps:
        ps.init({name: np.zeros(5, np.float32) for name in NAMES})
        ps.push(MINUS_ONES)
        servers.tasks[index].signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError, match=servers.hosts.split(",")[0] if index == 0 else "not ready|no answer"):
            list(iter(lambda: ps.push(MINUS_ONES), 0))
        if index:
            assert servers.tasks[0].wait(60) == PeerLostError.exit_code, servers.tasks[0].output()
            assert servers.hosts.partition(",")[2] in servers.tasks[0].output()
        servers.tasks[index].signal(signal.SIGCONT)


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """A finite gradient makes a parameter infinite: the service ends, and names it."""
    with launched(tmp_path, 1) as (launch, hosts), client(hosts) as ps:
        ps.init({"w": np.zeros(3, np.float32)})
        launch.wait_for("saved", 60)
        with contextlib.suppress(ServiceError, PeerLostError):
            for _ in range(3):
                ps.push({"w": np.full(3, 3e38, np.float32)})
        assert launch.wait(60) == 66, launch.output()
        assert "w holds NaN or Inf" in launch.output()
    assert np.isfinite(load_variable(tmp_path / "job", "w")).all()


def _push_until_killed(hosts: str, worker: int) -> None:
    with connect(hosts, worker=worker) as ps:
        ps.init({name: np.zeros(5, np.float32) for name in NAMES})
        while True:
            ps.push(MINUS_ONES)


def test_clients_are_killed_in_their_pushes(tmp_path: Path) -> None:
    """A push is in all parameters, or in none."""
    context = multiprocessing.get_context("spawn")
    with by_hand(tmp_path, 2) as servers:
        for turn in range(4):
            clients = [context.Process(target=_push_until_killed, args=(servers.hosts, i)) for i in range(4)]
            for each in clients:
                each.start()
            servers.tasks[0].wait_for_step(40 * (turn + 1), 60)
            for each in clients:
                each.kill()
                each.join()
        with client(servers.hosts) as ps:
            found = {float(number) for value in ps.pull().values() for number in value}
            assert found == {float(ps.step)}


def test_a_worker_that_is_killed_leaves_its_place_in_sync(tmp_path: Path) -> None:
    """After ``--worker_timeout_secs``; its gradient, which waited for another, is in no update."""
    context = multiprocessing.get_context("spawn")
    flags = "--mode=sync", "--num_workers=2", "--worker_timeout_secs=2"
    with by_hand(tmp_path, 1, *flags) as servers:
        killed = context.Process(target=_push_until_killed, args=(servers.hosts, 0))
        killed.start()
        with client(servers.hosts, 0) as first, client(servers.hosts, 1) as second:
            first.init({name: np.zeros(5, np.float32) for name in NAMES})
            time.sleep(2)  # it waits for the other worker
            killed.kill()
            killed.join()
            first.close()
            time.sleep(4)
            with client(servers.hosts, 0) as again, ThreadPoolExecutor() as pool:
                twice = {name: 2 * value for name, value in MINUS_ONES.items()}
                pushes = [pool.submit(ps.push, twice) for ps in (again, second)]
                assert [push.result(60) for push in pushes] == [1, 1]
            np.testing.assert_array_equal(second.pull()["a"], np.full(5, 2, np.float32))


def test_a_thousand_connections(tmp_path: Path) -> None:
    """That say nothing: a client is served beside them, and they are closed."""
    with by_hand(tmp_path, 1) as servers, client(servers.hosts) as ps, contextlib.ExitStack() as stack:
        ps.init({"w": np.zeros(3)})
        host, port = servers.hosts.split(":")
        idle = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(900)]
        began = time.monotonic()
        for _ in range(20):
            ps.push({"w": np.ones(3)})
        assert time.monotonic() - began < 10 * PATIENCE
        for each in idle[::100]:
            each.settimeout(30 * PATIENCE)
            assert each.recv(1) == b""  # after the time for a hello


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Its servers end by themselves."""
    with launched(tmp_path, 2) as (launch, hosts):
        with client(hosts) as ps:
            ps.init({"w": np.zeros(3)})
        left = children_of(launch.pid)
        assert len(session_leaders(left)) == 2  # the servers
        launch.signal(signal.SIGKILL)
        wait_gone(left, 40)
