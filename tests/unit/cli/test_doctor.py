"""``tfps doctor``: each of its lines, and what it exits with, on real addresses and directories."""

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import cluster_of
from support.listeners import Speaker, blackhole, patient_probes, web_server
from support.processes import REPO, Process, processes, run_tfps

import tfps
from tfps.cli import doctor, main
from tfps.cli.diagnosis import check, directory, shared_dir, versions
from tfps.cluster import probe
from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.config.command_line import flags_of
from tfps.runtime.checkpoint import lock_holder
from tfps.runtime.checkpoint.ownership import Ownership


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be outside any cluster and without proxies; stay in directories for a moment only, and wait for slow answers."""
    for name in [n for n in os.environ if n == "TF_CONFIG" or n.startswith("SLURM_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for module, name, secs in ((directory, "STAY_SECS", 0.3), (doctor, "_DEAD_AFTER_SECS", 20.0)):
        monkeypatch.setattr(module, name, secs)
    monkeypatch.setattr(directory, "_CLOCK_SECS", 30.0)
    patient_probes(monkeypatch)


def test_a_model_or_data_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A task would end with it, so the cluster is not ready to train."""
    hosts = hosts_flags(cluster_of(1, 1))
    assert main.main(["doctor", *hosts, f"--model={tmp_path}/missing.py"]) == 2
    assert "missing.py: no such file." in capsys.readouterr().err
    assert main.main(["doctor", *hosts, f"--data_dir={tmp_path}/missing"]) == 65
    assert "--data_dir=" in capsys.readouterr().err


class Findings(dict[str, tuple[str, str]]):
    """The state and the text by subject; and the exit code."""

    code: int
    last: str


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs doctor in this process."""

    def run(*argv: str) -> Findings:
        findings = Findings()
        findings.code = main.main(["doctor", *argv])
        out, err = capsys.readouterr()
        assert err == ""
        *lines, empty, findings.last = out.splitlines()
        assert empty == ""
        for line in lines:
            state, what, text = re.split(r" {2,}", line, maxsplit=2)
            assert state in (check.OK, check.NOT_YET, check.WARNING, check.WRONG)
            findings[what] = state, text
        assert (findings.code != 0) == any(state == check.WRONG for state, _ in findings.values())
        return findings

    return run


@contextlib.contextmanager
def nobody() -> Iterator[tuple[str, str]]:
    """Yield two addresses on this machine at which nobody listens meanwhile."""
    with held_ports(2) as (first, second):
        yield f"127.0.0.1:{first}", f"127.0.0.1:{second}"


def test_before_the_start_nothing_is_in_the_way(examine: Any) -> None:
    """Tasks that are not started are reported as that, and are no fault: hosts that say so are there."""
    with nobody() as (ps, worker):
        findings = examine(f"--ps_hosts={ps}", f"--worker_hosts={worker}")
    assert findings.code == 0
    assert findings.last == "ready to train: no problem found; when tasks start, they compare the flags that must agree"
    assert findings[f"ps/0 {ps}"] == ("-", "not started yet: no process listens there")
    assert findings[f"worker/0 {worker}"] == ("-", "not started yet: no process listens there")
    assert findings["names"] == ("ok", "1 of 1 hosts resolve")
    assert findings["proxies"] == ("ok", "none is set")
    assert findings["model_dir"] == ("-", "not given: the chief makes a new one in runs/, and begins at step 0")
    assert findings["versions"][0] == "ok"
    assert re.match(rf"TensorFlow 2\.\d+\.\d+, tfps {re.escape(tfps.__version__)}, Python 3\.", findings["versions"][1])
    assert "port" not in findings


def test_tasks_that_run_say_who_they_are(examine: Any) -> None:
    """Real servers at their addresses are ok; so is the port of a task that runs already."""
    cluster = cluster_of(2, 2)
    with nobody() as (_, free):
        later = Cluster(cluster.ps, (*cluster.workers, free))
        findings = examine(*hosts_flags(later), "--job_name=worker", "--task_index=1")
    assert findings.code == 0
    assert "job" not in findings
    for task in cluster.tasks():
        assert findings[f"{task} {cluster.address(task)}"] == ("ok", "running as the expected task")
    port = cluster.workers[1].rpartition(":")[2]
    assert findings["port"] == ("ok", f"{port} is in use by this task, which already runs")


def test_a_job_that_runs_there_is_told(examine: Any) -> None:
    """Where all tasks are, the addresses are not free for another job; one that runs well is no error."""
    findings = examine(*hosts_flags(cluster_of(1, 2)))
    assert findings.code == 0
    fix = "for another job, end that one first, or give other addresses."
    assert findings["job"] == ("warning", f"a job already runs there, with all tasks: {fix}")


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_directory_that_another_job_holds_is_74(
    examine: Any, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A holder that lives is named, on this machine or another one; with ``--force`` as a warning."""
    owner = Ownership(str(tmp_path), Cluster(("a:1",), ("b:1",)))
    with monkeypatch.context() as patched:
        if place == "elsewhere":
            patched.setattr(lock_holder, "machine", lambda: "another boot")
        owner.claim()
    try:
        findings = examine(*flags, f"--model_dir={tmp_path}")
        assert findings.code == 74
        state, said = findings["holder"]
        assert (state, said.partition(" on host ")[0]) == ("wrong", f"held by the chief with process id {os.getpid()}")
        assert "of the job at a:1, b:1, since" in said
        assert said.endswith("--force takes it over and ends that job.")
        findings = examine(*flags, f"--model_dir={tmp_path}", "--force")
        assert (findings.code, findings["holder"][0]) == (0, "warning")
    finally:
        owner.release()
    assert "holder" not in examine(*flags, f"--model_dir={tmp_path}")


