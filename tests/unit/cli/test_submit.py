"""``tfps submit``, ``status``, ``logs`` and ``cancel``, as far as they are the same for every platform."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import job_of
from support.processes import POWERS, REPO, run_tfps

from tfps.cli import command, jobs, main
from tfps.cluster.spec import Task
from tfps.config.command_line import FLAGS
from tfps.config.command_options import LogsOptions
from tfps.config.job_config import JobConfig
from tfps.jobs.events import LogLine
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, Status, SubmittedJob, TaskStatus
from tfps.launchers.registry import LAUNCHERS

HOSTS = ["--ps_hosts=h0:1", "--worker_hosts=h1:1,h2:1"]
SIZE = ["--num_ps=1", "--num_workers=2"]


def job_flags(platform: str) -> list[str]:
    """Return the flags of a small job on a platform."""
    return ["submit", f"--to={platform}", "--name=small", "--model=mnist", *(HOSTS if platform == "hosts" else SIZE)]


@pytest.mark.parametrize("platform", LAUNCHERS)
def test_a_dry_run_needs_nothing_and_prints_the_plan_alone(tmp_path: Path, platform: str) -> None:
    """Without TensorFlow, without any program of the platform, ``--dry_run`` prints what would be sent, twice alike."""
    for name in ("tensorflow", "ray", "kubernetes", "docker"):
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "cwd").mkdir()
    env = {"PATH": str(tmp_path), "PYTHONPATH": f"{tmp_path / 'blocked'}{os.pathsep}{REPO}"}
    first, second = (run_tfps(*job_flags(platform), "--dry_run", cwd=tmp_path / "cwd", **env) for _ in range(2))
    assert (first.returncode, first.stderr) == (0, "")
    assert "mnist" in first.stdout
    assert "tfps" in first.stdout
    assert first.stdout == second.stdout
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.parametrize("platform", [name for name in LAUNCHERS if name != "hosts"])
def test_without_the_platform_it_says_what_to_install(tmp_path: Path, platform: str) -> None:
    """Where the platform's own program or package is missing: its name and how to get it, exit 69, nothing else."""
    (tmp_path / "blocked" / "ray").mkdir(parents=True)
    (tmp_path / "blocked" / "ray" / "__init__.py").write_text("raise ImportError('no ray here')\n")
    env = {"PATH": str(tmp_path), "PYTHONPATH": f"{tmp_path / 'blocked'}{os.pathsep}{REPO}"}
    handle = f"{platform}:a/b" if platform in ("kubernetes", "tfjob", "volcano", "jobset") else f"{platform}:1"
    for argv in (job_flags(platform), ["status", handle]):
        ended = run_tfps(*argv, cwd=tmp_path, **env)
        assert ended.returncode == 69, ended.stderr
        assert "not installed: " in ended.stderr
        assert "Traceback" not in ended.stderr
        assert ended.stdout == ""


