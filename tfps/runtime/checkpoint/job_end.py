"""Whether the job of a directory is over, by its ``summary.json`` and its checkpoints. Does not import TensorFlow.

A task that starts and an evaluator ask this. Both take a summary for the end of this run only if it is new enough, by
the file system's clock.
"""

import functools
import os
import time
from pathlib import Path
from typing import NamedTuple

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError
from tfps.runtime.checkpoint import file_clock
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.checkpoint.manifest import INDEX, damage, file_of
from tfps.runtime.checkpoint.ownership import hosts_of
from tfps.runtime.process import process_identity
from tfps.storage import JobDirectory, UnreadableError, remove
from tfps.summary import DONE, STOPPED, JobSummary


class _Found(NamedTuple):
    """A summary, and when it was written, by the file system's clock."""

    summary: JobSummary
    written: float


def _find(model_dir: str | None) -> _Found | None:
    """Return the summary in a directory; ``None`` if there is none, as after a chief has started there.

    One that cannot be read now is none, too: who asks asks again. So is a damaged one, which reports no end: a loss of
    power may have left it empty, and the next chief deletes it.
    """
    if not model_dir:
        return None
    path = JobDirectory(model_dir).summary
    try:
        summary = JobSummary.read(path)
        return _Found(summary, path.stat().st_mtime) if summary else None
    except (CheckpointError, OSError):
        return None


def remove_of_lost_chief(model_dir: str | None) -> None:
    """Delete the summary that a lost chief has left of a run that goes on; keep one that reports its end.

    Raises:
        StorageError: If it cannot be deleted.
    """
    if not model_dir:
        return
    path = JobDirectory(model_dir).summary
    try:
        found = JobSummary.read(path)
        is_stale = found is not None and found.status != DONE
    except UnreadableError:  # it may report the end
        return
    except CheckpointError:
        is_stale = True
    if is_stale:
        remove(path)


def has_ended(config: JobConfig, cluster: Cluster | None = None) -> bool:
    """Return whether the job's summary reports that the job ended, and not long ago.

    A task that was lost near the end of its job and then restarted finds no other task. A task that is started for the
    first time after that end, or at other addresses, belongs to another run, which continues if there is something left
    to train.

    Args:
        config: The job.
        cluster: The cluster of the asking task; ``None`` if that is not known.
    """
    found = _find(config.model_dir)
    if not found or found.summary.status != DONE or found.summary.max_steps != config.max_steps:
        return False
    age_secs = abs(file_clock.now(config.model_dir or ".") - found.written)
    is_other = age_secs > time.monotonic() - process_identity.BEGAN or _is_elsewhere(found.summary, cluster)
    if is_other and not found.summary.has_reached(config.max_steps):
        return False
    if found.summary.checkpoint is None or not config.model_dir:
        return False
    saved = str(Path(config.model_dir) / Path(found.summary.checkpoint).name)  # the directory may have been moved
    try:
        return age_secs < config.patience_secs and _is_intact(saved, found.written)
    except OSError:  # it cannot be read now: who asks asks again
        return False


def _is_elsewhere(summary: JobSummary, cluster: Cluster | None) -> bool:
    """Return whether a summary is of a job at other addresses, as far as both are known."""
    hosts = list(summary.chief.hosts) if summary.chief else []
    return bool(hosts and cluster) and hosts != list(hosts_of(cluster))


@functools.lru_cache(maxsize=1)
def _is_intact(path: str, written: float) -> bool:
    """Return whether the last checkpoint is there, and intact; else the job has to start again.

    Reads the files only once for each time at which the summary was ``written``, if it can read them.

    Raises:
        OSError: If a file is there and cannot be read.
    """
    del written
    return os.path.isfile(file_of(path, INDEX)) and damage(path) is None


def has_ended_since(config: JobConfig, began: float, cluster: Cluster | None = None, *, is_left: bool = False) -> bool:
    """Return whether the job of a directory has ended, as its evaluator sees it.

    A new run removes the summary of an earlier one, but only when its chief has joined it. So an earlier summary, or
    that of a job at other addresses, counts only if training was complete, or if nobody is there to start a new run. So
    does that of a stopped chief: a platform that has stopped only the chief starts it again, and the other tasks wait
    for it.

    Args:
        config: The job.
        began: When the asking evaluator started, by the file system's clock.
        cluster: The cluster of the asking evaluator; ``None`` if that is not known.
        is_left: Whether no PS has answered for so long that none will.
    """
    found = _find(config.model_dir)
    if not found or found.summary.may_continue:
        return False  # the job may continue when its tasks are restarted
    is_own = found.written >= began and not _is_elsewhere(found.summary, cluster)
    if is_own and found.summary.status != STOPPED:
        return True
    return (is_left or found.summary.has_reached(config.max_steps)) and bool(list_checkpoints(config.model_dir))