def test_a_directory_whose_holder_was_killed_is_free(examine: Any, flags: list[str], tmp_path: Path) -> None:
    """What it left behind is no holder: a job takes such a directory."""
    (tmp_path / ".chief").write_text("{}")
    old = time.time() - 100
    os.utime(tmp_path / ".chief", (old, old))
    findings = examine(*flags, f"--model_dir={tmp_path}")
    assert (findings.code, "holder" in findings) == (0, False)


def test_what_is_at_the_wrong_place_is_171(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped servers, an HTTP server, a host without a name, one that swallows all: each has its line and a fix."""
    real = cluster_of(2, 1)
    with web_server() as web, blackhole() as hole:
        patient_probes(monkeypatch, hole)
        ps, workers = [*real.ps[::-1]], [web, hole, "no-such-host.invalid:2222"]
        findings = examine(f"--ps_hosts={','.join(ps)}", f"--worker_hosts={','.join(workers)}")
    assert findings.code == 171
    assert findings.last.startswith("not ready to train")
    assert findings[f"ps/0 {ps[0]}"][1].startswith("says that it is ps/1: ")
    assert findings[f"ps/1 {ps[1]}"][1].startswith("says that it is ps/0: ")
    assert findings[f"worker/0 {web}"] == (
        "wrong",
        "another program listens there: end that process, or give another port.",
    )
    assert findings[f"worker/1 {hole}"] == (
        "wrong",
        "no answer: is the host up, and does every firewall allow the port?",
    )
    assert findings[f"worker/2 {workers[2]}"][1].startswith("unknown host: correct the address")
    assert findings["names"][0] == "wrong"
    assert findings["names"][1].startswith("no-such-host.invalid: unknown host")


def test_many_tasks_are_few_lines(examine: Any) -> None:
    """Of a hundred tasks of which the same is to be reported, ten have a line each and the others one together."""
    with held_ports(100) as ports:
        workers = ",".join(f"127.0.0.1:{port}" for port in ports[1:])
        findings = examine(f"--ps_hosts=127.0.0.1:{ports[0]}", f"--worker_hosts={workers}")
    assert findings["90 more"] == ("-", "not started yet: no process listens there")
    assert sum(what.startswith(("ps/", "worker/")) for what in findings) == 10


@pytest.mark.parametrize("taken", [False, True])
def test_the_port_of_this_task(examine: Any, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a role, the role's port is free, or else it is 171 and reported in the words of ``tfps run``."""
    with nobody() as (ps, worker), socket.socket() as other:
        port = ps.rpartition(":")[2]
        patient_probes(monkeypatch, ps)
        if taken:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("", int(port)))
            other.listen()
        findings = examine(f"--ps_hosts={ps}", f"--worker_hosts={worker}", "--job_name=ps", "--task_index=0")
    if taken:
        assert findings.code == 171
        assert findings["port"][1].startswith(f"--ps_hosts: port {port} of {ps} is taken by another process: end")
    else:
        assert findings.code == 0
        assert findings["port"] == ("ok", f"{port} is free on this machine")


