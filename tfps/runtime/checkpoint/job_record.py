"""Whether a directory's files show that it holds another run than a chief's, or that another chief has ended its run.

Does not import TensorFlow.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfps.config.launch_protocol import HAS_RECORD, LAUNCH
from tfps.errors import CheckpointError
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.storage import JobDirectory, UnreadableError, place_of, read_json
from tfps.text import show


def is_of_other_launch(model_dir: str) -> bool:
    """Return whether a directory holds another run than that of this task's launcher, as far as that is recorded.

    An earlier process of this task has written a record. Where it is lost, the directory has to be the same one.

    Raises:
        StorageError: If the directory cannot be read.
        UnreadableError: If ``job.json`` cannot be read now.
    """
    if HAS_RECORD not in os.environ:
        return False
    if found := _record_in(model_dir):
        return found.get("launch") != os.environ.get(LAUNCH)
    return bool(list_checkpoints(model_dir)) and os.environ[HAS_RECORD] != str(place_of(model_dir))


def is_of_other_run(model_dir: str, run: str) -> bool:
    """Return whether a directory's ``job.json`` is of another run than the one with an id; empty if that is not known.

    Raises:
        UnreadableError: If ``job.json`` cannot be read now.
    """
    return bool(run) and _record_in(model_dir).get("run") not in (None, run)


def summary_id(model_dir: str) -> tuple[int, int] | None:
    """Return what tells the summary in a directory from one that is written later; ``None`` if there is none."""
    try:
        found = JobDirectory(model_dir).summary.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def ended_error(model_dir: str) -> str:
    """Return the text of the error that another chief has ended the run of a directory."""
    return (
        f"--model_dir={show(model_dir, 200)} has the summary.json of another chief: this chief was presumed lost and "
        "restarted there, and that run has ended. This process exits."
    )


def other_directory_error(model_dir: str, checkpoint: str) -> str:
    """Return the text of the error that another directory, with a checkpoint, has taken the place of a chief's."""
    return (
        f"--model_dir={show(model_dir, 200)} is not the directory in which this job started, and holds "
        f"{Path(checkpoint).name} of another run: this job saves nothing more there. Put the original directory back, "
        "and restart the job."
    )


def other_run_error(model_dir: str) -> str:
    """Return the text of the error that a directory holds another run."""
    return (
        f"--model_dir={show(model_dir, 200)} holds another run than the one that this job began there, so this job "
        "cannot resume: the directory was replaced, or another job has used it. Put the original directory back, "
        "and start the job again."
    )


def _record_in(model_dir: str) -> Mapping[str, Any]:
    """Return the content of ``job.json``; nothing if it is lost or damaged."""
    try:
        return read_json(JobDirectory(model_dir).job) or {}
    except UnreadableError:
        raise
    except CheckpointError:
        return {}
