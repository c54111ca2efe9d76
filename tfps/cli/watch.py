"""Show a job that runs elsewhere as ``tfps launch`` shows a local one, and exit in the same way."""

import os
import sys
import time

from tfps.errors import CheckpointError, StoppedError
from tfps.jobs.display import JobView, job_view
from tfps.jobs.follow import Outcome, follow
from tfps.jobs.handle import RunningJob, SubmittedJob
from tfps.jobs.poller import JobPoller
from tfps.jobs.spec import Job
from tfps.report import final_lines
from tfps.storage import JobDirectory, open_file
from tfps.summary import DONE, JobSummary
from tfps.summary_entries import ChiefReport, Metric


class Result:
    """A job's ``summary.json``, if this machine sees it; made before the job starts.

    A file that is the same as before the job is not the job's: it is an earlier job's, or one of this machine only.

    Args:
        model_dir: The job's directory; ``None`` if the tasks do not see this machine's files.
    """

    def __init__(self, model_dir: str | None) -> None:
        self._path = None if model_dir is None or "://" in model_dir else JobDirectory(model_dir).summary
        self._before = self._identity()

    def read(self) -> JobSummary | None:
        """Return the summary of a job that is done; ``None`` if it cannot be seen from here."""
        if self._path is None or self._identity() == self._before:
            return None
        try:
            summary = JobSummary.read(self._path)
        except CheckpointError:
            return None
        return summary if summary and summary.status == DONE else None

    def _identity(self) -> tuple[int, ...] | None:
        """Return what differs between a file and the one that replaces it; ``None`` if there is none."""
        if self._path is None:
            return None
        try:
            with open_file(self._path) as file:
                known = os.fstat(file.fileno())
        except OSError:
            return None
        return known.st_dev, known.st_ino, known.st_mtime_ns, known.st_size


def wait_for(submitted: SubmittedJob, job: Job, began: float, result: Result) -> int:
    """Watch a submitted job to its end; returns its exit code, or 143 if a signal stops the watching."""
    view = job_view(job.config, job.tasks(), began)
    watch = JobPoller(submitted)
    outcome = follow(watch, view)
    if watch.left:
        print(f"no longer watching; the job continues: tfps status, logs or cancel {submitted.handle}")
        return StoppedError.exit_code
    code = _report(view, job, outcome, result)
    if code and code != StoppedError.exit_code:
        print(f"see tfps status or logs {submitted.handle}", file=sys.stderr)
    return code


def run_to_completion(running: RunningJob, job: Job, began: float, result: Result) -> int:
    """Run a job that ends with this command; returns its exit code."""
    view = job_view(job.config, job.tasks(), began)
    return _report(view, job, follow(running, view), result)


def _report(view: JobView, job: Job, outcome: Outcome, result: Result) -> int:
    if outcome.exit_code == StoppedError.exit_code:
        print(f"stopped at step {view.step}; the same flags and --name={job.name} resume the job.")
    elif outcome.exit_code:
        print(f"error: {outcome.error}", file=sys.stderr)
    else:
        stored = result.read()
        lines = final_lines(stored, job.config.model_dir) if stored else final_lines(_from_reports(view), None)
        print("\n".join(["", *lines]))
    return outcome.exit_code


def _from_reports(view: JobView) -> JobSummary:
    """Return a summary from the tasks' reports, for a job whose directory is not visible from here."""
    reported = [values for task in view.tasks.values() for values in task.values.items()]
    metrics: dict[str, Metric] = {
        name.removeprefix("eval/"): value for name, value in reported if name.startswith("eval/")
    }
    chief = ChiefReport(seconds=time.monotonic() - view.began, loss=view.loss, eval=metrics)
    return JobSummary(global_step=view.step, chief=chief)
