"""Launchers of batch schedulers: what the common part makes of two schedulers' commands; the tasks are shells."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import fake_schedulers
from support.jobs import job_of
from support.lsf_launcher import LsfLauncher
from support.pbs_launcher import PbsLauncher
from support.processes import NASTY, REPO

from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.errors import ClientMissingError, ConfigError, JobNotFoundError, PlatformError
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status
from tfps.jobs.spec import Job
from tfps.launchers.common.batch import BatchJob, BatchLauncher
from tfps.launchers.common.batch_driver import cluster_on, port_of, remote_command

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)
both = pytest.mark.parametrize("launcher", [PbsLauncher(), LsfLauncher()], ids=["pbs", "lsf"])

# In python's stead: the driver is run by the real one; a task is a shell that does what TASK says.
PYTHON = f"""#!/bin/sh
[ "$3" != run ] && exec {sys.executable} "$@"
for word; do case $word in --job_name=*|--task_index=*) me="$me ${{word#*=}}";; esac; done
printf "%s\\n" "task$me $*"
eval "$TASK"
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for a job, where the schedulers' commands are found."""
    for name, value in fake_schedulers.install(tmp_path / "scheduler").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def submitted(launcher: BatchLauncher, directory: Path, name: str = "m") -> BatchJob:
    """Submit a job of one PS and two workers."""
    config = JobConfig(num_ps=1, num_workers=2, model="mnist", model_dir=str(directory / name))
    return launcher.submit(
        launcher.plan(Job("small", config, python=str(directory / "python"), directory=str(directory)))
    )


def name_of(text: str) -> str:
    """Return a text as the name of a directory."""
    return text.replace("/", "_")


def ended(job: BatchJob) -> Status:
    """Return the state of a job at its end."""
    deadline = time.monotonic() + 100
    while not (status := job.status()).ended:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


