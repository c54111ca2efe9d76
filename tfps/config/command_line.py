"""The command line: arguments become typed options and the problems with them, and flags become a help text.

Parsing checks each value but never raises: all problems of a command line are collected and reported together. Must
not import TensorFlow.
"""

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from tfps.config.command_options import LogsOptions, ResultOptions, SubmitOptions
from tfps.config.converters import INT64_MAX, boolean
from tfps.config.job_config import JobConfig
from tfps.config.options import Option, options_of
from tfps.text import did_you_mean, enumerated, show

OptionsT = TypeVar("OptionsT", SubmitOptions, JobConfig, ResultOptions, LogsOptions)

FLAGS: Mapping[str, Option] = {
    name: option
    for kind in (SubmitOptions, JobConfig, ResultOptions, LogsOptions)
    for name, option in options_of(kind).items()
}

_HEADINGS = {  # the heading of any other group is its name
    "cluster": "cluster (for run; not needed if TF_CONFIG or srun provides it)",
    "resources": "resources (default: the platform's own)",
}
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class _Invalid:
    """Placeholder for a flag's value that could not be parsed; ``problem`` gives the reason and the valid values."""

    problem: str


class _Parser(flags.ArgumentParser):  # type: ignore[misc]
    """Parses one flag's value with its field's converter; a bad value becomes an ``_Invalid``, not an exception."""

    def __init__(self, name: str) -> None:
        self._name = name

    def parse(self, argument: Any) -> Any:
        """Return the value, or an ``_Invalid`` with the problem."""
        try:
            value = FLAGS[self._name].convert(str(argument))
        except ValueError as error:
            return _Invalid(f"--{self._name}={show(str(argument))} {error}.")
        allowed = FLAGS[self._name].allowed_values()
        if allowed is not None and value not in allowed:
            hint = did_you_mean(str(value), allowed)
            return _Invalid(f"--{self._name}={show(str(value))} is not one of {', '.join(allowed)}.{hint}")
        return value


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A parsed command line.

    Attributes:
        given: The values of the flags that were given and are valid.
        problems: The problems by flag or argument.
        defaults: The job's values of unset flags.
    """

    given: Mapping[str, Any]
    problems: Mapping[str, str]
    defaults: JobConfig = dataclasses.field(default_factory=JobConfig)

    @property
    def config(self) -> JobConfig:
        """The job."""
        config = _with_mode(_changed(self.defaults, self.given))
        is_limited = "max_steps" in self.given or config.max_steps != JobConfig.max_steps
        has_default = config.epochs is None and not config.serve
        return config if has_default or is_limited else config.replace(max_steps=INT64_MAX)

    def options(self, kind: type[OptionsT]) -> OptionsT:
        """Return the options of a command; those that were not given have their defaults."""
        return _changed(kind(), self.given)


def _changed(options: OptionsT, given: Mapping[str, Any]) -> OptionsT:
    names = options_of(type(options))
    return dataclasses.replace(options, **{name: value for name, value in given.items() if name in names})


def flags_of(groups: Collection[str]) -> list[str]:
    """Return the names of the flags in ``groups``, in the order of the declarations."""
    return [name for name, option in FLAGS.items() if option.group in groups]


@dataclasses.dataclass(frozen=True)
class Usage:
    """What messages say of the command whose flags are parsed.

    Attributes:
        command: Its name.
        commands: The flags of each command, by its name.
    """

    command: str = "COMMAND"
    commands: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)

    def of_other_commands(self, flag: str) -> str:
        """Return the problem of a flag that only other commands have."""
        owners = [name for name, names in self.commands.items() if flag in names]
        whose = f" It is one of tfps {enumerated(owners, 'and')}." if owners else ""
        return f"--{flag} is not a flag of tfps {self.command}: leave it out.{whose}"


def parse(
    argv: Sequence[str], names: Collection[str], defaults: JobConfig | None = None, usage: Usage | None = None
) -> Parsed:
    """Parse a command line. Raises nothing: the result contains the problems.

    Args:
        argv: The arguments after the program's and the command's name: ``--name=value`` or ``--name value``. A name
            takes ``-`` or ``_``; a boolean may stand alone.
        names: The flags that this command has.
        defaults: The values of unset flags; ``JobConfig()`` by default.
        usage: The command, for messages.
    """
    values = flags.FlagValues()
    for name in names:
        flags.DEFINE(_Parser(name), name, None, "", flag_values=values)
    known, problems = _normal(argv, names, usage or Usage())
    values(["tfps", *known])
    given = {name: values[name].value for name in names if values[name].present}
    problems |= {name: value.problem for name, value in given.items() if isinstance(value, _Invalid)}
    valid = {name: value for name, value in given.items() if name not in problems}
    if contradiction := _mode_contradiction(valid):
        problems["issync"] = contradiction
    return Parsed(valid, problems, defaults or JobConfig())


def _mode_contradiction(given: Mapping[str, Any]) -> str:
    mode, is_sync = given.get("mode"), given.get("issync")
    meant = "sync" if is_sync else "async"
    if mode is None or is_sync is None or mode == meant:
        return ""
    return f"--issync={int(is_sync)} means --mode={meant}, but --mode={mode} is given: drop one of them."


def _with_mode(config: JobConfig) -> JobConfig:
    """Translate ``--issync`` into ``--mode``."""
    if config.issync is None:
        return config
    return config.replace(mode="sync" if config.issync else "async", issync=None)


def _normal(argv: Sequence[str], names: Collection[str], usage: Usage) -> tuple[list[str], dict[str, str]]:
    """Return the flags of a command as ``--name=value``, and the problems of the rest by flag or argument."""
    known: list[str] = []
    problems: dict[str, str] = {}
    seen: dict[str, str] = {}
    for arg, name, value in _read(argv):
        if name in seen:
            problems[name] = f"--{name} is given twice, {show(seen[name])} and {show(arg)}: give it once."
        seen |= {name: arg} if name in names else {}
        if name not in names:
            problems[arg] = _unknown(arg, name, names, usage)
        elif value is None and FLAGS[name].convert is not boolean:
            problems[name] = f"--{name} has no value: write --{name}=VALUE."
        else:
            known.append(f"--{name}={'1' if value is None else value}")
    return known, problems


def _read(argv: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each argument with the name of its flag, if any, and its value, which may be the next argument."""
    rest = list(reversed(argv))
    while rest:
        arg = rest.pop()
        match = _FLAG.fullmatch(arg)
        value = match[2] if match else None
        if match and value is None and rest and not _FLAG.fullmatch(rest[-1]):
            value = rest.pop()
        yield arg, match[1].replace("-", "_") if match else "", value


