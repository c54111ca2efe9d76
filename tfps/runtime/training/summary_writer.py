"""Write ``summary.json``, which the chief leaves at the end, however the job ends."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import StoppedError, TfpsError
from tfps.modes.registry import mode_of
from tfps.runtime.checkpoint.directory import step_in
from tfps.runtime.checkpoint.finder import newest_by_sizes
from tfps.runtime.checkpoint.ownership import hosts_of
from tfps.runtime.coordination.job_state import WorkerTotals
from tfps.runtime.coordination.stragglers import Stragglers
from tfps.runtime.results import run_record
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker_progress import Progress
from tfps.storage import JobDirectory
from tfps.summary import DONE, FAILED, STOPPED, JobSummary
from tfps.summary_entries import ChiefReport, Metric, RoundCount, TaskSummary, WorkersReport
from tfps.text import utc
from tfps.tf_types import Session


@dataclass(frozen=True)
class Observations:
    """What the PS and the chief know when the job ends.

    Attributes:
        workers: The workers' progress; ``None`` if the job ends early.
        batches_skipped: See ``ChiefReport``.
        batch_size: The mean number of examples in a batch, over the workers whose is known; 0 for none.
        secs: For how many seconds the worker that has trained the longest has trained.
        partial_updates: See ``JobSummary``.
        rounds: See ``ChiefReport``.
        dropped: By worker index, how many gradients came too late; empty where that is not counted.
        metrics: The final metrics by name.
    """

    workers: WorkersReport | None = None
    batches_skipped: int = 0
    batch_size: float = 0.0
    secs: float = 0.0
    partial_updates: int | None = None
    rounds: RoundCount | None = None
    dropped: Sequence[int] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)


def observations(
    session: Session, totals: Sequence[WorkerTotals], chief: Chief, stragglers: Stragglers
) -> Observations:
    """Return what the PS and the chief know about the workers' progress, with the totals of each; no metrics."""
    paces = {index: own.steps / own.secs for index, own in enumerate(totals) if own.steps and own.secs}
    workers = WorkersReport(
        steps_per_sec={f"worker/{index}": round(pace, 3) for index, pace in sorted(paces.items())},
        behind={f"worker/{index}": share for index, share in stragglers.shares.items()},
        staleness=chief.staleness(session),
    )
    dropped, partial = chief.gradients_dropped(session), chief.partial_updates(session)
    rounds = chief.rounds(session)
    return replace(counts(totals), workers=workers, partial_updates=partial, rounds=rounds, dropped=dropped)


def counts(totals: Sequence[WorkerTotals]) -> Observations:
    """Return what some workers have done: the batches that they have skipped, their examples, and for how long.

    Each has measured its time itself, because the clocks of two hosts may differ.
    """
    known = [(own.steps, own.batch_size) for own in totals if own.steps and own.batch_size]
    mean = sum(steps * size for steps, size in known) / (sum(steps for steps, _ in known) or 1)
    skipped, secs = sum(own.skipped for own in totals), max(own.secs for own in totals)
    return Observations(batches_skipped=skipped, batch_size=mean, secs=secs)


def write(
    config: JobConfig,
    cluster: Cluster,
    loop: Loop | None,
    chief: Chief | None,
    steps: Mapping[int, int],
    observed: Observations | None = None,
    error: TfpsError | None = None,
) -> None:
    """Write ``summary.json``, or nothing without a ``--model_dir``.

    Args:
        config: The job.
        cluster: Its tasks.
        loop: The chief's own loop; ``None`` if it has taken no step.
        chief: The chief; ``None`` if the job ended before there was one.
        steps: By worker index, the steps taken in this run, as far as they are known.
        observed: What else is known; ``None`` for nothing.
        error: Why the job ended early.
    """
    if not config.model_dir:
        return
    observed = observed or Observations()
    report = _report_of_chief(config, cluster, loop, chief, steps, observed)
    summary = _summary(config, loop, chief, steps, observed, error)
    replace(summary, chief=report).write(JobDirectory(config.model_dir).summary)


def _summary(
    config: JobConfig,
    loop: Loop | None,
    chief: Chief | None,
    steps: Mapping[int, int],
    observed: Observations,
    error: TfpsError | None,
) -> JobSummary:
    """Return the summary without the chief's report."""
    progress = loop.progress if loop else Progress()
    checkpoint = (chief and chief.checkpoint) or newest_by_sizes(config.model_dir)
    found_step = (chief and chief.found_step) or (step_in(checkpoint) if checkpoint else 0)
    status = DONE if error is None else STOPPED if isinstance(error, StoppedError) else FAILED
    return JobSummary(
        status=status,
        exit_code=error.exit_code if error else 0,
        began=utc(chief.began_at) if chief else None,
        ended=utc(time.time()),
        model_dir=config.model_dir,
        model=config.model,
        mode=config.mode,
        global_step=progress.global_step or found_step,
        max_steps=config.max_steps,
        epochs=config.epochs,
        partial_updates=observed.partial_updates,
        checkpoint=checkpoint,
        tasks={f"worker/{index}": _task(taken, index, observed) for index, taken in sorted(steps.items())},
        error=str(error) if error else None,
        workers=observed.workers,
    )


def _task(steps: int, index: int, observed: Observations) -> TaskSummary:
    return TaskSummary(steps, gradients_dropped=observed.dropped[index] if observed.dropped else None)


def _report_of_chief(
    config: JobConfig,
    cluster: Cluster,
    loop: Loop | None,
    chief: Chief | None,
    steps: Mapping[int, int],
    observed: Observations,
) -> ChiefReport:
    progress = loop.progress if loop else Progress()
    updates = max(progress.global_step - chief.resumed_from_step, 0) if chief else 0
    gradients = updates * mode_of(config).gradients_per_update(config, len(cluster.workers))
    examples = gradients * observed.batch_size
    return ChiefReport(
        versions=run_record.versions(),
        hosts=hosts_of(cluster),
        is_blocking=mode_of(config).is_blocking,
        resumed_from_step=chief.resumed_from_step if chief else 0,
        resumed_from=chief.resumed_from if chief else None,
        seconds=round(observed.secs, 3),
        examples_per_sec=round(examples / observed.secs, 1) if observed.secs else 0,
        loss=progress.loss,
        pace=loop.pace.in_summary if loop and loop.progress.steps else None,
        rounds=observed.rounds,
        gradients_dropped=sum(observed.dropped) if observed.dropped else dropped(config, chief, progress, steps),
        batches_skipped=observed.batches_skipped,
        batch_size=observed.batch_size,
        eval=observed.metrics,
    )


def dropped(config: JobConfig, chief: Chief | None, progress: Progress, steps: Mapping[int, int]) -> int | None:
    """Return how many gradients came too late for their update, by the steps of the workers.

    Returns:
        ``None`` where a step is an update or part of a round, or if some steps are not known, or count only what is in
        an update.
    """
    mode = mode_of(config)
    if not mode.updates_are_shared or mode.spare_workers(config):
        return None
    if chief is None or chief.was_restarted or len(steps) < chief.num_workers:
        return None
    return sum(steps.values()) - chief.num_workers * (progress.global_step - chief.resumed_from_step)
