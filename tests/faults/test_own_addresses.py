"""Workers with addresses of their own, as pods have: one that stands still and comes back, moves, or is cut off.

Each task runs in a network namespace. That of the PS routes between the others, and a name is whatever a file says.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.processes import PATIENCE, PATIENT, Process, load_variable, processes, slow, summary

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("iptables")), reason="needs root, ip and iptables"
)

PORT, STEPS = 2222, 100_000
PLACES = ("ps0", "w0", "w1", "new")


class Net:
    """The namespaces of a PS and three workers, and what their names mean in all of them."""

    def __init__(self) -> None:
        self._prefix = f"tfps{os.getpid()}"
        self._homes = {place: f"10.77.{index}.2" for index, place in enumerate(PLACES)}
        self._homes["ps0"] = "10.77.99.1"

    def name(self, place: str) -> str:
        """Return the name of a namespace."""
        return f"{self._prefix}{place}"

    def make(self) -> None:
        """Make them all."""
        for place in PLACES:
            _ip("netns", "add", self.name(place))
            Path("/etc/netns", self.name(place)).mkdir(parents=True)
            self.inside(place, "ip", "link", "set", "lo", "up")
        self.inside("ps0", "ip", "address", "add", "10.77.99.1/32", "dev", "lo")
        self.inside("ps0", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for index, place in enumerate(PLACES[1:], 1):
            self._join(place, index)
        self.move("w1", "w1")

    def _join(self, place: str, index: int) -> None:
        hub, leaf = f"v{os.getpid()}h{index}", f"v{os.getpid()}l{index}"
        _ip("link", "add", hub, "netns", self.name("ps0"), "type", "veth", "peer", leaf, "netns", self.name(place))
        for where, link, address in (("ps0", hub, 1), (place, leaf, 2)):
            self.inside(where, "ip", "address", "add", f"10.77.{index}.{address}/24", "dev", link)
            self.inside(where, "ip", "link", "set", link, "up")
        self.inside(place, "ip", "route", "add", "default", "via", f"10.77.{index}.1")

    def move(self, name: str, place: str) -> None:
        """Let a worker's name mean another place, for everyone."""
        homes = {**{host: self._homes[host] for host in ("ps0", "w0", "w1")}, name: self._homes[place]}
        reported = "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in homes.items())
        for each in PLACES:
            Path("/etc/netns", self.name(each), "hosts").write_text(reported)

    def inside(self, place: str, *command: str) -> None:
        """Run a command in a namespace."""
        subprocess.run(["ip", "netns", "exec", self.name(place), *command], check=True, timeout=10)

    def remove(self) -> None:
        """Delete them all."""
        for place in PLACES:
            subprocess.run(["ip", "netns", "delete", self.name(place)], check=False, timeout=10)
            shutil.rmtree(Path("/etc/netns", self.name(place)), ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


class Job:
    """A job of 1 PS and 2 workers, each in its place."""

    def __init__(
        self, tmp_path: Path, net: Net, started: list[Process], *flags: str, env: Mapping[str, str] = PATIENT
    ) -> None:
        (tmp_path / "slow.py").write_text(slow(0.05))
        self._tmp_path, self._net, self._started, self._env = tmp_path, net, started, env
        self._flags = [
            f"--ps_hosts=ps0:{PORT}",
            f"--worker_hosts=w0:{PORT},w1:{PORT}",
            f"--model={tmp_path / 'slow.py'}",
            f"--model_dir={tmp_path / 'm'}",
            "--steps_to_validate=1",
            *flags,
        ]
        self.ps, self.chief = self.start("ps", 0, "ps0"), self.start("worker", 0, "w0")
        self.worker = self.start("worker", 1, "w1")

    def start(self, job: str, index: int, place: str) -> Process:
        """Start a task somewhere."""
        under = ["ip", "netns", "exec", self._net.name(place)]
        output = self._tmp_path / f"{job}-{index}-{len(self._started)}.out"
        me = (f"--job_name={job}", f"--task_index={index}")
        self._started.append(Process(output, *self._flags, *me, under=under, **self._env))
        return self._started[-1]

    @property
    def step(self) -> int:
        """The chief's step."""
        return max(map(int, re.findall(r"^step=(\d+)", self.chief.output(), re.MULTILINE)), default=0)

    def go_on(self, secs: float, steps: int = 10) -> float:
        """Wait until the chief has made some steps more; returns how long that took."""
        began, first = time.monotonic(), self.step
        while self.step < first + steps:
            assert time.monotonic() - began < secs * PATIENCE, f"at step {first} for {secs} s:\n{self.said()}"
            for task in (self.ps, self.chief):
                assert task.poll() is None, self.said()
            time.sleep(0.1)
        return time.monotonic() - began

    def said(self) -> str:
        """Return the ends of what all have said."""
        return "\n".join(f"--- {task._output.name}: {task.poll()}\n{task.output()[-1500:]}" for task in self._started)

    def stop(self, *tasks: Process) -> None:
        """Tell some tasks to stop, which they do in order."""
        for task in tasks:
            task.signal(signal.SIGTERM)
        assert [task.wait(100) for task in tasks] == [143] * len(tasks), self.said()


@pytest.fixture
def net() -> Iterator[Net]:
    """Namespaces that are gone in the end."""
    made = Net()
    try:
        made.make()
        yield made
    finally:
        made.remove()


@contextlib.contextmanager
def job(tmp_path: Path, net: Net, mode: str, *flags: str, env: Mapping[str, str] = PATIENT) -> Iterator[Job]:
    """A job that trains."""
    with processes() as started:
        running = Job(tmp_path, net, started, f"--mode={mode}", f"--max_steps={STEPS}", *flags, env=env)
        running.go_on(60)
        yield running


def weight_per_step(model_dir: Path, mode: str, others: Sequence[float] = ()) -> None:
    """Fail unless each step in sync was the exact mean of both workers' gradients."""
    del others
    if mode == "sync":
        assert load_variable(model_dir, "weight") == -1.5 * summary(model_dir)["global_step"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_comes_back_when_it_was_replaced_ends_alone(tmp_path: Path, net: Net, mode: str) -> None:
    """It says that it was replaced and ends with 170; in sync all go on in 15 s, each step the exact mean.

    It has stood for longer than a step may take, which does not count: it could take none.
    """
    with job(tmp_path, net, mode, "--stall_timeout_secs=30") as running:
        stalled, stopped_at = running.worker, time.monotonic()
        stalled.signal(signal.SIGSTOP)
        time.sleep(3)
        net.move("w1", "new")
        new = running.start("worker", 1, "new")
        new.wait_for("step=", 40)
        running.go_on(15)
        time.sleep(max(0.0, stopped_at + 33.0 - time.monotonic()))
        stalled.signal(signal.SIGCONT)
        assert stalled.wait(100) == 170, running.said()
        assert "another process replaced this task" in stalled.output()
        running.go_on(15, 40)
        assert [task.poll() for task in (running.ps, running.chief, new)] == [None] * 3
        running.stop(running.chief, new, running.ps)
    weight_per_step(tmp_path / "m", mode)


def test_a_chief_that_comes_back_when_the_job_is_done_changes_nothing(tmp_path: Path, net: Net) -> None:
    """It stood still while another one ended the job: it ends alone, with 170, and the summary still says done."""
    with processes() as started:
        running = Job(tmp_path, net, started, "--mode=async", "--max_steps=400", "--stall_timeout_secs=30")
        running.go_on(60)
        running.chief.signal(signal.SIGSTOP)
        time.sleep(3)
        net.move("w0", "new")
        new = running.start("worker", 0, "new")
        assert [task.wait(150) for task in (new, running.worker, running.ps)] == [0, 0, 0], running.said()
        before = (tmp_path / "m" / "summary.json").read_bytes()
        running.chief.signal(signal.SIGCONT)
        assert running.chief.wait(100) == 170, running.said()
    assert (tmp_path / "m" / "summary.json").read_bytes() == before
    assert summary(tmp_path / "m")["status"] == "done"
    assert not (tmp_path / "m" / ".chief").exists()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_that_reach_the_ps_need_not_reach_each_other(tmp_path: Path, net: Net, mode: str) -> None:
    """A partition between the workers, longer than a lost one is waited for, ends nobody and stops nothing."""
    with job(tmp_path, net, mode, env={}) as running:
        net.inside("ps0", "iptables", "-P", "FORWARD", "DROP")
        until = time.monotonic() + 28
        while time.monotonic() < until:
            running.go_on(10, 2)
        assert [task.poll() for task in (running.ps, running.chief, running.worker)] == [None] * 3
        running.stop(running.chief, running.worker, running.ps)
    weight_per_step(tmp_path / "m", mode)


def test_workers_without_ps_outlive_a_cut_between_two_of_them(tmp_path: Path, net: Net) -> None:
    """Both reach the chief, so neither is taken for lost: all go on when it is over, and no step is lost."""
    (tmp_path / "slow.py").write_text(slow(0.05))
    flags = [f"--worker_hosts=ps0:{PORT},w0:{PORT},w1:{PORT}", f"--model={tmp_path / 'slow.py'}", "--mode=allreduce"]
    flags += [f"--model_dir={tmp_path / 'm'}", "--steps_to_validate=1", f"--max_steps={STEPS}"]
    with processes() as started:
        for index, place in enumerate(PLACES[:3]):
            me, under = ("--job_name=worker", f"--task_index={index}"), ["ip", "netns", "exec", net.name(place)]
            started.append(Process(tmp_path / f"{index}.out", *flags, *me, under=under))
        started[0].wait_for_step(20, 60)
        net.inside("ps0", "iptables", "-P", "FORWARD", "DROP")
        time.sleep(60)  # what is not acknowledged for 20 s ends a connection; a lost worker is waited for as long
        said = [task.output() for task in started]
        assert [task.poll() for task in started] == [None] * 3, said
        assert any("do all of them reach each other?" in text for text in said), said
        net.inside("ps0", "iptables", "-P", "FORWARD", "ACCEPT")
        started[0].wait_for("all workers continue from step", 60)
        for task in started:
            task.signal(signal.SIGTERM)
        assert [task.wait(100) for task in started] == [143] * 3
    step = summary(tmp_path / "m")["global_step"]
    assert load_variable(tmp_path / "m", "weight") == pytest.approx(-7 / 3 * step, rel=1e-5)


@pytest.mark.parametrize("how", ["killed", "its place is gone"])
def test_a_worker_whose_name_moves_is_back_at_once(tmp_path: Path, net: Net, how: str) -> None:
    """As every pod that is started again: sync goes on in 15 s after the start of the new one, and nobody is lost."""
    with job(tmp_path, net, "sync") as running:
        if how != "killed":
            net.inside("w1", "iptables", "-P", "OUTPUT", "DROP")  # so that its kernel says no goodbye
        running.worker.end()
        time.sleep(1)
        net.move("w1", "new")
        new = running.start("worker", 1, "new")
        new.wait_for("training: mode", 50)
        running.go_on(15)
        assert "lost" not in running.chief.output()
        assert [task.poll() for task in (running.ps, running.chief, new)] == [None] * 3
        running.stop(running.chief, new, running.ps)
    weight_per_step(tmp_path / "m", "sync")