def _unknown(arg: str, name: str, names: Collection[str], usage: Usage) -> str:
    if not name:
        return f"{show(arg)} is not a flag: write --flag=value."
    if name in FLAGS:
        return usage.of_other_commands(name)
    hint = did_you_mean(name, names, "--")
    return f"--{show(name)} is not a known flag.{hint} See tfps {usage.command} --help."


def describe(
    names: Iterable[str],
    known: Mapping[str, Collection[str]] | None = None,
    width: int = 100,
    has_defaults: bool = True,
) -> str:
    """Return the help text of some flags by group, each name beside its description.

    Args:
        names: The flags, in the order of their declarations.
        known: By flag, values to list for a flag that takes other values, too.
        width: The number of columns.
        has_defaults: Whether to show the flags' defaults.
    """
    lines: list[str] = []
    for group, members in itertools.groupby(names, lambda name: FLAGS[name].group):
        lines += ["", f"{_HEADINGS.get(group, group)}:"]
        for name in members:
            rest = textwrap.wrap(_help(name, (known or {}).get(name), has_defaults), width - 26, break_on_hyphens=False)
            lines += [f"  {head:<23} {line}" for head, line in itertools.zip_longest([f"--{name}"], rest, fillvalue="")]
    return "\n".join(lines)


def _help(name: str, known: Collection[str] | None, has_defaults: bool) -> str:
    text, default = FLAGS[name].help, FLAGS[name].default if has_defaults else None
    listed = known or FLAGS[name].allowed_values() or ()
    if not all(re.search(rf"\b{re.escape(value)}\b", text) for value in listed):
        text += f": {', '.join(listed)}"
    default = f"{default:g}" if isinstance(default, float) else default
    default = int(default) if default is True else default
    return text if default in (None, "", False) else f"{text} (default {default})"
