"""The definition of a command, and functions that several commands share."""

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfps.cli.validation import ProblemCollector
from tfps.config.command_line import FLAGS, OptionsT, flags_of
from tfps.config.converters import boolean
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.models.loader import is_path
from tfps.runtime import task
from tfps.runtime.process import task_log, tensorflow_import
from tfps.text import show

JOB = ("job", "training", "mode", "placement", "performance", "timeouts")  # the groups of flags that training takes


@dataclass(frozen=True)
class Command:
    """One command of ``tfps``.

    Attributes:
        name: Its name on the command line.
        act: Runs the command with the given arguments; returns the exit code.
        groups: The groups of flags that it takes.
        summary: What it does, in a few words.
        details: What it does, in two sentences.
        example: An example command line.
        argument: The argument that it takes beside flags.
        has_defaults: Whether ``--help`` shows the defaults of its flags; not if a job's own values take their place.
    """

    name: str
    act: Callable[[Sequence[str]], int]
    groups: Sequence[str]
    summary: str
    details: str
    example: str
    argument: str = ""
    has_defaults: bool = True

    @property
    def flags(self) -> Sequence[str]:
        """The names of its flags."""
        return flags_of(self.groups)


def split_arguments(argv: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that belong to no flag, and the flags, each with its value as ``--name=value``."""
    plain: list[str] = []
    given: list[str] = []
    rest = list(reversed(argv))
    while rest:
        arg = rest.pop()
        if not arg.startswith("-"):
            plain.append(arg)
        elif rest and _takes(arg, rest[-1], flags):
            given.append(f"{arg}={rest.pop()}")
        else:
            given.append(arg)
    return plain, given


def _takes(arg: str, following: str, flags: Collection[str]) -> bool:
    """Return whether the argument after a flag is the flag's value; a boolean takes only what is a boolean."""
    name = arg.lstrip("-").replace("-", "_")
    if name not in flags or following.startswith("-"):
        return False
    try:
        return FLAGS[name].convert is not boolean or boolean(following) is not None
    except ValueError:
        return False


def check_utf8(what: str, value: str) -> None:
    """Check that a value is UTF-8, which TensorFlow and platforms need.

    Args:
        what: The text before the value in the error: ``--model=``.
        value: The value.

    Raises:
        ConfigError: If it is not.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(f"{what}{show(value)} is not UTF-8: rename it, or set LC_ALL=C.UTF-8.")


def found_from_anywhere(options: OptionsT) -> OptionsT:
    """Return options with absolute paths: a model may change directory, and ``tfps eval`` may run in another one.

    Raises:
        ConfigError: If a path is not UTF-8, which TensorFlow needs, or is relative to a directory that is gone.
    """
    paths = {name: getattr(options, name, None) for name in ("model_dir", "checkpoint_path", "export_dir")}
    if isinstance(options, JobConfig):
        paths |= {name: getattr(options, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        paths["data_dir"] = options.data_dir if os.path.exists(options.data_dir) else None
        paths["model"] = options.model if is_path(options.model) and Path(options.model).is_file() else None
    changes: dict[str, Any] = {name: absolute(path) for name, path in paths.items() if path}
    for name, path in changes.items():
        check_utf8(f"--{name}=", path)
    return dataclasses.replace(options, **changes)


def absolute(path: str) -> str:
    """Return a path that means the same in any working directory.

    Raises:
        ConfigError: If it is relative to a directory that is gone.
    """
    joined = path if os.path.isabs(path) else os.path.join(working_directory(), path)
    # After a link, ".." is the parent of the link's target.
    return os.path.realpath(joined) if os.pardir in joined.split(os.sep) else os.path.normpath(joined)


def working_directory() -> str:
    """Return the working directory.

    Raises:
        ConfigError: If it is gone.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone: give absolute paths, or change the directory.") from None


def new_model_dir(model: str) -> str:
    """Return the name of a new directory, so that a job without ``--model_dir`` starts from scratch."""
    return str(Path("runs") / f"{stem_of(model)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def stem_of(model: str) -> str:
    """Return a model's short name: that of its file without the suffix, or the last part of a dotted module."""
    return Path(model).stem if is_path(model) else model.rpartition(".")[2]


def with_tensorflow(problems: ProblemCollector) -> None:
    """Raise all problems, then import TensorFlow quietly; for commands that use a model without a cluster."""
    problems.of(task.require_tensorflow)
    problems.settle()
    task_log.show()
    tensorflow_import.load_v1()
