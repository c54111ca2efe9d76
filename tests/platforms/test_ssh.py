"""``tfps submit --to=hosts --ssh`` through a real sshd: it trains, and nothing outlives the command."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import ECHO, NASTY, Process, alive, argv_of, run_tfps, summary, wait_gone
from support.ssh_engine import sshd

from tfps.cluster.ports import held_ports


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the environment in which ssh reaches the hosts 127.0.0.1 to 127.0.0.3."""
    with sshd(tmp_path_factory.mktemp("ssh")) as environment:
        yield environment


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Return the flags of a cluster of a PS and two workers, each on a host of its own."""
    with held_ports(3) as ports:
        ps, *workers = (f"127.0.0.{n}:{port}" for n, port in enumerate(ports, 1))
        yield ["submit", "--to=hosts", "--ssh", f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}"]


def tasks_of(model_dir: Path) -> list[int]:
    """Return the processes of the tasks that run with a model_dir."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"--model_dir={model_dir}".encode() in argv and b"tfps" in argv and b"submit" not in argv:
                found.append(int(entry.name))
    return found


def test_trains_to_the_end(ssh: dict[str, str], hosts: list[str], tmp_path: Path) -> None:
    """Three hosts train mnist to the end; the command shows it and ends with 0, and no task is left."""
    ended = run_tfps(*hosts, "--model=mnist", "--max_steps=60", "--issync=1", cwd=tmp_path, timeout=110, **ssh)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ps/0     | training: serving 2 workers" in ended.stdout
    assert "done: step 60 after" in ended.stdout
    [model_dir] = (tmp_path / "runs").iterdir()
    assert summary(model_dir)["global_step"] == 60
    assert tasks_of(model_dir) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_tasks_end_in_order_with_the_launcher(
    ssh: dict[str, str], hosts: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """However the launcher ends, asked or killed, every task ends in order: the state is saved, none is left."""
    model_dir = tmp_path / "m"
    launcher = Process(tmp_path / "out", *hosts, "--max_steps=10000000", f"--model_dir={model_dir}", **ssh)
    try:
        launcher.wait_for("examples/s=", 100)
        pids = tasks_of(model_dir)
        assert len(alive(pids)) == 3
        launcher.signal(number)
        assert launcher.wait(100) == (143 if number == signal.SIGTERM else -number)
        wait_gone(pids, 20)
    finally:
        launcher.end()
    assert summary(model_dir)["status"] == "stopped"
    assert list(model_dir.glob("model.ckpt-*.index"))


def test_a_task_that_is_killed_ends_the_job(ssh: dict[str, str], hosts: list[str], tmp_path: Path) -> None:
    """When a task dies on its host, the others are ended, and the command names it and does not end with 0."""
    model_dir = tmp_path / "m"
    launcher = Process(tmp_path / "out", *hosts, "--max_steps=10000000", f"--model_dir={model_dir}", **ssh)
    try:
        launcher.wait_for("examples/s=", 100)
        pids = tasks_of(model_dir)
        [worker] = [pid for pid in pids if b"--task_index=1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(worker, signal.SIGKILL)
        assert launcher.wait(100) == 137
        assert "worker/1 ended with exit code 137" in launcher.output()
        wait_gone(pids, 20)
    finally:
        launcher.end()


def test_values_arrive_as_given(ssh: dict[str, str], hosts: list[str], tmp_path: Path) -> None:
    """Through ssh, the login shell and the host's shell, values full of their characters arrive as they were."""
    odd = tmp_path / NASTY.replace("/", "")
    odd.mkdir()
    (odd / "echo.py").write_text(ECHO)
    flags = [f"--model={odd / 'echo.py'}", f"--data_dir={odd}", f"--model_dir={tmp_path / 'm'}", "--max_steps=20"]
    ended = run_tfps(*hosts, *flags, cwd=tmp_path, timeout=110, **ssh)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    argv = argv_of("\n".join(line for line in ended.stdout.splitlines() if line.startswith("worker/0")))
    assert {f"--model={odd / 'echo.py'}", f"--data_dir={odd}"} <= set(argv)
    assert not list(tmp_path.rglob("spoilt"))


def test_a_host_that_cannot_be_reached_is_reported_before_anything_starts(ssh: dict[str, str], tmp_path: Path) -> None:
    """One of three hosts refuses: its name and ssh's own words, exit 69, and no task was started on the others."""
    hosts = ["--ps_hosts=127.0.0.1:1025", "--worker_hosts=127.0.0.2:1025,127.0.0.9:1025"]
    began = time.monotonic()
    ended = run_tfps("submit", "--to=hosts", "--ssh", *hosts, f"--model_dir={tmp_path / 'm'}", cwd=tmp_path, **ssh)
    assert ended.returncode == 69
    assert "error: 127.0.0.9: ssh: " in ended.stderr
    assert "Connection refused" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "m").exists()
    assert time.monotonic() - began < 250


def test_no_ssh(tmp_path: Path) -> None:
    """Without ssh the command says what to install."""
    hosts = ["--ps_hosts=127.0.0.1:1025", "--worker_hosts=127.0.0.2:1025"]
    ended = run_tfps("submit", "--to=hosts", "--ssh", *hosts, cwd=tmp_path, PATH=str(tmp_path))
    assert ended.returncode == 69
    assert ended.stderr == "error: ssh is not installed: apt-get install openssh-client.\n"