def test_tf_config_gives_cluster_and_role(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod of Kubeflow, say, doctor alone knows the cluster, and which port is to be free."""
    with nobody() as (ps, worker):
        members = {"ps": [ps], "worker": [worker]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": members, "task": {"type": "worker", "index": 0}}))
        findings = examine()
        assert findings["port"] == ("ok", f"{worker.rpartition(':')[2]} is free on this machine")
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": members}))
        assert "port" not in examine()


def test_a_slurm_step_gives_cluster_and_role(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun the step's nodes are asked, on the ports that ``tfps run`` would take there."""
    step = {"PROCID": "1", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "2"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with held_ports(1) as [port]:
        findings = examine("--num_ps=1", f"--port_base={port}")
    assert findings[f"ps/0 localhost:{port}"] == ("-", "not started yet: no process listens there")
    assert f"worker/0 localhost:{port + 1}" in findings
    assert str(port + 1) in findings["port"][1]


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ([], ["No cluster is given: give --ps_hosts and --worker_hosts, "]),
        (["--mode=allreduce"], ["No cluster is given: give --worker_hosts, "]),
        (["--mode=gossip"], ["No cluster is given: give --worker_hosts, "]),
        (["--mode=gossip", "--worker_hosts=w"], ["--worker_hosts: w has no port"]),
        (["--ps_hosts=p0"], ["--ps_hosts: p0 has no port", "--worker_hosts is missing"]),
        (["--ps_hosts=p0:1", "--worker_hosts=w:1", "--job_name=ps"], ["--task_index is missing"]),
        (["--ps_hosts=p0:1", "--worker_hosts=w:1", "--mode=snyc"], ["--mode=snyc is not one of"]),
        (["--ps_hosts=p0:1", "--worker_hosts=p0:1"], ["--worker_hosts: p0:1 is the same address"]),
    ],
    ids=str,
)
def test_bad_flags_are_2(capsys: pytest.CaptureFixture[str], argv: list[str], lines: list[str]) -> None:
    """What ``tfps run`` refuses, doctor does, but it needs no role."""
    assert main.main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == len(lines)
    for line, start in zip(err.splitlines(), lines, strict=True):
        assert line.startswith(f"error: {start}")


def test_it_takes_all_flags_of_run() -> None:
    """The command line of a task that trains becomes doctor's by its verb alone."""
    of_service = set(flags_of(["service"]))
    assert main.COMMANDS["doctor"].flags == [flag for flag in main.COMMANDS["run"].flags if flag not in of_service]


