"""Real jobs in one ``--model_dir``, and a directory that goes away under one."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from support.processes import Process, by_hand, children_of, open_files, processes, run_tfps, slow, summary


def job_flags(tmp_path: Path, *more: str) -> list[str]:
    """Return the flags of a job that lasts, in steps of 20 ms."""
    (tmp_path / "slow.py").write_text(slow(0.02))
    return [f"--model={tmp_path / 'slow.py'}", f"--model_dir={tmp_path / 'm'}", "--steps_to_validate=10", *more]


def contents(directory: Path) -> dict[str, bytes]:
    """Return all small files below a directory."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("verb", ["launch", "run"])
def test_a_second_job_is_refused_before_anything_is_done(tmp_path: Path, verb: str) -> None:
    """It ends with 74 and names the first, which trains on; no log and no summary of the first's is touched."""
    size = ("--num_ps=1", "--num_workers=1")
    flags = job_flags(tmp_path, *size, "--max_steps=100000", "--save_checkpoint_secs=1000")
    with processes() as started:
        first = Process(tmp_path / "first.out", "launch", *flags)
        started.append(first)
        first.wait_for_step(20, 60)
        before = set(contents(tmp_path / "m"))
        cluster = ["--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:29977", "--job_name=worker", "--task_index=0"]
        given = flags if verb == "launch" else [*cluster, *flags[:3]]
        second = run_tfps(verb, *given)
        assert (second.returncode, second.stdout) == (74, "")
        assert second.stderr.startswith(f"error: --model_dir={tmp_path / 'm'} is held by another job: the chief with ")
        assert set(contents(tmp_path / "m")) == before
        assert "is held by" not in (tmp_path / "m" / "logs" / "worker-0.log").read_text()
        assert first.poll() is None
        first.signal(signal.SIGTERM)
        assert first.wait(100) == 143
    assert summary(tmp_path / "m")["status"] == "stopped"
    assert not (tmp_path / "m" / ".chief").exists()


def training(started: list[Process], tmp_path: Path, *flags: str) -> Process:
    """Return a job that does not end by itself, once it has taken some steps; it is started, and noted."""
    started.append(Process(tmp_path / "first.out", "launch", *flags, "--max_steps=100000"))
    started[-1].wait_for_step(20, 60)
    return started[-1]


def test_force_takes_over_and_the_first_job_ends_within_seconds(tmp_path: Path) -> None:
    """The second goes on from the checkpoint that there is; the first's error says who; the summary is the second's."""
    flags = job_flags(tmp_path, "--num_ps=1", "--num_workers=2", "--save_checkpoint_secs=1000")
    with processes() as started:
        first = training(started, tmp_path, *flags)
        second = Process(tmp_path / "second.out", "launch", *flags, "--max_steps=600", "--force")
        started.append(second)
        second.wait_for("training", 60)
        assert first.wait(100) == 74, first.output()
        assert "was taken over by the chief with process id" in first.output()
        assert second.wait(120) == 0, second.output()
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"], reported["resumed_from_step"]) == ("done", 600, 0)


def test_a_launcher_that_comes_too_late_leaves_the_summary_of_the_next_job(tmp_path: Path) -> None:
    """The first job's launcher stood still (Ctrl-Z) while the second took the directory over and came to its end."""
    flags = job_flags(tmp_path, "--num_ps=1", "--num_workers=1", "--save_checkpoint_secs=1000")
    with processes() as started:
        first = training(started, tmp_path, *flags)
        first.signal(signal.SIGSTOP)
        second = run_tfps("launch", *flags, "--max_steps=100", "--force")
        assert second.returncode == 0, second.stderr
        before = (tmp_path / "m" / "summary.json").read_bytes()
        first.signal(signal.SIGCONT)
        assert first.wait(100) == 74, first.output()
    assert "was taken over by the chief with process id" in first.output()
    assert (tmp_path / "m" / "summary.json").read_bytes() == before
    assert summary(tmp_path / "m")["status"] == "done"