@both
def test_a_job_runs_to_its_end(launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task gets the cluster and its own place in it; the handle alone finds its lines, exit code and host."""
    monkeypatch.setenv("TASK", "exit 0")
    job = submitted(launcher, directory, name_of(NASTY))
    name, _, job_id = job.handle.partition(":")
    assert name == launcher.name
    found = launcher.find(job_id)
    assert ended(found).state == SUCCEEDED
    assert {
        task: (known.state, known.exit_code, known.where) for task, known in found.status().tasks.items()
    } == dict.fromkeys((PS, CHIEF, WORKER), (SUCCEEDED, 0, "127.0.0.1"))
    lines = list(found.logs(None, follow=True))
    port = port_of(job_id.partition("@")[0])
    for task in (PS, CHIEF, WORKER):
        said = "\n".join(line.text for line in lines if line.task == task)
        assert said.startswith(f"task {task.job} {task.index} -m tfps run ")
        assert f"--model_dir={directory / name_of(NASTY)} " in said
        assert f"--ps_hosts=127.0.0.1:{port} " in said
        assert f"--worker_hosts=127.0.0.1:{port + 1},127.0.0.1:{port + 2} " in said
    assert {line.task for line in found.logs(WORKER, follow=False)} == {WORKER}
    with pytest.raises(ConfigError, match="--task=ps/1: the job has only ps/0, worker/0, worker/1"):
        list(found.logs(Task("ps", 1), follow=False))


@both
def test_the_first_task_that_fails_ends_the_job(
    launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver ends the others; the job's exit code is the cause's, which comes first."""
    others = "trap 'exit 143' TERM; while :; do sleep 0.1; done"
    monkeypatch.setenv("TASK", f'[ "$me" = " worker 1" ] && exit 66; {others}')
    status = ended(submitted(launcher, directory))
    assert (status.state, "66" in status.reason) == (FAILED, True)
    assert [(task, known.exit_code) for task, known in status.tasks.items()] == [(WORKER, 66), (PS, 143), (CHIEF, 143)]


@both
def test_a_job_whose_file_cannot_be_written_goes_on(
    launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that cannot write its lines still waits for its tasks, and the job's exit code is theirs."""
    logs = directory / "m" / "logs"
    first = f"while [ -d {logs} ]; do sleep 0.1; done; sleep 1; touch {directory}/saved; exit 66"
    monkeypatch.setenv("TASK", f'[ "$me" = " worker 1" ] && rm -r {logs} && exit 0; {first}')
    job = submitted(launcher, directory)
    status = ended(job)
    assert (status.state, "66" in status.reason, (directory / "saved").exists()) == (FAILED, True, True)


@both
def test_to_cancel_is_to_let_the_tasks_save(
    launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler tells the tasks to end, and cancel returns when they have; to cancel again is no error."""
    monkeypatch.setenv("TASK", "trap 'echo saved; exit 143' TERM INT; echo ready; while :; do sleep 0.1; done")
    job = submitted(launcher, directory)
    for task in (PS, CHIEF, WORKER):
        reader = (line for line in job.logs(task, follow=True) if line.text == "ready")
        next(reader)
    assert job.status().state == RUNNING
    assert {known.state for known in job.status().tasks.values()} == {RUNNING}
    job.cancel()
    status = job.status()
    assert (status.state, {known.exit_code for known in status.tasks.values()}) == (CANCELLED, {143})
    assert [line.text for line in job.logs(CHIEF, follow=False)][-1] == "saved"
    job.cancel()


@both
def test_tasks_on_several_hosts_are_started_by_the_scheduler(
    launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hosts of its own each task is started by pbs_tmrsh or blaunch there, and has its host's first port."""
    monkeypatch.setenv("TASK", "exit 0")
    monkeypatch.setenv(fake_schedulers.HOSTS, "127.0.0.1 127.0.0.2 127.0.0.1")
    job = submitted(launcher, directory, "a b")
    status = ended(job)
    assert status.state == SUCCEEDED
    assert [known.where for known in status.tasks.values()] == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    [remote] = (directory / "scheduler" / "jobs").glob("*/remote")
    assert sorted(remote.read_text().split()) == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    port = port_of(job.handle.partition(":")[2].partition("@")[0])
    assert f"--worker_hosts=127.0.0.2:{port},127.0.0.1:{port + 1} " in next(job.logs(CHIEF, follow=False)).text


@both
def test_a_service_has_servers_alone(launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get each other's addresses, and no flag of workers; the handle alone finds them."""
    monkeypatch.setenv("TASK", "exit 0")
    config = JobConfig(serve=True, model="service", num_ps=2, model_dir=str(directory / "m"))
    asked = Job("service", config, python=str(directory / "python"), directory=str(directory))
    job = launcher.submit(launcher.plan(asked))
    found = launcher.find(job.handle.partition(":")[2])
    assert ended(found).state == SUCCEEDED
    assert list(found.status().tasks) == [PS, Task("ps", 1)]
    port = port_of(job.handle.partition(":")[2].partition("@")[0])
    for line in found.logs(None, follow=False):
        assert f"--ps_hosts=127.0.0.1:{port},127.0.0.1:{port + 1} " in line.text
        assert "--serve=1" in line.text
        assert "worker" not in line.text


@both
def test_a_job_that_is_forgotten_is_known_by_its_files(
    launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers forget jobs: how one ended is in its own files; of one that was killed they tell nothing."""
    monkeypatch.setenv("TASK", "exit 65")
    job = submitted(launcher, directory)
    ended(job)
    shutil.rmtree(directory / "scheduler" / "jobs")
    (directory / "scheduler" / "jobs").mkdir()
    assert (job.status().state, job.status().reason) == (FAILED, "exit code 65")
    [file] = (directory / "m" / "logs").glob("*.fake.out" if launcher.name == "pbs" else "lsf-1.out")
    file.write_text(file.read_text().replace("ended with exit code 65\n", ""))
    assert job.status().state == FAILED, "this process has seen it run"
    found = launcher.find(job.handle.partition(":")[2])
    assert found.status().state == UNKNOWN
    assert list(found.logs(None, follow=True))
    found.cancel()


@both
def test_handles(launcher: BatchLauncher, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle has the job's directory: without one it is bad, and where no job's files are, no job is found."""
    for id_ in ("", "1", "1@", "1@relative", "@/x", "$(id)@/x", "-1@/x"):
        with pytest.raises(ConfigError, match=r"is not a job handle: write (pbs|lsf):ID@DIRECTORY"):
            launcher.find(id_)
    with pytest.raises(JobNotFoundError, match="does not exist, or lists no tasks"):
        launcher.find(f"7@{directory}")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClientMissingError, match="is not installed: use a login node"):
        launcher.find(f"7@{directory}")


def test_a_scheduler_that_does_not_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scheduler says is passed on: of a submission and of a question; a strange answer is no job's id."""
    monkeypatch.setenv("TASK", "exit 0")
    job = submitted(PbsLauncher(), directory)
    ended(job)
    for command in ("qstat", "qsub"):
        program = directory / "scheduler" / "bin" / command
        program.write_text("#!/bin/sh\necho 'cannot connect to server pbs (errno=111)' >&2; exit 1\n")
    for ask in (job.status, job.cancel, lambda: submitted(PbsLauncher(), directory)):
        with pytest.raises(PlatformError, match="cannot connect to server pbs"):
            ask()
    program.write_text("#!/bin/sh\necho 'wait, and see'\n")
    with pytest.raises(PlatformError, match="qsub did not print a job id: 'wait, and see'"):
        submitted(PbsLauncher(), directory)


@pytest.mark.parametrize(
    ("attributes", "state", "reason"),
    [
        (
            "job_state = Q\n    comment = Not Running: Insufficient\n\t amount of ncpus",
            PENDING,
            "Not Running: Insufficient",
        ),
        ("job_state = R\n    Exit_status = 0", RUNNING, ""),
        ("job_state = E", RUNNING, ""),
        ("job_state = F\n    Exit_status = 0", SUCCEEDED, ""),
        ("job_state = F\n    Exit_status = 271", FAILED, "exit status 271"),
        ("job_state = F", CANCELLED, ""),
        ("job_state = ?", UNKNOWN, ""),
    ],
)
def test_states_of_pbs(attributes: str, state: str, reason: str) -> None:
    """Qstat -f tells a job's state and its exit status; long values go on on the next line."""
    status = PbsLauncher().parse_status(f"Job Id: 7.pbs\n    Job_Name = a\n    {attributes}\n")
    assert status.state == state
    assert status.reason.startswith(reason)


@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        ("PEND|-|-", PENDING, ""),
        ("RUN|-|-", RUNNING, ""),
        ("DONE|-|-", SUCCEEDED, ""),
        ("EXIT|66|-", FAILED, "exit code 66"),
        (
            "EXIT|130|TERM_RUNLIMIT: job killed after reaching LSF run time limit",
            FAILED,
            "exit code 130, TERM_RUNLIMIT",
        ),
        ("EXIT|130|TERM_OWNER: job killed by owner", CANCELLED, ""),
    ],
)
def test_states_of_lsf(line: str, state: str, reason: str) -> None:
    """Bjobs tells a job's state, its exit code, and who ended it."""
    status = LsfLauncher().parse_status(f"{line}\n")
    assert status.state == state
    assert status.reason.startswith(reason)


def test_scripts(tmp_path: Path) -> None:
    """Directives come first; in PBS, each role has chunks of its own; a shell can read the script."""
    asked = {"worker_cpu": 4, "worker_gpu": 1, "ps_memory": 2**30, "queue": "main"}
    place = {"model_dir": f"/m/{NASTY}", "python": "/venv/bin/python", "at": "/home/me"}
    job = job_of("large", num_ps=2, num_workers=3, **asked, **place)
    pbs, lsf = str(PbsLauncher().plan(job)), str(LsfLauncher().plan(job))
    assert "#PBS -l select=2:ncpus=1:mpiprocs=1:mem=1024mb+3:ncpus=4:mpiprocs=1:ngpus=1\n#PBS -q main\n\n" in pbs
    assert "#BSUB -n 5\n" in lsf
    for script in (pbs, lsf):
        assert script == script.rstrip()
        assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    for launcher in (PbsLauncher(), LsfLauncher()):
        with pytest.raises(ConfigError, match="is not the name of a queue"):
            launcher.plan(job_of("a", queue="a b"))
        with pytest.raises(ConfigError, match="--model_dir=gs://b/m has no place for logs"):
            launcher.plan(job_of("a", model_dir="gs://b/m"))


def test_places_and_ports() -> None:
    """Tasks take hosts in the scheduler's order; those on one host get ports in a row, those of other jobs others."""
    cluster = cluster_on(["a", "b", "a", "a"], {"ps": 1, "worker": 2}, 9000)
    assert (cluster.ps, cluster.workers) == (("a:9000",), ("b:9000", "a:9001"))
    with pytest.raises(ConfigError, match="the scheduler gave 2 places, a b, for 3 tasks"):
        cluster_on(["a", "b"], {"ps": 1, "worker": 2}, 9000)
    ports = [port_of(f"{number}.server7") for number in range(1400)]
    assert len(set(ports)) == 1400
    assert all(abs(a - b) >= 864 for n, a in enumerate(ports) for b in ports[n + 1 : n + 25])
    assert min(ports) >= 8888
    assert max(ports) + 16 < 32768


def test_a_remote_command_is_the_same_for_a_shell(tmp_path: Path) -> None:
    """What goes through pbs_tmrsh or blaunch means the same whether a shell reads it or not."""
    log = tmp_path / "log"
    words = remote_command(["sh", "-c", 'printf "%s" "$1"; pwd', "x", NASTY], str(tmp_path), str(log))
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    for argv in (list(words), ["sh", "-c", " ".join(words)]):
        log.unlink(missing_ok=True)
        subprocess.run(argv, env=env, check=True)
        assert log.read_text() == f"{NASTY}{tmp_path}\n"
