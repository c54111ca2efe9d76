"""``tfps launch`` whose ``--model_dir`` is spoiled while it runs."""

import os
import signal
from pathlib import Path

import pytest
from support.processes import Process, alive, children_of, open_files, processes, slow, summary


def test_a_worker_and_a_chief_come_back_where_neither_log_nor_owner_can_be_opened(tmp_path: Path) -> None:
    """As the tasks that were not lost, they go on: each says once that it writes no log, and the job saves its end."""
    model, model_dir = tmp_path / "slow.py", tmp_path / "m"
    model.write_text(slow(0.1))
    flags = (f"--model={model}", f"--model_dir={model_dir}", "--max_steps=400", "--save_checkpoint_secs=1")
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags)
        started.append(job)
        job.wait_for("saved ", 90)
        lost = [_task(job, "worker-0.log"), _task(job, "worker-1.log")]
        (model_dir / "logs").rename(tmp_path / "logs")
        (model_dir / "logs").touch()
        (model_dir / ".chief").unlink()
        (model_dir / ".chief").mkdir()
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        assert job.wait(120) == 0, job.output()
    why = f"--model_dir: {model_dir / 'logs'} cannot be made (File exists): give a directory that you can write."
    reported = [f"{task} | this task was started again and writes no log: {why}" for task in ("worker/0", "worker/1")]
    assert [job.output().count(line) for line in reported] == [1, 1]
    assert f"--model_dir: {model_dir / '.chief'} cannot be read: it is not a regular file. Delete it." in job.output()
    assert summary(model_dir)["global_step"] == 400
    assert (model_dir / "model.ckpt-400.index").is_file()


@pytest.mark.parametrize("lost", [("worker-0.log",), ("ps-0.log", "worker-0.log")])
def test_a_chief_that_is_started_again_does_not_resume_another_run(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """A finished job's directory takes the place of its own as it is lost, alone or with the PS, and is not changed."""
    model, model_dir, other = tmp_path / "slow.py", tmp_path / "m", tmp_path / "other"
    model.write_text(slow(0.1))
    short = Process(tmp_path / "short", "launch", f"--model={model}", f"--model_dir={other}", "--max_steps=3")
    flags = (f"--model={model}", f"--model_dir={model_dir}", "--max_steps=400", "--save_checkpoint_secs=1")
    with processes() as started:
        started.append(short)
        assert short.wait(120) == 0, short.output()
        before = _files(other)
        job = Process(tmp_path / "out", "launch", *flags)
        started.append(job)
        job.wait_for("saved ", 90)
        tasks = [_task(job, log) for log in lost]
        model_dir.rename(tmp_path / "kept")
        other.rename(model_dir)
        for pid in tasks:
            os.kill(pid, signal.SIGKILL)
        assert job.wait(120) == 74, job.output()
    assert f"--model_dir={model_dir} holds another run than the one that this job began there" in job.output()
    assert _files(model_dir) == before


@pytest.mark.parametrize("lost", ["worker-0.log", "ps-0.log"])
def test_a_lost_record_ends_no_job(tmp_path: Path, lost: str) -> None:
    """Without ``job.json`` the directory is still the job's own, which a lost chief, or PS, goes on in."""
    model, model_dir = tmp_path / "slow.py", tmp_path / "m"
    model.write_text(slow(0.1))
    flags = (f"--model={model}", f"--model_dir={model_dir}", "--max_steps=200", "--save_checkpoint_secs=1")
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags)
        started.append(job)
        job.wait_for("saved ", 90)
        (model_dir / "job.json").unlink()
        os.kill(_task(job, lost), signal.SIGKILL)
        assert job.wait(120) == 0, job.output()
    assert "started again" in job.output() or "restarted after" in job.output()
    assert (summary(model_dir)["status"], summary(model_dir)["global_step"]) == ("done", 200)
    assert (model_dir / "job.json").is_file(), "the chief writes it again"


def _files(directory: Path) -> dict[str, bytes]:
    """Return what a job has left, without its logs."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def _task(job: Process, log: str) -> int:
    """Return the process of a task, by the log that it holds open."""
    [pid] = [pid for pid in alive(children_of(job.pid)) if any(log in link for link in open_files(pid))]
    return pid