def test_a_killed_job_is_gone_on_with_at_once(tmp_path: Path) -> None:
    """Of a launcher and tasks that were killed, the next job in the directory knows that they are dead."""
    flags = job_flags(tmp_path, "--save_checkpoint_secs=0.2", "--max_steps=400")
    with by_hand(tmp_path, 1, 1, *flags) as tasks:
        tasks["worker/0"].wait_for("saved", 60)
        for name in ("worker/0", "ps/0"):
            tasks[name].end()
    assert (tmp_path / "m" / ".chief").exists()
    again = run_tfps("launch", *flags, "--num_workers=1")
    assert again.returncode == 0, again.stderr
    assert "waiting up to" not in again.stdout + again.stderr
    assert "resumed from" in again.stdout


def test_a_directory_removed_in_mid_run_is_said_and_saved_to_at_once(tmp_path: Path) -> None:
    """``rm -rf`` of the directory costs what was in it, and no step after it: a lost PS brings a checkpoint back."""
    flags = job_flags(tmp_path, "--num_ps=1", "--num_workers=1", "--save_checkpoint_secs=1000", "--max_steps=1500")
    with processes() as started:
        job = Process(tmp_path / "job.out", "launch", *flags)
        started.append(job)
        job.wait_for_step(30, 60)
        assert f"no checkpoint in {tmp_path / 'm'}: training begins at step 0" in job.output()
        shutil.rmtree(tmp_path / "m")
        job.wait_for("is gone. This job recreates it and saves immediately.", 10)
        job.wait_for("| saved /", 10)
        [pid] = [one for one in children_of(job.pid) if _is_ps(one)]
        os.kill(pid, signal.SIGKILL)
        job.wait_for("resumed from", 60)
        assert json.loads((tmp_path / "m" / "job.json").read_text())["max_steps"] == 1500
        job.signal(signal.SIGTERM)
        assert job.wait(100) in (0, 143)
    assert job.output().count("training begins at step 0") == 1


def test_a_directory_removed_with_the_only_ps_leaves_nothing_and_it_is_said(tmp_path: Path) -> None:
    """A job that was started again, and finds no checkpoint, says that all it had trained is gone."""
    flags = job_flags(tmp_path, "--num_ps=1", "--num_workers=1", "--save_checkpoint_secs=1000", "--max_steps=1500")
    with processes() as started:
        job = Process(tmp_path / "job.out", "launch", *flags)
        started.append(job)
        job.wait_for_step(30, 60)
        [pid] = [one for one in children_of(job.pid) if _is_ps(one)]
        os.kill(pid, signal.SIGKILL)
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        job.wait_for("steps that were taken before are lost", 60)
        job.signal(signal.SIGTERM)
        assert job.wait(100) in (0, 143)
    assert job.output().count("training begins at step 0") == 2
    assert job.output().count("steps that were taken before are lost") == 1


def _is_ps(pid: int) -> bool:
    """Return whether a task's process is the PS: its log is open there."""
    try:
        return any("ps-0.log" in link for link in open_files(pid))
    except OSError:
        return False


EVALUATED = 'return tf.data.Dataset.from_tensors(({"x": 1.0}, 0.0))'
CHANGES = """
import os, sys, pathlib
elsewhere = pathlib.Path(__file__).parent / "elsewhere"
elsewhere.mkdir(exist_ok=True)
os.chdir(elsewhere)
"""


def test_a_model_that_changes_directory_scatters_nothing(tmp_path: Path) -> None:
    """A relative ``--model_dir``, ``--checkpoint_path`` or ``--export_dir`` means what it meant at the start."""
    (tmp_path / "wanders.py").write_text(slow(0.001).replace("return None", EVALUATED) + CHANGES)
    flags = ("--model=wanders.py", "--model_dir=m", "--num_workers=1", "--max_steps=30")
    assert run_tfps("launch", *flags, cwd=tmp_path).returncode == 0
    path = json.loads((tmp_path / "m" / "job.json").read_text())["model"]
    assert path == str(tmp_path / "wanders.py")
    export = ("export", "--model_dir=m", "--checkpoint_path=m/model.ckpt-30", "--export_dir=saved")
    ended = run_tfps(*export, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    left = {path.name.partition(".tfevents")[0] for path in (tmp_path / "m").iterdir()}
    assert {"logs", "job.json", "summary.json", "checkpoint", "events.out", "model.ckpt-30.index"} <= left
    assert (tmp_path / "saved" / "saved_model.pb").is_file()