@pytest.mark.parametrize("platform", LAUNCHERS)
def test_flags_that_mean_nothing_there_are_refused(platform: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag of other platforms that is given anyway is named, all of them at once, and none is ignored."""
    launcher = LAUNCHERS.load(platform)
    values = {"ssh": "1", "worker_gpu": "1", "ps_memory": "1Gi", "worker_memory": "1Gi", "namespace": "a"}
    values |= {"ps_cpu": "1", "worker_cpu": "1", "volumes": "a:/b", "image": "a", "queue": "a", "address": "a"}
    values |= {"network_policy": "0", "ps_hosts": "a:1", "worker_hosts": "b:1", "port_base": "9000"}
    values |= {"token_secret": "a"}
    assert set(values) == {name for name, option in FLAGS.items() if option.feature}
    foreign = [flag for flag in values if FLAGS[flag].feature not in launcher.features]
    argv = [f"--{flag}={values[flag]}" for flag in foreign]
    assert main.main([*job_flags(platform)[:4], *(HOSTS if platform == "hosts" else []), *argv]) == 2
    err = capsys.readouterr().err
    for flag in foreign:
        assert f"error: --{flag} is not supported with --to={platform}: leave it out." in err


def test_what_is_missing_or_wrong_is_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No platform, an unknown one, a model that is not there, data that is not there: a line each, exit 2 or 65."""
    assert main.main(["submit", "--model=nowhere.py"]) == 2
    assert "--to is missing: say where the job runs, one of " in capsys.readouterr().err
    assert main.main(["submit", "--to=slurn"]) == 2
    assert "--to=slurn is not one of " in capsys.readouterr().err
    for platform in LAUNCHERS:
        flags = HOSTS if platform == "hosts" else []
        assert main.main(["submit", f"--to={platform}", "--model=nowhere.py", "--dry_run", *flags]) == 2
        assert "error: --model=nowhere.py: no such file." in capsys.readouterr().err
    assert main.main(["submit", "--to=hosts", *HOSTS, f"--data_dir={tmp_path / 'no'}", "--dry_run"]) == 65
    assert "does not exist: give the directory" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_handles_that_are_none(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No handle, two, or something else: the answer says what a handle is."""
    for argv, says in (
        ([], "the job's handle is missing: give the one that tfps submit printed, like slurm:4711."),
        (["slurm:1", "slurm:2"], "2 handles are given"),
        (["job-1"], "job-1 is not a job handle: give the one that tfps submit printed, like slurm:4711.\n"),
        (["nowhere:1"], "nowhere:1 is not a job handle: give"),
    ):
        assert main.main([verb, *argv]) == 2
        out, err = capsys.readouterr()
        assert says in err
        assert out == ""


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_the_directory_of_a_local_job_is_no_handle(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer says how such a job is watched and ended, and names only what is there."""

    def said() -> str:
        assert main.main([verb, str(tmp_path)]) == 2
        return capsys.readouterr().err.partition(" like slurm:4711.")[2].strip()

    assert said() == ""
    (tmp_path / "logs").mkdir()
    ends = "it runs in its terminal, and Ctrl-C there, or SIGTERM to the launcher, ends it."
    logs = f"Its logs are in {tmp_path}/logs."
    assert said() == f"A job of tfps launch has none: {ends} {logs}"
    (tmp_path / "summary.json").write_text("{}")
    assert said() == f"A job of tfps launch has none. This one has ended: see {tmp_path}/summary.json. {logs}"


@pytest.mark.parametrize(
    ("model", "name"),
    [("mnist", "mnist"), ("My_Model.py", "my-model"), ("9lives.py", "job-9lives"), ("a.b.c", "c"), ("é.py", "job")],
)
def test_a_job_has_a_name_that_every_platform_takes(tmp_path: Path, model: str, name: str, monkeypatch: Any) -> None:
    """Without ``--name`` it is the model's, the time and the process's: no two jobs of one second share it."""
    from tfps.cli import submit  # noqa: PLC0415

    monkeypatch.setattr(time, "strftime", lambda _: "1126-213000")
    made = submit._name(model)
    assert made == f"{name}-1126-213000-{os.getpid()}"
    monkeypatch.setattr(os, "getpid", lambda: 4_194_303)  # the largest on Linux
    assert submit._name(model) != made
    FLAGS["name"].convert(submit._name(model))
    FLAGS["name"].convert(submit._name(f"{'9lives-' * 9}.py"))


def test_a_plan_that_is_only_printed_says_that_nothing_was_started(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines alone look like those of ``--dry_run``, which asks for no more."""
    says = "nothing was started, as --to=hosts only prints: run each line on its host, or give --ssh.\n"
    for flags, said in (([], says), (["--dry_run"], "")):
        assert main.main(["submit", "--to=hosts", *HOSTS, "--name=mine", *flags]) == 0
        out, err = capsys.readouterr()
        assert out.count("python -m tfps run") == 3
        assert err == said


def test_relative_paths_hold_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On platforms that share files, paths are made absolute, so that a task in any directory finds them."""
    (tmp_path / "m.py").write_text(POWERS)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = ["--model=m.py", "--data_dir=data", "--model_dir=out", "--dry_run"]
    ended = run_tfps("submit", "--to=hosts", *HOSTS, *flags, cwd=tmp_path)
    for path in ("--model={}/m.py", "--data_dir={}/data", "--model_dir={}/out"):
        assert path.format(tmp_path) in ended.stdout


def test_a_jobs_name_is_its_directorys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing else takes it, as with plain hosts; ``--model_dir`` has the last word."""
    for flags, directory in (([], "/runs/mine"), ([f"--model_dir={tmp_path}"], str(tmp_path))):
        assert main.main(["submit", "--to=hosts", *HOSTS, "--name=mine", *flags, "--dry_run"]) == 0
        assert [f"{directory} " in line for line in capsys.readouterr().out.splitlines()] == [True] * 3


def test_what_a_model_imports_from_beside_it_is_named(tmp_path: Path) -> None:
    """Into containers goes the model's file alone: that it needs others is said, and nothing else is."""
    (tmp_path / "m.py").write_text(f"import os, columns.wide\nfrom layers import dense\n{POWERS}")
    (tmp_path / "layers.py").touch()
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns" / "__init__.py").touch()
    warning = "warning: m.py is copied into the containers alone: columns, layers.py, which it imports, must be in the "
    for platform, count in (("kubernetes", 1), ("compose", 1), ("slurm", 0)):
        ended = run_tfps("submit", f"--to={platform}", *SIZE, "--model=m.py", "--dry_run", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count(warning) == count
        assert ended.stderr.count("\n") == count


def test_a_file_with_the_name_of_a_model_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or directory named like a built-in model does not take its place, whichever flag names the model."""
    (tmp_path / "mnist").write_text("no model\n")
    for flags in ([], ["--model=mnist"]):
        ended = run_tfps("submit", "--to=hosts", *HOSTS, *flags, "--dry_run", cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"{tmp_path}/mnist" not in ended.stdout
    monkeypatch.chdir(tmp_path)
    assert command.found_from_anywhere(JobConfig(model="mnist")).model == "mnist"


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    """In a flag, and in the working directory that a script changes to: one line each, exit 2, and no traceback."""
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    for flags, cwd, says in (
        ([f"--model_dir={odd}"], tmp_path, "error: --model_dir="),
        ([f"--data_dir={odd}"], tmp_path, "error: --data_dir="),
        ([], odd, "error: the working directory "),
    ):
        ended = run_tfps("submit", "--to=slurm", *flags, "--dry_run", cwd=cwd)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith(says)
        assert ended.stderr.endswith(" is not UTF-8: rename it, or set LC_ALL=C.UTF-8.\n")


def test_a_model_in_another_coding_is_taken(tmp_path: Path) -> None:
    """A source file may declare its coding, as Python has it."""
    (tmp_path / "m.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + POWERS.encode())
    for platform in ("compose", "kubernetes", "slurm"):
        ended = run_tfps("submit", f"--to={platform}", "--model=m.py", "--dry_run", cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_gpus_with_the_default_image_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It has TensorFlow for CPUs: the GPUs would be reserved for nothing. Another image may have another one."""
    for platform in ("compose", "kubernetes", "tfjob", "volcano", "jobset"):
        argv = ["submit", f"--to={platform}", "--worker_gpu=2", "--dry_run"]
        assert main.main(argv) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            "error: --worker_gpu=2, but the default image has TensorFlow for CPUs only: give --image"
        )
        assert main.main([*argv, "--image=mine"]) == 0
        assert main.main([*argv[:-2], "--worker_gpu=0", "--dry_run"]) == 0
        capsys.readouterr()
    assert main.main(["submit", "--to=slurm", "--worker_gpu=2", "--dry_run"]) == 0


def test_waiting_for_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """--wait is not ignored where nothing is sent; over ssh the command waits with it and without it."""
    says = "error: --wait has nothing to watch, as "
    assert main.main(["submit", "--to=hosts", *HOSTS, "--wait"]) == 2
    assert capsys.readouterr() == ("", f"{says}--to=hosts only prints: leave it out, or add --ssh.\n")
    for flags in (["--to=slurm"], ["--to=hosts", *HOSTS, "--ssh"]):
        assert main.main(["submit", *flags, "--wait", "--dry_run"]) == 2
        assert capsys.readouterr() == ("", f"{says}--dry_run sends nothing: leave one of them out.\n")


def test_data_of_this_machine_is_looked_at_by_a_dry_run_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compose mounts it from here; a path on a volume is not known here."""
    argv = ["submit", "--to=compose", "--dry_run"]
    assert main.main([*argv, f"--data_dir={tmp_path / 'no'}"]) == 65
    assert "--data_dir" in capsys.readouterr().err
    assert main.main([*argv, "--data_dir=/tfps/no"]) == 0


def test_a_handle_is_found_among_flags_in_either_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """--flag VALUE is a flag and its value, before and after the handle; a flag that stands alone takes no handle."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(jobs.LAUNCHERS, "load", lambda name: Finder(name, found))
    asked = ["--task worker:1", "--task=worker:1", "-task worker:1"]
    for line in [f"slurm:1 {task}" for task in asked] + [f"{task} slurm:1" for task in asked]:
        for follow in ("", "--follow", "--follow 1", "--follow=1"):
            for given in (f"{line} {follow}", f"{follow} {line}"):
                found.clear()
                _, options = jobs._find(jobs.LOGS, given.split())
                assert (found, options.task, options.follow) == ([("slurm", "1")], "worker:1", bool(follow))
    assert jobs._find(jobs.LOGS, ["--follow", "no", "slurm:1"])[1].follow is False


class Finder:
    """Takes down which handle is looked for."""

    def __init__(self, name: str, found: list[tuple[str, Any]]) -> None:
        self._name, self._found = name, found

    def find(self, job_id: str) -> None:
        """Take it down."""
        self._found.append((self._name, job_id))


class Job(SubmittedJob):
    """A job in a given state, of which something may be left."""

    handle = "test:1"

    def __init__(self, state: str, *tasks: str) -> None:
        self.cancelled = 0
        known = {Task("worker", index): TaskStatus(each) for index, each in enumerate(tasks)}
        self._status = Status(state, known)

    def status(self) -> Status:
        """Return the state."""
        return self._status

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:  # noqa: ARG002
        """Yield nothing."""
        yield from ()

    def cancel(self) -> None:
        """Count it."""
        self.cancelled += 1


def test_cancel_says_if_the_job_had_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that had ended was not cancelled; what is left of it is taken away nevertheless."""
    for states, says in (
        ((RUNNING, RUNNING), "test:1 is cancelled\n"),
        ((PENDING,), "test:1 is cancelled\n"),
        ((CANCELLED,), "test:1 is cancelled\n"),
        ((SUCCEEDED, SUCCEEDED), "test:1 had ended before: SUCCEEDED\n"),
        ((FAILED, FAILED, CANCELLED), "test:1 had ended before: FAILED\n"),
        ((FAILED, FAILED, RUNNING), "test:1 had ended before: FAILED; stopped 1 task that still ran\n"),
        ((FAILED, RUNNING, PENDING), "test:1 had ended before: FAILED; stopped 2 tasks that still ran\n"),
    ):
        job = Job(*states)
        monkeypatch.setattr(jobs, "_find", lambda *_, job=job: (job, LogsOptions()))
        assert main.main(["cancel", "test:1"]) == 0
        assert (capsys.readouterr().out, job.cancelled) == (says, 1)


def test_resources_of_a_job() -> None:
    """Two machines of 8 GPUs and a PS can be said: GPUs belong to workers; what is not asked for is not set."""
    job = job_of("a", num_ps=1, num_workers=2, worker_gpu=8, ps_memory=2**30)
    assert [(role.name, role.replicas, role.gpu, role.memory_bytes) for role in job.roles] == [
        ("ps", 1, None, 2**30),
        ("worker", 2, 8, None),
    ]
    assert [str(task) for task in job.tasks()] == ["ps/0", "worker/0", "worker/1"]
    command = job.command(job_name="ps", task_index=0)
    assert command[:4] == ("python", "-m", "tfps", "run")
    assert not [word for word in command if "gpu" in word or "memory" in word or "num_" in word]
