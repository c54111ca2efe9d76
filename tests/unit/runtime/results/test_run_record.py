"""What a job records of itself: versions, times, and what a resume changed."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.cluster import train
from support.processes import summary

import tfps
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.models import loader
from tfps.runtime.results import run_record

CLUSTER = Cluster(("a:1",), ("b:1", "c:1"))


def test_what_a_resume_changed(tmp_path: Path) -> None:
    """Flags that a result depends on are reported with their old values; others, and unchanged ones, are not."""
    before = JobConfig(model_dir=str(tmp_path), batch_size=128, learning_rate=None, max_restarts=1)
    run_record.write_job(before, CLUSTER, "an-id")
    assert run_record.changes(before, CLUSTER) == []
    after = before.replace(batch_size=64, learning_rate=0.5, max_restarts=7, save_checkpoint_secs=1.0)
    assert sorted(run_record.changes(after, Cluster(("a:1",), ("b:1",)))) == [
        "--batch_size=64 (was 128)",
        "--learning_rate=0.5 (was none)",
        "--num_workers=1 (was 2)",
        "--save_checkpoint_secs=1 (was 60)",
    ]
    (tmp_path / "job.json").write_text("{")
    assert run_record.changes(after, CLUSTER) == [], "it is written anew"
    assert run_record.changes(JobConfig(), CLUSTER) == []


@pytest.mark.parametrize("is_module", [False, True])
def test_an_edited_model_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool) -> None:
    """A resume that goes on with another text of the same file, or of a module's, says so."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = tmp_path / "edited_between" / "mine.py"
    file.parent.mkdir()
    file.write_text("rate = 1\n")
    config = JobConfig(model_dir=str(tmp_path), model="edited_between.mine" if is_module else str(file))
    run_record.write_job(config, CLUSTER, "an-id")
    assert run_record.changes(config, CLUSTER) == []
    file.write_text("rate = 3\n")
    assert run_record.changes(config, CLUSTER) == ["an edited --model file"]


def test_both_files_tell_versions_and_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``job.json`` and ``summary.json`` have versions, times and whole paths; a resume tells what it changed."""
    caplog.set_level("INFO", "tfps")
    flags = {"mode": "async", "steps_to_validate": 10, "model_dir": str(tmp_path)}
    model = loader.load("linear")
    train(model, num_workers=1, max_steps=20, batch_size=32, **flags)
    assert "resuming with" not in caplog.text
    for name in ("job.json", "summary.json"):
        reported = json.loads((tmp_path / name).read_text())
        assert reported["schema_version"] == 1
        assert reported["versions"]["tfps"] == tfps.__version__
        assert set(reported["versions"]) == {"tfps", "tensorflow", "python"}
    reported = summary(tmp_path)
    assert (reported["status"], reported["exit_code"], reported["model_dir"]) == ("done", 0, str(tmp_path))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", reported["began"])
    assert reported["began"] <= reported["ended"]
    assert reported["checkpoint"] == str(tmp_path / "model.ckpt-20")
    train(model, num_workers=1, max_steps=40, batch_size=64, **flags)
    assert "resuming with --batch_size=64 (was 32), --max_steps=40 (was 20)" in caplog.text
