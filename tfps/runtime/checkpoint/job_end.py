"""Whether the job of a directory is over, by its ``summary.json``. Does not import TensorFlow."""

import functools
import os
import time
from pathlib import Path

from tfps.config.job_config import STARTED_AGAIN, JobConfig
from tfps.runtime.checkpoint import file_clock
from tfps.runtime.checkpoint.manifest import INDEX, file_of, problem
from tfps.storage import JobDirectory, read_json

_BEGAN = time.monotonic()  # when this process started


def has_ended(config: JobConfig) -> bool:
    """Return whether the job's summary reports that the job ended, and not long ago.

    A task that was lost near the end of its job and then restarted finds no other task. A task that is started for the
    first time after that end belongs to another run, which continues if there is something left to train.
    """
    path = JobDirectory(config.model_dir or ".").summary
    summary = read_json(path) if config.model_dir else None
    if not summary or summary.get("status") != "done" or summary.get("max_steps") != config.max_steps:
        return False
    age_secs = abs(file_clock.now(path.parent) - path.stat().st_mtime)
    is_later = age_secs > time.monotonic() - _BEGAN and not os.environ.get(STARTED_AGAIN)
    if is_later and int(summary.get("global_step") or 0) < config.max_steps:
        return False
    saved = str(path.parent / Path(str(summary.get("checkpoint"))).name)  # the directory may have been moved or copied
    return age_secs < config.patience_secs and _is_intact(saved, path.stat().st_mtime)


@functools.lru_cache(maxsize=1)
def _is_intact(path: str, written: float) -> bool:
    """Return whether the last checkpoint is there, and intact; else the job has to start again.

    Reads the files only once for each time at which the summary was ``written``.
    """
    del written
    return os.path.isfile(file_of(path, INDEX)) and problem(path) is None