def test_proxies(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies that gRPC would take are named, without what may be a password; one that tasks obey is a warning."""
    with nobody() as (ps, worker):
        flags = f"--ps_hosts={ps}", f"--worker_hosts={worker}"
        monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
        monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy:3128")
        findings = examine(*flags)
        assert findings["proxies"] == ("ok", "https_proxy is set: tasks bypass it to reach each other")
        monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY", "10.0.0.1:3128")
        findings = examine(*flags)
    assert findings["proxies"][0] == "warning"
    assert findings["proxies"][1].startswith("GRPC_ADDRESS_HTTP_PROXY is set")
    assert findings.code == 0


def test_no_tensorflow_is_2(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TensorFlow is not installed, no task can start: as ``tfps run`` says it."""
    monkeypatch.setattr(versions, "_PACKAGES", ("no-such-package",))
    with nobody() as (ps, worker):
        findings = examine(f"--ps_hosts={ps}", f"--worker_hosts={worker}")
    assert findings.code == 2
    assert "TensorFlow is not installed: pip install" in findings["versions"][1]


@pytest.fixture
def flags() -> Iterator[list[str]]:
    """The flags of a cluster of which nothing is started."""
    with nobody() as (ps, worker):
        yield [f"--ps_hosts={ps}", f"--worker_hosts={worker}"]


def test_a_directory_is_tried_and_left_as_it_was(examine: Any, flags: list[str], tmp_path: Path) -> None:
    """One that is not there is made and removed; in one that is there nothing is changed."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "job.json").write_text("{}")
    for name in ("there", "not/yet"):
        findings = examine(*flags, f"--model_dir={tmp_path / name}")
        assert findings.code == 0
        assert re.fullmatch(rf"{tmp_path / name} is writable, [\d,.]+ GB free", findings["model_dir"][1])
        assert findings["shared"] == ("ok", "all tasks are on this machine")
        assert findings["clocks"][0] == "ok"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["job.json", "there"]


def test_a_directory_that_cannot_be_written_is_74(examine: Any, flags: list[str], tmp_path: Path) -> None:
    """Where a directory cannot be made, or nothing written, it is 74 with the system's reason."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere"):
        findings = examine(*flags, f"--model_dir={path}")
        assert findings.code == 74
        assert findings["model_dir"][0] == "wrong"
        assert str(path) in findings["model_dir"][1]
        assert findings["model_dir"][1].lower().count("give a") == 1


def test_little_room_is_a_warning(
    examine: Any, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a gigabyte of room is reported, and no fault."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 5 * 10**8, 5 * 10**8))
    findings = examine(*flags, f"--model_dir={tmp_path}")
    assert findings["model_dir"] == ("warning", f"{tmp_path} is writable, 0.5 GB free: make room for checkpoints.")
    assert findings.code == 0


def leave_card(place: Path, host: str, ahead_secs: float = 0.0, age_secs: float = 0.0, **others: str) -> Path:
    """Leave a card as a doctor on another host does."""
    with shared_dir.visit(place, {**versions.installed(), "host": host, **others}) as visit:
        card = place / f"copy-{host}"
        shutil.copy(visit._path, card)
    content = json.loads(card.read_text())
    name = place / f".tfps-doctor-{host}.json"
    now = time.time() - age_secs
    name.write_text(json.dumps({**content, "clock": now + ahead_secs}))
    os.utime(name, (now, now))
    card.unlink()
    return name


def test_those_who_share_the_directory_are_named(
    examine: Any, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards of other hosts are read, also of those who came or left meanwhile; an old one is not; none is removed."""
    left = [leave_card(tmp_path, "h1"), leave_card(tmp_path, "h2"), leave_card(tmp_path, "old", age_secs=600)]
    (tmp_path / ".tfps-doctor-bad.json").write_text("[")
    others = shared_dir.SharedDirProbe.others

    def others_and_leave(visit: shared_dir.SharedDirProbe) -> dict[str, shared_dir.Presence]:
        found = others(visit)
        left[0].unlink(missing_ok=True)
        return found

    monkeypatch.setattr(shared_dir.SharedDirProbe, "others", others_and_leave)
    findings = examine(*flags, f"--model_dir={tmp_path}")
    state, said = findings["shared"]
    assert (state, said.partition(";")[0]) == ("ok", "with h1, h2, which have the same versions")
    assert findings["clocks"][0] == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".tfps-doctor-bad.json",
        ".tfps-doctor-h2.json",
        ".tfps-doctor-old.json",
    ]


def test_several_hosts_are_to_be_met(examine: Any, tmp_path: Path) -> None:
    """Where tasks are on other hosts, and no other doctor is there, the line says how to find out."""
    findings = examine("--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.2:1", f"--model_dir={tmp_path}")
    assert findings["shared"] == ("-", "no other host is there: start doctor on all hosts at the same time")


def test_hosts_that_are_not_met_are_missed(examine: Any, tmp_path: Path) -> None:
    """Of four hosts of the cluster two share the directory with this one: a warning, as the fourth may not."""
    leave_card(tmp_path, "h1")
    leave_card(tmp_path, "h2")
    hosts = "--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.2:1,127.0.0.3:1,127.0.0.4:1"
    findings = examine(*hosts, f"--model_dir={tmp_path}")
    state, said = findings["shared"]
    assert state == "warning"
    assert said.startswith("with h1, h2, which have the same versions; but these are 3 of 4 hosts")


def test_other_versions_on_other_hosts_are_wrong(examine: Any, flags: list[str], tmp_path: Path) -> None:
    """A host with another tfps or TensorFlow is named with both versions: its workers would be refused."""
    leave_card(tmp_path, "h1", tfps="9.9.9")
    leave_card(tmp_path, "h2", TensorFlow="2.16.2")
    findings = examine(*flags, f"--model_dir={tmp_path}")
    assert findings.code == 171
    assert (
        f"tfps {tfps.__version__} here, 9.9.9 on h1: install the same version on every host." in findings["shared"][1]
    )
    assert re.search(r"TensorFlow \S+ here, 2\.16\.2 on h2: ", findings["shared"][1])


def test_clocks_that_are_wrong_are_named(examine: Any, flags: list[str], tmp_path: Path) -> None:
    """A host whose clock is a minute ahead of the file system's is named, as a warning."""
    leave_card(tmp_path, "h1", ahead_secs=60)
    leave_card(tmp_path, "h2", ahead_secs=-0.5)
    findings = examine(*flags, f"--model_dir={tmp_path}")
    assert findings["clocks"] == ("warning", "differ from the file system's: h1 by +60.0 s; set them with NTP.")
    assert findings.code == 0


def test_a_file_system_that_hangs_is_74(
    examine: Any, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that does not answer keeps nobody waiting."""
    ended = threading.Event()
    monkeypatch.setattr(shared_dir, "write_json", lambda *_: ended.wait(90))
    monkeypatch.setattr(doctor, "_DEAD_AFTER_SECS", 0.5)
    began = time.monotonic()
    findings = examine(*flags, f"--model_dir={tmp_path}")
    assert time.monotonic() - began < 60
    ended.set()
    assert findings.code == 74
    assert findings["model_dir"][1].startswith("does not answer")


def test_real_doctors_meet_in_a_directory(tmp_path: Path) -> None:
    """Two processes started at once see each other, import no TensorFlow, and leave no file.

    The directory is taken away by the last who found none, if that one is the last to leave.
    """
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('imported')\n")
    # A busy machine starts one of them later.
    stay = "from tfps.cli.diagnosis import directory\ndirectory.STAY_SECS = 20.0\n"
    (tmp_path / "sitecustomize.py").write_text(stay)
    model_dir = tmp_path / "m"
    with nobody() as (ps, worker), processes() as started:
        argv = ["doctor", f"--ps_hosts={ps}", f"--worker_hosts={worker}", f"--model_dir={model_dir}"]
        path = f"{tmp_path}{os.pathsep}{REPO}"
        started += [Process(tmp_path / f"out-{i}", *argv, PYTHONPATH=path) for i in range(2)]
        assert [process.wait(100) for process in started] == [0, 0], started[0].output()
        for process in started:
            assert f"with {socket.gethostname()}, which have the same versions" in process.output()
    assert [*model_dir.glob("*")] == []


def test_a_real_doctor_waits_for_no_blackhole(tmp_path: Path) -> None:
    """Blackholed tasks, an impostor and more are reported before a connection times out; the first code counts."""
    with blackhole() as hole, web_server() as web, contextlib.closing(Speaker(Task("ps", 3))) as other:
        flags = f"--ps_hosts={hole},{other.address}", f"--worker_hosts={web},no-such-host.invalid:1"
        ended = run_tfps("doctor", *flags, f"--model_dir={REPO / 'README.md'}", timeout=100)  # Linux waits 130 s
    assert ended.returncode == 74
    assert sum(line.startswith("wrong ") for line in ended.stdout.splitlines()) == 6
    assert "says that it is ps/3" in ended.stdout
    assert probe.OTHER in ended.stdout
    assert ended.stderr == ""
