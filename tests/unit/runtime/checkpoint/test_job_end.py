"""Whether the job of a directory is over."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.checkpoints import unreadable
from support.cluster import LINEAR, dataset_of, linear, model_of, train
from support.processes import summary

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError
from tfps.launchers.local import task_process
from tfps.runtime.checkpoint import job_end
from tfps.runtime.process import process_identity
from tfps.runtime.training import joining, worker
from tfps.summary import JobSummary
from tfps.summary_entries import ChiefReport


def test_a_job_has_ended_only_while_its_checkpoint_is_there(tmp_path: Path) -> None:
    """Whoever deletes the checkpoints begins anew, however shortly after the end."""
    config = JobConfig(model_dir=str(tmp_path), max_steps=3)
    train(LINEAR, num_workers=1, model_dir=str(tmp_path), max_steps=3)
    assert job_end.has_ended(config)
    os.utime(tmp_path / "summary.json", (time.time() + 1000, time.time() + 1000))
    assert not job_end.has_ended(config)
    os.utime(tmp_path / "summary.json")
    assert job_end.has_ended(config)
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in tmp_path.glob("*.*"):
        (copied / file.name).write_bytes(file.read_bytes())
    elsewhere = JobConfig(model_dir=str(copied), max_steps=3)
    assert job_end.has_ended(elsewhere)
    [data] = copied.glob("model.ckpt-3.data-*")
    data.write_bytes(data.read_bytes()[:-4])
    os.utime(copied / "summary.json")
    assert not job_end.has_ended(elsewhere), "it is to go back to the checkpoint before"
    for file in tmp_path.glob("model.ckpt-*"):
        file.unlink()
    os.utime(tmp_path / "summary.json")
    assert not job_end.has_ended(config)


def test_a_job_with_steps_left_has_ended_only_for_those_who_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input had ended: a task that is started after that goes on, unless it takes the place of one before."""
    config = JobConfig(model_dir=str(tmp_path), max_steps=1000)
    ones = model_of(lambda mode, *_: None if mode == "eval" else dataset_of([1.0, 1.0]), linear)
    train(ones, num_workers=1, model_dir=str(tmp_path), max_steps=1000)
    assert summary(tmp_path)["global_step"] == 2
    assert job_end.has_ended(config)
    monkeypatch.setattr(process_identity, "BEGAN", time.monotonic() + 10)
    assert not job_end.has_ended(config)
    monkeypatch.setenv("TFPS_STARTED_AGAIN", "1")
    assert not job_end.has_ended(config), "lost before the chief of a new run has removed the old summary"
    assert joining.has_ended is job_end.has_ended
    assert worker.joining is joining
    assert worker.__name__ in task_process.PRELOAD, "so all processes of a task have the same start"
    loaded = f"{process_identity.__name__!r} in sys.modules and 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import sys, tfps.cli.run; assert {loaded}"], check=True)


@pytest.mark.parametrize(("global_step", "ended"), [(2, False), (3, True)])
def test_the_end_of_a_job_at_other_addresses_ends_no_task_that_has_steps_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, global_step: int, ended: bool
) -> None:
    """A job that is started in the same directory before the one there ends waits for it, and then resumes."""
    monkeypatch.setattr(job_end, "_is_intact", lambda *_: True)
    config, here = JobConfig(model_dir=str(tmp_path), max_steps=3), Cluster(("a:1",), ("a:2", "a:3"))
    (tmp_path / f"model.ckpt-{global_step}.index").touch()
    JobSummary(
        status="done",
        global_step=global_step,
        max_steps=3,
        checkpoint=str(tmp_path / f"model.ckpt-{global_step}"),
        chief=ChiefReport(hosts=("a:1", "a:2", "a:3")),
    ).write(tmp_path / "summary.json")
    assert job_end.has_ended(config, here)
    assert job_end.has_ended_since(config, 0.0, here)
    elsewhere = Cluster(("b:1",), ("b:2", "b:3"))
    assert job_end.has_ended(config, elsewhere) is ended
    assert job_end.has_ended_since(config, 0.0, elsewhere) is ended
    assert job_end.has_ended_since(config, 0.0, elsewhere, is_left=True)


