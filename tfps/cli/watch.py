"""Show a job that runs elsewhere as ``tfps launch`` shows a local one, and exit in the same way."""

import sys
import time

from tfps.errors import StoppedError
from tfps.jobs.display import JobView, job_view
from tfps.jobs.follow import Outcome, follow
from tfps.jobs.handle import RunningJob, SubmittedJob
from tfps.jobs.poller import JobPoller
from tfps.jobs.spec import Job
from tfps.report import final_lines
from tfps.storage import JobDirectory
from tfps.summary import ChiefReport, JobSummary, Metric


def wait_for(submitted: SubmittedJob, job: Job, began: float) -> int:
    """Watch a submitted job to its end; returns its exit code, or 143 if a signal stops the watching."""
    view = job_view(job.config, job.tasks(), began)
    watch = JobPoller(submitted)
    outcome = follow(watch, view)
    if watch.left:
        print(f"no longer watching; the job continues: tfps status, logs or cancel {submitted.handle}")
        return StoppedError.exit_code
    code = _report(view, job, outcome)
    if code and code != StoppedError.exit_code:
        print(f"see tfps status or logs {submitted.handle}", file=sys.stderr)
    return code


def run_to_completion(running: RunningJob, job: Job, began: float) -> int:
    """Run a job that ends with this command; returns its exit code."""
    view = job_view(job.config, job.tasks(), began)
    return _report(view, job, follow(running, view))


def _report(view: JobView, job: Job, outcome: Outcome) -> int:
    if outcome.exit_code == StoppedError.exit_code:
        print(f"stopped at step {view.step}; the same flags and --name={job.name} resume the job.")
    elif outcome.exit_code:
        print(f"error: {outcome.error}", file=sys.stderr)
    else:
        model_dir = job.config.model_dir
        stored = JobSummary.read(JobDirectory(model_dir).summary) if model_dir else None
        lines = final_lines(stored, model_dir) if stored else final_lines(_from_reports(view), None)
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
