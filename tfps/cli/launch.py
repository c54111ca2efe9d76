"""``tfps launch``: run a whole cluster on this machine."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tfps.cli import serving
from tfps.cli.command import JOB, Command, found_from_anywhere, new_model_dir
from tfps.cli.validation import ProblemCollector, check_job
from tfps.client.connect import HOSTS
from tfps.cluster import ports
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, StoppedError, StorageError
from tfps.jobs.spec import Job
from tfps.modes import registry
from tfps.report import final_lines
from tfps.runtime import task
from tfps.runtime.checkpoint import ownership
from tfps.runtime.checkpoint.directory import sealed, step_in
from tfps.runtime.checkpoint.finder import Finder
from tfps.storage import JobDirectory, make_dir, remove
from tfps.summary import JobSummary
from tfps.summary_entries import TaskSummary
from tfps.text import plural

MAX_LOCAL_TASKS = 256


def _launch(argv: Sequence[str]) -> int:
    """Run a whole cluster on this machine."""
    began = time.monotonic()
    problems = ProblemCollector(COMMAND.name)
    job = problems.read(COMMAND.flags, argv).config
    serving.check_flags(job, problems)
    serving.check_files(job, problems)
    job = registry.sized(job)
    job = job.replace(num_ps=1 if job.num_ps is None else job.num_ps, num_workers=job.num_workers or 2)
    if job.serve:
        job = job.replace(model=serving.NAME)
    else:
        check_job(job, job.num_workers, problems)
    _check_ports(job, problems)
    problems.of(task.require_tensorflow)
    problems.settle()
    job = found_from_anywhere(job.replace(model_dir=job.model_dir or new_model_dir(job.model)))
    return _follow(job, began)


def _check_ports(job: JobConfig, problems: ProblemCollector) -> None:
    """Check the number of tasks, and that only those of a service have ports of the user's choice."""
    if _num_tasks(job) > MAX_LOCAL_TASKS:
        given = f"--num_ps={job.num_ps}" + ("" if job.serve else f" and --num_workers={job.num_workers}")
        problems.add(
            f"{given} are more than the {MAX_LOCAL_TASKS} tasks that launch starts on one machine: give fewer."
        )
    if job.port_base is not None and not job.serve:
        problems.add("--port_base is for --serve: leave it out. launch finds free ports for the tasks of a job.")


def _num_tasks(job: JobConfig) -> int:
    return (job.num_ps or 0) + (0 if job.serve else job.num_workers or 2)


def _follow(job: JobConfig, began: float) -> int:
    from tfps.jobs import display, follow  # noqa: PLC0415  other commands do not need it
    from tfps.launchers.local.launcher import LocalLauncher  # noqa: PLC0415  other commands do not need it

    directory = JobDirectory(job.model_dir or ".")
    ownership.check(job.model_dir, force=job.force)
    make_dir(directory.logs)
    remove(directory.summary)  # an earlier run's
    workers = plural(job.num_workers or 2, "client" if job.serve else "worker")
    size = f"{job.num_ps} ps" if job.serve and job.mode != "sync" else f"{job.num_ps} ps, {workers}"
    print(f"{job.model}: {size}, {registry.described(job)}; model_dir {job.model_dir}", flush=True)
    with ports.held_ports(_num_tasks(job), job.port_base) as held:
        if job.serve:
            print(f"{HOSTS}={','.join(f'127.0.0.1:{port}' for port in held)}", flush=True)
        launcher = LocalLauncher(held)
        plan = launcher.plan(Job(directory.path.name, job))
        shown = display.job_view(job, plan.commands, began)
        outcome = follow.follow(launcher.submit(plan), shown)
    keep = _is_kept_for(directory, [f"127.0.0.1:{port}" for port in held])
    summary = follow.complete_summary(job, shown, outcome, keep)
    summary = _with_checkpoint(job, summary) if keep else summary
    unwritten = _written(directory.summary, summary) if keep else None
    if outcome.exit_code == StoppedError.exit_code:
        print(_stopped(job, summary))
    elif outcome.exit_code:
        print("\n".join([f"error: {outcome.error}", *follow.log_tail(job, shown, outcome)]), file=sys.stderr)
    else:
        print("\n".join(["", *final_lines(summary, job.model_dir)]))
    if unwritten:
        print(f"error: {unwritten}", file=sys.stderr)
    return outcome.exit_code or (unwritten.exit_code if unwritten else 0)


def _is_kept_for(directory: JobDirectory, hosts: Sequence[str]) -> bool:
    """Return whether a job still owns its directory at its end: no other job holds it, or held it and ended there."""
    try:
        summary = JobSummary.read(directory.summary)
    except CheckpointError:
        summary = None
    writers = list(summary.chief.hosts) if summary and summary.chief else []
    return writers in ([], hosts) and ownership.is_free_for(str(directory.path), hosts)


def _written(path: Path, summary: JobSummary) -> StorageError | None:
    """Write the summary; returns an error rather than raising it, because the job's outcome is printed first."""
    try:
        summary.write(path)
    except StorageError as error:
        return error
    return None


def _with_checkpoint(job: JobConfig, summary: JobSummary) -> JobSummary:
    """Return a summary that names the newest checkpoint, even if the chief was lost and wrote no summary."""
    if summary.chief:
        return summary
    path = _saved(job)
    step = max(summary.global_step, step_in(path)) if path else summary.global_step
    return replace(summary, checkpoint=path, global_step=step)


def _saved(job: JobConfig) -> str | None:
    """Return the newest complete checkpoint, in place or still to be published; ``None`` if none can be read."""
    try:
        return max([*sealed(job.model_dir), *filter(None, [Finder(job.model_dir).newest()])], key=step_in, default=None)
    except StorageError:
        return None


def _stopped(job: JobConfig, summary: JobSummary) -> str:
    """Return the message for a stopped job: what is on the disk, and how to resume."""
    path, step = _saved(job), _last_step(summary)
    stopped = "stopped" if step is None else f"stopped at step {step}"
    if path is None:
        return f"{stopped}; nothing was saved: --model_dir={job.model_dir} holds no complete checkpoint."
    resumes = f"the same flags and --model_dir={job.model_dir} resume from {path}"
    if step is None:
        return f"{stopped}; the last checkpoint is of step {step_in(path)}: {resumes}."
    lost = f", {step - step_in(path)} steps earlier" if step > step_in(path) else ""
    return f"{stopped}; {resumes}{lost}."


def _last_step(summary: JobSummary) -> int | None:
    """Return a stopped job's last step; ``None`` if its last chief was killed, or had not begun to train."""
    ended = summary.tasks.get(str(Task("worker", 0)), TaskSummary()).exit_code
    knows = summary.chief and summary.chief.pace and ended in (0, StoppedError.exit_code)
    return summary.global_step if knows else None


COMMAND = Command(
    "launch",
    _launch,
    ("size", "ports", *JOB, "service", "restarts"),
    "run a whole cluster on this machine",
    "Shows the job while it runs; Ctrl-C saves and stops it. Without --model_dir it creates a directory in runs/.",
    "tfps launch --num_ps=1 --num_workers=2 --model=mnist --issync=1",
)
