"""The entries of ``job.json`` and ``summary.json`` beside a job's results: its flags, versions and times.

Times are UTC in ISO 8601 format: ``2026-11-23T17:04:36Z``.
"""

import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

import tfps
from tfps.cluster.spec import Cluster
from tfps.config.converters import INT64_MAX
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.config.launch_protocol import LAUNCH
from tfps.errors import CheckpointError
from tfps.runtime.coordination.compatibility import files_of
from tfps.storage import SCHEMA_VERSION, JobDirectory, read_json, write_json
from tfps.text import utc

_OF_TRAINING = (
    "size",
    "job",
    "training",
    "mode",
    "placement",
    "performance",
)  # the groups of flags that a result depends on
_NOT_COMPARED = ("model_dir", "issync", "force")


def versions() -> Mapping[str, str]:
    """Return the versions of the software that the job runs on."""
    return {"tfps": tfps.__version__, "tensorflow": tf.__version__, "python": platform.python_version()}


def write_job(config: JobConfig, cluster: Cluster, run: str) -> None:
    """Write ``job.json`` with every flag and the run's id, or nothing without a ``--model_dir``.

    Raises:
        StorageError: If it cannot be written.
    """
    if config.model_dir:
        file = {} if config.serve else {"model_sha256": files_of(config.model)["model"]}
        about = {"schema_version": SCHEMA_VERSION, "versions": versions(), "written": utc(time.time())}
        about |= {"run": run, "launch": os.environ.get(LAUNCH)}
        write_json(JobDirectory(config.model_dir).job, {**about, **file, **_flags(config, cluster)})


def changes(config: JobConfig, cluster: Cluster) -> Sequence[str]:
    """Return how flags that affect the result differ from ``job.json``, as ``--batch_size=64 (was 128)``.

    The model's file is compared, too.
    """
    before: Mapping[str, object] = {}
    with contextlib.suppress(CheckpointError):  # a damaged file is written again
        before = (read_json(JobDirectory(config.model_dir).job) if config.model_dir else None) or {}
    now = _flags(config, cluster)
    names = [name for name, option in OPTIONS.items() if option.group in _OF_TRAINING and name not in _NOT_COMPARED]
    changed = [name for name in names if name in before and before[name] != now[name]]
    files = before.get("model_sha256"), None if config.serve else files_of(config.model)["model"]
    edited = "model" not in changed and all(files) and files[0] != files[1]
    flags_changed = [f"--{name}={_shown(now[name])} (was {_shown(before[name])})" for name in changed]
    return [*(["an edited --model file"] if edited else []), *flags_changed]


def _flags(config: JobConfig, cluster: Cluster) -> Mapping[str, object]:
    workers = config.num_workers if config.serve else cluster.num_workers  # a service starts none
    return {**config.to_dict(), "num_ps": cluster.num_ps, "num_workers": workers}


def _shown(value: object) -> str:
    return "none" if value is None or value == INT64_MAX else f"{value:g}" if isinstance(value, float) else str(value)
