"""Launchers of two batch schedulers that another distribution offers, from the command line, with real tasks."""

import os
import re
import signal
from pathlib import Path

import pytest
from support import distributions, fake_schedulers
from support.processes import PATIENT, POWERS, REPO, Process, load_variable, processes, run_tfps, slow, summary

SIZE = ("--num_ps=1", "--num_workers=2")
SECS = 110
both = pytest.mark.parametrize("platform", ["pbs", "lsf"])


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the schedulers' commands, and a distribution that offers their launchers."""
    site = tmp_path / "site"
    points = [f"{name} = {name}_launcher:{name.capitalize()}Launcher" for name in ("pbs", "lsf")]
    distributions.install(site, "tfps-batch", *points)
    for name in ("pbs_launcher.py", "lsf_launcher.py"):
        (site / name).write_text((REPO / "tests" / "support" / name).read_text())
    return {
        "PYTHONPATH": f"{site}{os.pathsep}{PATIENT['PYTHONPATH']}",
        **fake_schedulers.install(tmp_path / "scheduler"),
    }


def model(directory: Path, text: str) -> str:
    """Write a model's file; return the flag that names it."""
    (directory / "model.py").write_text(text)
    return f"--model={directory / 'model.py'}"


def handle_of(output: str) -> str:
    """Return the handle that submit printed first."""
    return output.partition("\n")[0]


@both
def test_a_job_trains_to_its_end(platform: str, tmp_path: Path, env: dict[str, str]) -> None:
    """``submit --wait`` shows the job and ends with 0; the checkpoint has its step; status and logs tell the rest."""
    flags = ("--model=linear", "--max_steps=20", f"--model_dir={tmp_path / 'm'}", "--queue=main")
    result = run_tfps("submit", f"--to={platform}", *SIZE, *flags, "--wait", timeout=SECS, cwd=tmp_path, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    handle = handle_of(result.stdout)
    assert re.fullmatch(rf"{platform}:1(\.fake)?@{tmp_path / 'm'}", handle)
    assert "worker/1 | training: " in result.stdout
    assert summary(tmp_path / "m")["global_step"] >= 20
    assert load_variable(tmp_path / "m", "global_step") >= 20
    status = run_tfps("status", handle, **env)
    assert status.stdout.startswith(f"{handle}  SUCCEEDED\n")
    rows = [line.split() for line in status.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [[task, "SUCCEEDED", "0"] for task in ("ps/0", "worker/0", "worker/1")]
    logs = run_tfps("logs", handle, "--task=worker:1", **env)
    assert re.search(r"^training: mode async, 2 workers, 1 ps", logs.stdout, re.MULTILINE), logs.stdout
    assert "worker/0  | " in run_tfps("logs", handle, **env).stdout
    cancelled = run_tfps("cancel", handle, **env)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{handle} had ended before: SUCCEEDED\n")


def test_a_job_that_fails_has_its_tasks_exit_code(tmp_path: Path, env: dict[str, str]) -> None:
    """A diverged worker's 66 is the exit code of ``submit --wait``, and the first task in its status."""
    nan = model(tmp_path, POWERS.replace("weight * features", "weight * float('nan') * features"))
    flags = (nan, "--max_steps=20", f"--model_dir={tmp_path / 'm'}")
    result = run_tfps("submit", "--to=pbs", *SIZE, *flags, "--wait", timeout=SECS, cwd=tmp_path, **env)
    assert result.returncode == 66, result.stdout + result.stderr
    assert re.search(r"^error: worker/\d: ", result.stderr, re.MULTILINE)
    status = run_tfps("status", handle_of(result.stdout), **env).stdout
    assert "FAILED: exit status 66" in status
    assert re.search(r"^worker/\d +FAILED +66 ", status.splitlines()[2])


def test_cancel_lets_the_tasks_save(tmp_path: Path, env: dict[str, str]) -> None:
    """A job that is watched goes on without its watcher; cancel returns when its tasks have saved."""
    flags = (model(tmp_path, slow(0.05)), f"--model_dir={tmp_path / 'm'}", "--save_checkpoint_secs=3600")
    flags += ("--steps_to_validate=1", "--max_steps=100000")
    with processes() as started:
        watcher = Process(tmp_path / "out", "submit", "--to=lsf", *SIZE, *flags, "--wait", cwd=tmp_path, **env)
        started.append(watcher)
        watcher.wait_for_step(1, SECS)
        watcher.signal(signal.SIGINT)
        assert watcher.wait(100) == 143
        handle = handle_of(watcher.output())
        assert f"no longer watching; the job continues: tfps status, logs or cancel {handle}" in watcher.output()
    assert "RUNNING" in run_tfps("status", handle, **env).stdout
    cancelled = run_tfps("cancel", handle, timeout=SECS, **env)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{handle} is cancelled\n"), cancelled.stderr
    status = run_tfps("status", handle, **env).stdout
    assert status.startswith(f"{handle}  CANCELLED")
    assert status.count(" 143 ") == 3
    assert load_variable(tmp_path / "m", "global_step") >= 1
