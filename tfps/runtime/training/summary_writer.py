"""Write ``summary.json``, which the chief leaves at the end, however the job ends."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import StoppedError, TfpsError
from tfps.modes.registry import mode_of
from tfps.runtime.checkpoint.directory import step_in
from tfps.runtime.checkpoint.finder import Finder
from tfps.runtime.checkpoint.ownership import hosts_of
from tfps.runtime.coordination.job_state import JobState
from tfps.runtime.coordination.stragglers import Stragglers, WorkerPace
from tfps.runtime.results import run_record
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.training_loop import Loop
from tfps.runtime.training.worker_progress import Progress
from tfps.storage import JobDirectory, write_json
from tfps.text import utc
from tfps.tf_types import Session


def observations(
    session: Session, state: JobState, chief: Chief, loop: Loop, stragglers: Stragglers, before: WorkerPace
) -> dict[str, Any]:
    """Return what the PS and the chief know about the workers' progress, by its name in the summary.

    ``before`` is the last heartbeat of a lost chief. Without it, a process started for the last steps would look slow.
    """
    tally, own = state.tally(session), loop.progress
    taken = [(told.steps, told.secs) for told in tally]
    taken[0] = before.steps + own.steps, before.secs + (own.seconds if own.steps else 0.0)
    paces = {index: steps / secs for index, (steps, secs) in enumerate(taken) if steps and secs}
    return {
        "batches_skipped": sum(told.skipped for told in tally[1:]) + loop.progress.skipped,  # plus worker 0's own
        "batch_size": _mean([(told.steps, told.batch_size) for told in tally[1:]], loop.progress),
        "steps_per_sec": {f"worker/{index}": round(pace, 3) for index, pace in sorted(paces.items())},
        "behind": {f"worker/{index}": share for index, share in stragglers.shares.items()},
        "staleness": chief.staleness(session),
        "partial_updates": chief.partial_updates(session),
    }


def _mean(others: Sequence[tuple[int, float]], own: Progress) -> float:
    """Return the mean number of examples in a step of the job, over the workers that reported steps and batch size."""
    known = [(steps, size) for steps, size in [*others, (own.steps, own.batch_size)] if steps and size]
    return sum(steps * size for steps, size in known) / (sum(steps for steps, _ in known) or 1)


def write(
    config: JobConfig,
    cluster: Cluster,
    loop: Loop | None,
    chief: Chief | None,
    steps: Mapping[int, int],
    observed: Mapping[str, Any] = MappingProxyType({}),
    error: TfpsError | None = None,
) -> None:
    """Write ``summary.json``, or nothing without a ``--model_dir``.

    Args:
        config: The job.
        cluster: Its tasks.
        loop: The chief's own loop; ``None`` if it has taken no step.
        chief: The chief; ``None`` if the job ended before there was one.
        steps: By worker index, the steps taken in this run, as far as they are known.
        observed: Further entries of the summary, by name.
        error: Why the job ended early.
    """
    if not config.model_dir:
        return
    progress = loop.progress if loop else Progress()
    updates, secs = chief.course(progress) if chief else (0, 0.0)
    checkpoint = (chief and chief.checkpoint) or Finder(config.model_dir).newest()
    size = observed.get("batch_size", progress.batch_size)
    batches = mode_of(config).gradients_per_update(len(cluster.workers))
    told = {
        **run_record.about(),
        "status": "done",
        "exit_code": 0,
        "began": utc(chief.began_at) if chief else None,
        "ended": utc(time.time()),
        "hosts": hosts_of(cluster),
        "model_dir": config.model_dir,
        "model": config.model,
        "mode": config.mode,
        "is_blocking": mode_of(config).is_blocking,
        "global_step": progress.global_step
        or (chief and chief.found_step)
        or (step_in(checkpoint) if checkpoint else 0),
        "max_steps": config.max_steps,
        "resumed_from_step": chief.resumed_from_step if chief else 0,
        "resumed_from": chief.resumed_from if chief else None,
        "seconds": round(secs, 3),
        "examples_per_sec": round(max(updates, 0) * batches * size / secs, 1) if secs else 0,
        "loss": progress.loss,
        "pace": loop.pace.to_dict() if loop else None,
        "gradients_dropped": dropped(config, chief, progress, steps),
        "batches_skipped": 0,
        "batch_size": size,
        "eval": {},
        **observed,
        "checkpoint": checkpoint,
        "tasks": {f"worker/{index}": {"steps": taken} for index, taken in sorted(steps.items())},
    }
    if error:
        told["status"] = "stopped" if isinstance(error, StoppedError) else "failed"
        told |= {"error": str(error), "exit_code": error.exit_code}
    write_json(JobDirectory(config.model_dir).summary, told)


def dropped(config: JobConfig, chief: Chief | None, progress: Progress, steps: Mapping[int, int]) -> int | None:
    """Return how many gradients came too late for their update; ``None`` in async, or if some steps are not known."""
    if not mode_of(config).is_blocking or chief is None or chief.was_restarted or len(steps) < chief.num_workers:
        return None
    return sum(steps.values()) - chief.num_workers * (progress.global_step - chief.resumed_from_step)
