"""What ``tfps submit --wait`` reports at a job's end: the job's own result, or what its tasks have reported."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import job_of

from tfps.cli import watch
from tfps.cluster.spec import Task
from tfps.jobs.events import LogLine
from tfps.jobs.handle import SUCCEEDED, Status, SubmittedJob, TaskStatus
from tfps.storage import JobDirectory
from tfps.summary import DONE, FAILED, JobSummary

CHIEF = Task("worker", 0)


class EndedJob(SubmittedJob):
    """A job that has succeeded; its chief has reported step 7."""

    handle = "test:1"

    def status(self) -> Status:
        """Return the status of its only task that matters."""
        return Status(SUCCEEDED, {CHIEF: TaskStatus(SUCCEEDED, 0)})

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:  # noqa: ARG002
        """Yield the line with its progress."""
        yield LogLine(CHIEF, "step=7 loss=0.5")

    def cancel(self) -> None:
        """Do nothing."""


def wait(model_dir: Path, result: watch.Result, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed for a job that succeeds."""
    assert watch.wait_for(EndedJob(), job_of(model_dir=str(model_dir)), time.monotonic(), result) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def write(model_dir: Path, step: int, status: str = DONE) -> None:
    """Write a result."""
    JobSummary(status=status, global_step=step, checkpoint=f"checkpoint-{step}").write(JobDirectory(model_dir).summary)


def test_the_result_that_the_job_has_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is new, or replaces an earlier job's, is the job's result, with its checkpoint."""
    result = watch.Result(str(tmp_path))
    for step in (40, 50):
        write(tmp_path, step)
        out = wait(tmp_path, result, capsys)
        assert f"done: step {step} after" in out
        assert f"checkpoint-{step}\n" in out
        result = watch.Result(str(tmp_path))


def test_the_result_of_another_job_is_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was there before, that no task can see, or that is of no job that is done: the reports count."""
    write(tmp_path, 40)
    for result in (watch.Result(str(tmp_path)), watch.Result(None)):
        out = wait(tmp_path, result, capsys)
        assert "done: step 7 after" in out
        assert "checkpoint" not in out
    result = watch.Result(str(tmp_path))
    write(tmp_path, 50, FAILED)
    assert "done: step 7 after" in wait(tmp_path, result, capsys)


@pytest.mark.parametrize("spoil", ["text", "link"])
def test_a_result_that_cannot_be_read_does_not_fail_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: str
) -> None:
    """A damaged file, or one that cannot be opened: the job has succeeded nevertheless."""
    result = watch.Result(str(tmp_path))
    path = JobDirectory(tmp_path).summary
    if spoil == "text":
        path.write_text("{")
    else:
        path.symlink_to(path)  # also for root, whom no permissions stop
    assert "done: step 7 after" in wait(tmp_path, result, capsys)
