"""``tfps eval`` and ``tfps export``: commands that work on the directory of a trained job."""

import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, get_type_hints

from tfps.cli.command import Command, absolute, found_from_anywhere, with_tensorflow
from tfps.cli.validation import ProblemCollector, check_model
from tfps.config.command_line import parse
from tfps.config.command_options import ResultOptions
from tfps.config.converters import boolean
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.errors import CheckpointError, ConfigError
from tfps.models import loader
from tfps.models.model import Model
from tfps.progress import format_progress
from tfps.runtime.checkpoint.finder import select_checkpoint
from tfps.runtime.checkpoint.manifest import INDEX, file_of
from tfps.runtime.coordination.compatibility import digest
from tfps.storage import JobDirectory, read_json
from tfps.summary_entries import Metric
from tfps.text import show

_Result = TypeVar("_Result")


class _Trained(NamedTuple):
    """A trained job: its config is from ``job.json`` and the flags.

    Attributes:
        config: The job.
        options: The options of the command.
        model: The model.
        checkpoint: The path of the checkpoint, without suffix.
        note: What ``job.json`` says of the model, if it names another one; else empty.
    """

    config: JobConfig
    options: ResultOptions
    model: Model
    checkpoint: str
    note: str


def _trained(command: Command, argv: Sequence[str]) -> _Trained:
    """Return the job of the directory, or of the checkpoint, that the flags name."""
    problems, flags = ProblemCollector(command.name), command.flags
    parsed = problems.read(flags, argv)
    problems.settle()
    given, options = parsed.config, parsed.options(ResultOptions)
    if not (given.model_dir or options.checkpoint_path):
        raise ConfigError("--model_dir is missing: give the directory of a trained job.")
    directory = JobDirectory(given.model_dir or Path(options.checkpoint_path or "").parent)
    stored = _stored(directory.job)
    asked = problems.read(flags, argv, stored.replace(model_dir=str(directory.path))).config
    path = absolute(select_checkpoint(asked.model_dir, options.checkpoint_path))
    if stored.serve and asked.model != given.model:  # by job.json, not by the flags
        raise ConfigError(
            f"--model is missing: a service has written {directory.path}, and it has no model. Give the one whose "
            "variables have the names of the parameters."
        )
    named = asked.model.endswith(".py") and asked.model != given.model  # by job.json, not by the flags
    if named:
        problems.of(_check_owner, directory.job, Path(asked.model))
    job, found = found_from_anywhere(asked), found_from_anywhere(options)
    check_model(job, problems)
    with_tensorflow(problems)
    if named:
        print(f"using {job.model}, which {directory.job} names", file=sys.stderr)
    if not directory.job.exists():
        print(f"{directory.job} does not exist: flags that are not given have their defaults", file=sys.stderr)
    if _differs(directory.job, job.model):
        print(f"{job.model} differs from the file that the job used: it was edited, or is another one", file=sys.stderr)
    is_other = directory.job.exists() and stored.model != job.model
    note = f" {directory.job} names --model={show(stored.model)}." if is_other else ""
    return _Trained(job, found, loader.load(job.model), path, note)


def _differs(path: Path, model: str) -> bool:
    """Return whether a model's file is not the one whose hash is in ``job.json``."""
    hashes = (read_json(path) or {}).get("model_sha256"), digest(model)
    return all(hashes) and hashes[0] != hashes[1]


def _stored(path: Path) -> JobConfig:
    """Return the job in a directory's ``job.json``, which users may edit; without the file, the defaults.

    Raises:
        CheckpointError: If the file cannot be read, or a value has the wrong type or is not allowed.
    """
    stored = {name: value for name, value in (read_json(path) or {}).items() if name in OPTIONS}
    for name, value in stored.items():
        if not _is_allowed(name, value):
            problem = f"{path} cannot be read: {name} is {json.dumps(value)}"
            raise CheckpointError(f"{problem}. Fix it, or move it away and give the flags.")
    return JobConfig(**stored)


def _is_allowed(name: str, value: object) -> bool:
    """Return whether a value has the type of a flag's, and is the default or could be given as the flag."""
    kind, default = get_type_hints(JobConfig)[name], OPTIONS[name].default
    number = kind in (float, float | None)  # a float may be written without a decimal point
    if not isinstance(value, kind | int if number else kind):
        return False
    if isinstance(value, bool):
        return OPTIONS[name].convert is boolean
    return value is None or value == default or not parse([f"--{name}={value}"], [name]).problems


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


def _with_checkpoint(trained: _Trained, use: Callable[[str], _Result]) -> _Result:
    """Use a job's checkpoint; if the job still runs and deletes it meanwhile, use the one that is the newest then."""
    from tfps.runtime.checkpoint.restore import MisfitError  # noqa: PLC0415  imports TensorFlow

    path = trained.checkpoint
    while True:
        try:
            return use(path)
        except MisfitError as error:
            raise MisfitError(f"{error}{trained.note}") from None
        except CheckpointError:
            if trained.options.checkpoint_path or file_of(path, INDEX).exists():
                raise
            path = absolute(select_checkpoint(trained.config.model_dir))


def _eval(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint on this machine."""
    trained = _trained(EVAL, argv)
    from tfps.runtime.checkpoint import restore  # noqa: PLC0415  imports TensorFlow
    from tfps.runtime.results import evaluation  # noqa: PLC0415  imports TensorFlow

    def measured(path: str) -> tuple[int, Mapping[str, Metric]]:
        return restore.step_of(path), evaluation.evaluate_checkpoint(trained.config, trained.model, path)

    step, values = _with_checkpoint(trained, measured)
    lists = [f"{name}={json.dumps(v, separators=(',', ':'))}" for name, v in values.items() if not isinstance(v, float)]
    print(" ".join([format_progress(step, {k: v for k, v in values.items() if isinstance(v, float)}), *lists]))
    return 0


def _export(argv: Sequence[str]) -> int:
    """Write a SavedModel."""
    trained = _trained(EXPORT, argv)
    from tfps.runtime.results import export  # noqa: PLC0415  imports TensorFlow

    config, model, place = trained.config, trained.model, trained.options.export_dir
    print(_with_checkpoint(trained, lambda path: export.saved_model(config, model, path, place)))
    return 0


_OF_JOB = (
    "The model, its data and all flags that are not given here are those of the job, from job.json in --model_dir or "
    "beside the checkpoint; without that file, they have the defaults of tfps launch."
)

EVAL = Command(
    "eval",
    _eval,
    ("job", "checkpoint"),
    "measure a checkpoint",
    f"Prints one line: step=... loss=... and the model's own metrics. {_OF_JOB}",
    "tfps eval --model_dir=DIR",
    has_defaults=False,
)

EXPORT = Command(
    "export",
    _export,
    ("job", "checkpoint", "export"),
    "write a SavedModel",
    f"Prints the directory of the SavedModel. {_OF_JOB}",
    "tfps export --model_dir=DIR",
    has_defaults=False,
)
