"""``tfps eval`` and ``tfps export``: commands that work on the directory of a trained job."""

import json
import os
import stat
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import get_type_hints

from tfps.cli.command import Command, absolute, found_from_anywhere, with_tensorflow
from tfps.cli.validation import ProblemCollector, check_model
from tfps.config import job_config
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, ConfigError
from tfps.models import loader
from tfps.models.model import Model
from tfps.progress import format_progress
from tfps.runtime.checkpoint.finder import select_checkpoint
from tfps.runtime.checkpoint.manifest import INDEX, file_of
from tfps.storage import JobDirectory, read_json


def _trained(flags: Collection[str], argv: Sequence[str]) -> tuple[JobConfig, Model, str]:
    """Return a directory's job, from ``job.json`` and the flags, with its model and the checkpoint's path."""
    problems = ProblemCollector()
    given = problems.read(flags, argv)
    problems.settle()
    if not (given.model_dir or given.checkpoint_path):
        raise ConfigError("--model_dir is missing: give the directory of a trained job.")
    directory = JobDirectory(given.model_dir or Path(given.checkpoint_path or "").parent)
    asked = problems.read(flags, argv, _stored(directory.job).replace(model_dir=str(directory.path)))
    path = absolute(select_checkpoint(asked))
    named = asked.model.endswith(".py") and asked.model != given.model  # by job.json, not by the flags
    if named:
        problems.of(_check_owner, directory.job, Path(asked.model))
    job = found_from_anywhere(asked)
    check_model(job, problems)
    with_tensorflow(problems)
    if named:
        print(f"using {job.model}, which {directory.job} names", file=sys.stderr)
    if not asked.checkpoint_path and not file_of(path, INDEX).exists():  # a running job deletes old ones
        path = absolute(select_checkpoint(asked))
    return job, loader.load(job.model), path


def _stored(path: Path) -> JobConfig:
    """Return the job in a directory's ``job.json``, which users may edit; without the file, the defaults.

    Raises:
        CheckpointError: If the file cannot be read, or a value has the wrong type.
    """
    stored = {name: value for name, value in (read_json(path) or {}).items() if name in job_config.FIELDS}
    kinds = get_type_hints(JobConfig)
    for name, value in stored.items():
        number = kinds[name] in (float, float | None)  # a float may be written without a decimal point
        if not isinstance(value, kinds[name] | int if number else kinds[name]):
            problem = f"{path} cannot be read: {name} is {json.dumps(value)}"
            raise CheckpointError(f"{problem}. Fix it, or move it away and give the flags.")
    return JobConfig(**stored)


def _check_owner(stored: Path, source: Path) -> None:
    """Check that no other user has chosen the code that is about to run.

    Raises:
        ConfigError: If the model's file, or the file that names it, belongs to another user or is writable by any user.
    """
    for path in (stored, source):
        try:
            about = path.stat()
        except OSError:
            continue  # another check reports a missing file
        if about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH:
            why = "is writable by any user" if about.st_mode & stat.S_IWOTH else "belongs to another user"
            raise ConfigError(
                f"--model is missing: {stored} names {source}, which would run as you, but {path} {why}. Check it, "
                f"then give --model={source}."
            )


def _eval(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint on this machine."""
    job, model, path = _trained(EVAL.flags, argv)
    from tfps.runtime.checkpoint import restore  # noqa: PLC0415  imports TensorFlow
    from tfps.runtime.results import evaluation  # noqa: PLC0415  imports TensorFlow

    step = restore.step_of(path)
    values = evaluation.of_checkpoint(job, model, path)
    lists = [f"{name}={json.dumps(v, separators=(',', ':'))}" for name, v in values.items() if not isinstance(v, float)]
    print(" ".join([format_progress(step, {k: v for k, v in values.items() if isinstance(v, float)}), *lists]))
    return 0


def _export(argv: Sequence[str]) -> int:
    """Write a SavedModel."""
    job, model, path = _trained(EXPORT.flags, argv)
    from tfps.runtime.results import export  # noqa: PLC0415  imports TensorFlow

    print(export.saved_model(job, model, path))
    return 0


EVAL = Command(
    _eval,
    ("job", "checkpoint"),
    "measure a checkpoint",
    "Prints one line: step=... loss=... and the model's own metrics. The model, its data and all flags that are not "
    "given here are those of the job that wrote the directory.",
    "tfps eval --model_dir=DIR",
)

EXPORT = Command(
    _export,
    ("job", "checkpoint", "export"),
    "write a SavedModel",
    "Prints the directory of the SavedModel. The model and all flags that are not given here are those of the "
    "job that wrote the checkpoint.",
    "tfps export --model_dir=DIR",
)
