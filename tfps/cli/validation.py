"""Collect all problems with a command line and report them together."""

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TextIO, TypeVar

from tfps.cluster import resolver
from tfps.config import command_line
from tfps.config.command_line import Parsed, Usage
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError, DataError, PlatformError, StoppedError, TfpsError
from tfps.models import loader, static_check
from tfps.modes import registry

_T = TypeVar("_T")


def lines_of(error: TfpsError) -> Sequence[str]:
    """Return an error's problems; those of a ``ConfigError`` or ``PlatformError`` are one plain line each."""
    return error.problems if isinstance(error, (ConfigError, PlatformError)) else [str(error)]


def print_error(error: TfpsError, stream: TextIO) -> int:
    """Print an error, one problem per line, and return its exit code."""
    if isinstance(error, StoppedError):
        print(error, file=stream, flush=True)
        return error.exit_code
    for line in lines_of(error):
        print(f"error: {line}", file=stream, flush=True)
    return error.exit_code


class ProblemCollector:
    """Collects the problems that several checks find, so that all are reported together.

    Args:
        command: The command whose flags are read.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._errors: list[TfpsError] = []
        self._flags: set[str] = set()

    def read(self, flags: Collection[str], argv: Sequence[str], defaults: JobConfig | None = None) -> Parsed:
        """Parse the command's flags, and collect the problems with them."""
        from tfps.cli.registry import COMMANDS  # noqa: PLC0415  which imports the commands, and they this

        usage = Usage(self._command, {name: command.flags for name, command in COMMANDS.items()})
        parsed = command_line.parse(argv, flags, defaults, usage)
        self._flags |= set(parsed.problems)
        self._errors += [ConfigError(problem) for problem in parsed.problems.values()]
        return parsed

    def of(self, check: Callable[..., _T], *args: Any) -> _T | None:
        """Run a check; return its result, or ``None`` if it finds a problem."""
        try:
            return check(*args)
        except (ConfigError, DataError) as error:
            self._errors.append(error)
            return None

    def has_wrong(self, flag: str) -> bool:
        """Return whether the value of a flag was bad."""
        return flag in self._flags

    def add(self, problem: str) -> None:
        """Add a problem."""
        self._errors.append(ConfigError(problem))

    def settle(self) -> None:
        """Raise all problems: a ``DataError`` if all are about data, else a ``ConfigError`` with every line."""
        lines = [line for error in self._errors for line in lines_of(error) if not self._follows(line)]
        if lines and all(isinstance(error, DataError) for error in self._errors):
            raise DataError("\n".join(lines))
        if lines:
            raise ConfigError(lines)

    def _follows(self, line: str) -> bool:
        """Return whether a line only reports that a flag is missing, but the flag's value was bad."""
        return any(line.startswith(f"--{name} is missing") for name in self._flags)


def check_mode(job: JobConfig, num_workers: int | None, problems: ProblemCollector) -> None:
    """Check a job's options in its mode; what depends on the number of workers only if that is known."""
    if problems.has_wrong("mode"):
        return
    known = None if problems.has_wrong("num_workers") else num_workers
    for problem in problems.of(registry.problems_of, job, known) or ():
        problems.add(problem)


def check_job(job: JobConfig, num_workers: int | None, problems: ProblemCollector) -> None:
    """Check a job's mode, model and data, without TensorFlow."""
    check_mode(job, num_workers, problems)
    check_model(job, problems)


def check_model(job: JobConfig, problems: ProblemCollector) -> None:
    """Check a job's model and data, without TensorFlow."""
    problems.of(static_check.check, job.model)
    problems.of(loader.check_data, job.model, job.data_dir, job.num_workers or 1)


def check_ports(job: JobConfig, problems: ProblemCollector) -> None:
    """Check that ``--port_base`` is given only where the platform leaves the ports to tfps."""
    found = resolver.find_resolver(job.ps_hosts, job.worker_hosts, os.environ)
    if job.port_base is not None and not (found and found.port_flag):
        problems.add("--port_base is for a step of Slurm: leave it out. Each address has its own port here.")
