"""``tfps submit --to=hosts``: a line for each task, to be started by hand, by a tool, or over ssh."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import changed, job_of
from support.processes import ECHO, NASTY, argv_of, environment, golden, run_tfps, summary

from tfps.cli import main, watch
from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Task
from tfps.errors import ConfigError
from tfps.jobs import display
from tfps.launchers.ssh.launcher import HostsLauncher

SMALL = job_of(
    "mnist",
    python="/venv/bin/python",
    at="/home/me",
    ps_hosts="h0:2222",
    worker_hosts="h1:2222,[fe80::1]:2223",
    model="mnist",
    mode="sync",
    model_dir="/shared/m",
)


@pytest.mark.parametrize("ssh", [False, True])
def test_golden(ssh: bool) -> None:
    """A PS and two workers, to be started by hand and over ssh."""
    plan = HostsLauncher().plan(changed(SMALL, ssh=ssh))
    assert str(plan) == golden(f"hosts{'-ssh' if ssh else ''}.sh", str(plan))
    assert plan.is_printed_only is not ssh


def test_golden_without_ps() -> None:
    """Two workers, without the flag of PS."""
    plan = str(HostsLauncher().plan(changed(SMALL, num_ps=0, ps_hosts=None)))
    assert plan == golden("hosts-without-ps.sh", plan)


def test_golden_service() -> None:
    """Two servers over ssh, each of which reads its secret from its input; by hand, the user's shell has it."""
    hosts = "h0:2222,h1:2222"
    job = changed(SMALL, serve=True, model="service", ps_hosts=hosts, worker_hosts=None, num_workers=3)
    plan = HostsLauncher().plan(changed(job, ssh=True))
    assert str(plan) == golden("hosts-service.sh", str(plan))
    assert HostsLauncher().client_addresses(plan).hosts == hosts.split(",")
    assert "TFPS_TOKEN" not in str(HostsLauncher().plan(job))
    with pytest.raises(ConfigError, match="--ps_hosts is missing"):
        HostsLauncher().plan(changed(job, ps_hosts=None))


def test_lines_run_in_a_shell_with_every_value_as_given(tmp_path: Path) -> None:
    """The printed lines, given to shells, train together; a value full of a shell's characters arrives as it was."""
    odd = tmp_path / NASTY.replace("/", "")
    odd.mkdir()
    model = odd / "echo.py"
    model.write_text(ECHO)
    with held_ports(2) as ports:
        flags = [f"--ps_hosts=127.0.0.1:{ports[0]}", f"--worker_hosts=127.0.0.1:{ports[1]}", "--max_steps=20"]
        paths = [f"--model={model}", f"--data_dir={odd}", f"--model_dir={tmp_path / 'm'}", "--start_timeout_secs=60"]
        planned = run_tfps("submit", "--to=hosts", *flags, *paths, cwd=tmp_path)
        assert planned.returncode == 0, planned.stderr
        lines = planned.stdout.replace("python -m", f"{shlex.quote(sys.executable)} -m").rstrip("\n")
        script = lines.replace("  # on 127.0.0.1\n", " & # on 127.0.0.1\n", 1) + "\nwait $!\n"
        ended = subprocess.run(
            ["sh", "-c", script],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    argv = argv_of(ended.stdout.replace("task_index=1", ""))
    assert f"--data_dir={odd}" in argv
    assert f"--model={model}" in argv
    assert summary(tmp_path / "m")["global_step"] == 20
    assert not list(tmp_path.rglob("spoilt"))


def test_ssh_commands_are_quoted_for_two_shells() -> None:
    """What ssh hands to the host's shell gives, read twice as shells do, the very arguments of the task."""
    job = dataclasses.replace(changed(SMALL, ssh=True, data_dir=NASTY), python="/p y", directory="/d'ir")
    plan = HostsLauncher().plan(job)
    for task, argv in plan.argv.items():
        *_, host, remote = plan.ssh(task)
        assert host == {Task("ps", 0): "h0", Task("worker", 0): "h1", Task("worker", 1): "fe80::1"}[task]
        shell, flag, script = shlex.split(remote)
        assert (shell, flag) == ("sh", "-c")
        words = shlex.split(script)
        assert words[:2] == ["cd", "/d'ir"]
        start = words.index("/p y")
        assert tuple(words[start : start + len(argv)]) == tuple(argv)
        assert f"--data_dir={NASTY}" in argv


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ps_hosts": None, "worker_hosts": None}, "--ps_hosts is missing: give --ps_hosts=host:port,host:port."),
        ({"worker_hosts": None}, "--worker_hosts is missing"),
        ({"worker_hosts": "h1"}, "--worker_hosts: h1 has no port"),
        ({"worker_hosts": "h0:2222"}, "is the same address as h0:2222"),
        ({"num_workers": 3}, "--num_workers=3, but --worker_hosts has 2"),
    ],
)
def test_hosts_that_cannot_be_meant(changes: dict[str, object], says: str) -> None:
    """Missing, malformed and contradicting hosts are reported with their flag."""
    with pytest.raises(ConfigError, match=r"^--") as error:
        HostsLauncher().plan(changed(SMALL, **changes))
    assert says in str(error.value)


def test_what_hosts_have_no_use_for_is_refused(tmp_path: Path) -> None:
    """Flags of other platforms are not ignored: each is named."""
    ended = run_tfps("submit", "--to=hosts", "--worker_gpu=8", "--image=x", "--ps_hosts=a:1", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "error: --image is not supported with --to=hosts: leave it out.\n" in ended.stderr
    assert "error: --worker_gpu is not supported with --to=hosts: leave it out.\n" in ended.stderr
    assert "error: --worker_hosts is missing" in ended.stderr


@pytest.mark.parametrize("workers", [1, 3])
def test_a_cluster_of_any_size_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Without --num_ps and --num_workers, the lists of hosts give the tasks that are shown, no more and no less."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'training: mode async'\n")
    (tmp_path / "ssh").chmod(0o755)
    hosts = [f"h{n}:2222" for n in range(workers + 2)]
    flags = [f"--ps_hosts={','.join(hosts[:2])}", f"--worker_hosts={','.join(hosts[2:])}", "--ssh"]
    ended = run_tfps("submit", "--to=hosts", *flags, cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (ended.returncode, ended.stderr) == (0, "")
    tasks = ["ps/0", "ps/1", *(f"worker/{n}" for n in range(workers))]
    assert {line.partition(" ")[0] for line in ended.stdout.splitlines() if "training:" in line} == set(tasks)
    views: list[display.JobView] = []
    job_view = watch.job_view
    monkeypatch.setattr(watch, "job_view", lambda *args: views.append(job_view(*args)) or views[0])
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert main.main(["submit", "--to=hosts", *flags]) == 0
    assert [str(task) for task in views[0].tasks] == tasks


def test_there_is_no_handle() -> None:
    """A job over ssh has no handle, and who asks for one is reported why."""
    with pytest.raises(ConfigError, match="ends with the command that started it"):
        HostsLauncher().find("x")