def test_a_summary_that_cannot_be_read_now_ends_no_task(tmp_path: Path) -> None:
    """It says nothing, and is read again later."""
    config = JobConfig(model_dir=str(tmp_path), max_steps=3)
    train(LINEAR, num_workers=1, model_dir=str(tmp_path), max_steps=3)
    with unreadable(tmp_path / "summary.json", times=5):
        assert not job_end.has_ended(config)
        assert job_end.has_ended(config)
    with unreadable(tmp_path / "summary.json", times=5):
        assert not job_end.has_ended_since(config, 0.0)
        assert job_end.has_ended_since(config, 0.0)
    os.utime(tmp_path / "summary.json")  # so that the checkpoint is read again
    with unreadable(tmp_path / "model.ckpt-3.index", times=5):
        assert not job_end.has_ended(config)
        assert job_end.has_ended(config)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_summary_ends_no_task(tmp_path: Path, text: str) -> None:
    """A loss of power has left it empty, or it is garbled: the chief that comes deletes it, so nobody ends for it."""
    config = JobConfig(model_dir=str(tmp_path), max_steps=3)
    (tmp_path / "model.ckpt-3.index").touch()
    (tmp_path / "summary.json").write_text(text)
    assert not job_end.has_ended(config)
    assert not job_end.has_ended_since(config, 0.0, is_left=True)
    with pytest.raises(CheckpointError, match=r"summary\.json"):
        JobSummary.read(tmp_path / "summary.json")


@pytest.mark.parametrize(
    ("text", "while_the_ps_answer"),
    [
        ('{"status": "stopped", "exit_code": 143, "global_step": 2}', False),
        ('{"status": "stopped", "exit_code": 143, "global_step": 3}', True),
        ('{"status": "done", "global_step": 2}', True),
        ('{"status": "failed", "exit_code": 65, "global_step": 2}', True),
    ],
)
def test_a_job_whose_chief_is_stopped_has_ended_when_its_ps_are_gone(
    tmp_path: Path, text: str, while_the_ps_answer: bool
) -> None:
    """A platform that has stopped the chief alone starts it again; what is stopped is the job, if no PS answers.

    Nothing is left to measure after the last step.
    """
    config = JobConfig(model_dir=str(tmp_path), max_steps=3)
    (tmp_path / "model.ckpt-2.index").touch()
    (tmp_path / "summary.json").write_text(text)
    assert job_end.has_ended_since(config, 0.0) is while_the_ps_answer
    assert job_end.has_ended_since(config, 0.0, is_left=True)


def test_a_job_has_ended_by_the_file_systems_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is wrong gets the same answer."""
    train(LINEAR, num_workers=1, model_dir=str(tmp_path), max_steps=3)
    before, now = sorted(path.name for path in tmp_path.iterdir()), time.time
    for wrong_secs in (-1000, 1000):
        monkeypatch.setattr(time, "time", lambda by=wrong_secs: now() + by)
        assert job_end.has_ended(JobConfig(model_dir=str(tmp_path), max_steps=3))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ('{"status": "failed", "exit_code": 170, "checkpoint": "m/model.ckpt-3"}', False),
        ('{"status": "stopped", "exit_code": 143}', False),
        ('{"status": "done", "global_step": 3}', True),
        ("{}", False),
        ("{", False),
    ],
)
def test_the_summary_of_a_lost_chief_does_not_stay_unless_all_is_done(tmp_path: Path, text: str, stays: bool) -> None:
    """What it names is out of date as soon as the run goes on; the end of a job is not forgotten."""
    job_end.remove_of_lost_chief(None)
    job_end.remove_of_lost_chief(str(tmp_path))
    file = tmp_path / "summary.json"
    file.write_text(text)
    with unreadable(file):
        job_end.remove_of_lost_chief(str(tmp_path))
    assert file.exists(), "it may be of the job's end"
    job_end.remove_of_lost_chief(str(tmp_path))
    assert file.exists() is stays
