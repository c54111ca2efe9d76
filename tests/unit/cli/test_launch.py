"""What ``tfps launch`` says at the end of a job that was stopped: only what is known."""

from pathlib import Path

import pytest
from support.checkpoints import Training

from tfps.cli import launch
from tfps.config.job_config import JobConfig
from tfps.summary import JobSummary
from tfps.summary_entries import ChiefReport, RunPace, TaskSummary

TRAINED, NOT_YET = ChiefReport(pace=RunPace(2, 1)), ChiefReport()


@pytest.mark.parametrize(
    ("chief", "code", "unsaved", "saved"),
    [
        (TRAINED, 143, "stopped at step 9; nothing was saved", "stopped at step 9; the same flags and"),
        (TRAINED, 0, "stopped at step 9; nothing was saved", "stopped at step 9; the same flags and"),
        (TRAINED, -9, "stopped; nothing was saved", "stopped; the last checkpoint is of step 7: the same flags and"),
        (NOT_YET, 143, "stopped; nothing was saved", "stopped; the last checkpoint is of step 7: the same flags and"),
        (None, None, "stopped; nothing was saved", "stopped; the last checkpoint is of step 7: the same flags and"),
    ],
)
def test_a_step_is_named_only_where_the_chief_knew_it(
    tmp_path: Path, chief: ChiefReport | None, code: int | None, unsaved: str, saved: str
) -> None:
    """The steps after the last that was shown are not known if the chief was killed, or stopped before it trained."""
    job = JobConfig(model_dir=str(tmp_path))
    summary = JobSummary(global_step=9, chief=chief, tasks={"worker/0": TaskSummary(exit_code=code)})
    assert launch._stopped(job, summary) == f"{unsaved}: --model_dir={tmp_path} holds no complete checkpoint."
    Training(tmp_path).save(7)
    lost = ", 2 steps earlier" if saved.startswith("stopped at") else ""
    assert launch._stopped(job, summary) == f"{saved} --model_dir={tmp_path} resume from {tmp_path}/model.ckpt-7{lost}."
