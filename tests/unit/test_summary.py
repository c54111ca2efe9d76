"""``summary.json`` is read and written in one place."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tfps.errors import CheckpointError
from tfps.summary import FAILED, JobSummary
from tfps.summary_entries import ChiefReport, LauncherReport, RunPace, TaskSummary, WorkersReport

# What a launcher leaves of a job that came to its end, with every entry that there is.
WHOLE: dict[str, Any] = {
    "schema_version": 1,
    "versions": {"tfps": "0.1.0", "tensorflow": "2.21.0", "python": "3.11.7"},
    "status": "done",
    "exit_code": 0,
    "began": "2026-11-25T09:12:39Z",
    "ended": "2026-11-25T09:12:43Z",
    "hosts": ["127.0.0.1:39093", "127.0.0.1:46161", "127.0.0.1:34517"],
    "model_dir": "/m",
    "model": "linear",
    "mode": "async",
    "is_blocking": False,
    "global_step": 60,
    "max_steps": 60,
    "resumed_from_step": 0,
    "resumed_from": None,
    "seconds": 0.445,
    "examples_per_sec": 2157.9,
    "loss": 0.187,
    "pace": {"steps_per_run": 1, "runs_in_flight": 2},
    "rounds": None,
    "gradients_dropped": None,
    "batches_skipped": 0,
    "batch_size": 16.0,
    "eval": {"loss": 0.125, "auc": None, "matrix": [[1.0, 2.0], [3.0, None]]},
    "steps_per_sec": {"worker/0": 132.621, "worker/1": 3.235},
    "behind": {"worker/1": 0.25},
    "staleness": [33, 27],
    "partial_updates": 0,
    "checkpoint": "/m/model.ckpt-60",
    "tasks": {
        "ps/0": {"exit_code": 0, "restarts": 1, "restarted_after": ["SIGKILL"]},
        "worker/0": {"steps": 59, "exit_code": None, "restarts": 0},
    },
    "recovery_secs": 0.5,
    "first_step_secs": 3.75,
}
_OF_WORKERS = ("steps_per_sec", "behind", "staleness")
_OF_LAUNCHER = ("recovery_secs", "first_step_secs")
_WITHOUT_CHIEF = (
    *("schema_version", "status", "exit_code", "began", "ended", "model_dir", "model", "mode", "global_step"),
    *("max_steps", "checkpoint", "tasks"),
)


@pytest.mark.parametrize(
    "content",
    [
        WHOLE,
        WHOLE | {"staleness": None, "loss": None, "pace": None, "checkpoint": None, "first_step_secs": None},
        {name: value for name, value in WHOLE.items() if name not in _OF_LAUNCHER},
        {name: value for name, value in WHOLE.items() if name not in (*_OF_WORKERS, "partial_updates")}
        | {"status": "failed", "exit_code": 66, "error": "worker/1: the loss is inf"},
        {name: WHOLE[name] for name in (*_WITHOUT_CHIEF, *_OF_LAUNCHER)},
        WHOLE | {"tasks": {"worker/0": {"steps": 0}}},
        WHOLE | {"rounds": {"made": 21, "fewest_steps": 12, "most_steps": 16}},
        WHOLE | {"seconds": 0.0, "examples_per_sec": 0.0, "batch_size": 0.0, "recovery_secs": 0.0},
        WHOLE | {"examples_per_sec": 0},
        WHOLE | {"epochs": 2},
        WHOLE | {"of a later version": [1, {"x": None}]},
    ],
)
def test_what_is_read_is_written_again(content: dict[str, Any], tmp_path: Path) -> None:
    """Each form of the file stays as it is: no entry is lost, none is added, and each keeps its value and type."""
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(content))
    summary = JobSummary.read(path)
    assert summary
    summary.write(path)
    assert json.dumps(json.loads(path.read_text()), sort_keys=True) == json.dumps(content, sort_keys=True)
    assert JobSummary.read(path) == summary


def test_the_entries_keep_their_order() -> None:
    """People find an entry where it has always been."""
    assert list(JobSummary.from_json(WHOLE).to_json()) == list(WHOLE)
    with_epochs = JobSummary.from_json(WHOLE | {"epochs": 2}).to_json()
    assert list(with_epochs)[list(with_epochs).index("max_steps") :][:2] == ["max_steps", "epochs"]


def test_a_summary_has_types() -> None:
    """A reader needs no names of entries."""
    summary = JobSummary.from_json(WHOLE)
    assert (summary.status, summary.global_step, summary.max_steps) == ("done", 60, 60)
    assert summary.tasks["ps/0"] == TaskSummary(None, 0, 1, ["SIGKILL"])
    assert summary.chief
    assert summary.chief.pace == RunPace(steps_per_run=1, runs_in_flight=2)
    assert summary.workers == WorkersReport({"worker/0": 132.621, "worker/1": 3.235}, {"worker/1": 0.25}, [33, 27])
    assert summary.launcher == LauncherReport(0.5, 3.75)


def test_a_file_of_another_version_or_hand_is_read() -> None:
    """An entry that is missing, or not what it should be, has its default; the others count."""
    assert JobSummary.from_json({}) == JobSummary()
    odd: dict[str, Any] = {name: {"odd": ["thing"]} for name in WHOLE} | {"global_step": 7.0, "loss": 0.5}
    summary = JobSummary.from_json(odd)
    assert (summary.status, summary.exit_code, summary.global_step, summary.max_steps) == ("", 0, 7, None)
    assert summary.chief == ChiefReport(hosts=[], loss=0.5, eval={"odd": [None]})
    assert summary.workers == WorkersReport()
    assert summary.tasks == {"odd": TaskSummary(restarted_after=[])}
    for wrong in ("abc", [1], None, math.inf, math.nan, 0.5):
        assert JobSummary.from_json({"global_step": wrong, "exit_code": wrong}) == JobSummary()


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    """No file is ``None``; a damaged one is an error that names it."""
    path = tmp_path / "summary.json"
    assert JobSummary.read(path) is None
    path.write_text("[1]")
    with pytest.raises(CheckpointError, match=r"summary\.json holds no JSON object"):
        JobSummary.read(path)


@pytest.mark.parametrize(("exit_code", "may"), [(0, False), (2, False), (127, False), (170, True)])
def test_what_may_continue(exit_code: int, may: bool) -> None:
    """A job whose tasks a restart may bring back is not over yet."""
    assert JobSummary(status=FAILED, exit_code=exit_code).may_continue is may
    assert not JobSummary(status="stopped", exit_code=exit_code).may_continue
