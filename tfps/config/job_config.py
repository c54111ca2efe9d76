"""The job as one frozen value: each field of ``JobConfig`` is a flag and defines everything about that flag.

Type, bounds, help, group and default are written once, in the field. The absl flags, ``--help``, the checks,
``to_argv()`` and ``job.json`` derive from it. Parsing checks each value but never raises: all problems of a command
line are collected and reported together. Must not import TensorFlow.
"""

import dataclasses
import difflib
import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from tfps.config.converters import (
    INT32_MAX,
    INT64_MAX,
    Converter,
    boolean,
    directory,
    dns_label,
    integer,
    memory,
    number,
    plain_name,
    text,
)

STARTED_AGAIN = "TFPS_STARTED_AGAIN"  # environment variable of a task that replaces a lost one

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Invalid:
    """Placeholder for a flag's value that could not be parsed; ``problem`` gives the reason and the valid values."""

    problem: str


def show(value: str, limit: int = 100) -> str:
    """Quote a user's value for one plain line: escape control characters, cut it to ``limit`` characters."""
    text = value if re.fullmatch(r"[\x21-\x7e]+", value) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(value)} characters)"


def _flag(default: _T, group: str, convert: Converter, help_text: str) -> _T:
    """Declare a field as a flag."""
    field: _T = dataclasses.field(default=default, metadata={"group": group, "convert": convert, "help": help_text})
    return field


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """All options of a job. Immutable; ``None`` means that the flag was not given."""

    to: str | None = _flag(None, "platform", text, "where the job runs")
    name: str | None = _flag(None, "platform", plain_name, "the job's name there (default: the model's, and the time)")
    dry_run: bool = _flag(False, "platform", boolean, "print what would be sent, and only that; send nothing")
    wait: bool = _flag(False, "platform", boolean, "watch the job to its end, and exit as it does")
    image: str | None = _flag(None, "platform", text, "containers: the image, with tfps in it (default tfps:VERSION)")
    volumes: str | None = _flag(
        None,
        "platform",
        text,
        "containers: what they mount, NAME:/path or /host/path:/path,... with :ro to only read (default tfps:/tfps); "
        "--model_dir lies on one of them (default /tfps/NAME)",
    )
    namespace: str | None = _flag(None, "platform", dns_label, "Kubernetes: the namespace (default: kubectl's own)")
    network_policy: bool = _flag(
        True, "platform", boolean, "Kubernetes: let only the job's own pods reach its pods, where policies are heeded"
    )
    queue: str | None = _flag(None, "platform", text, "Volcano: the queue; Slurm: the partition (default: its own)")
    address: str | None = _flag(
        None,
        "platform",
        text,
        "Ray: the dashboard, http://host:8265 (default: RAY_ADDRESS, else this machine's)",
    )
    ssh: bool = _flag(False, "platform", boolean, "hosts: start the tasks over ssh, and end them with this command")
    ps_cpu: float | None = _flag(None, "resources", number(0), "processor cores of each parameter server")
    ps_memory: int | None = _flag(None, "resources", memory, "memory of each parameter server, like 8Gi or 500M")
    worker_cpu: float | None = _flag(None, "resources", number(0), "processor cores of each worker")
    worker_memory: int | None = _flag(None, "resources", memory, "memory of each worker")
    worker_gpu: int | None = _flag(None, "resources", integer(0, 64), "GPUs of each worker")
    ps_hosts: str | None = _flag(None, "cluster", str, "addresses of the parameter servers: host:port,host:port")
    worker_hosts: str | None = _flag(None, "cluster", str, "addresses of the workers; the first is the chief")
    job_name: str | None = _flag(None, "task", str, "what this task is: ps, worker or evaluator")
    task_index: int | None = _flag(
        None, "task", integer(-INT64_MAX - 1, INT64_MAX), "which of that job's tasks this one is, from 0"
    )
    num_ps: int | None = _flag(
        None, "size", integer(1, 4096), "how many parameter servers (default 1); of a Slurm step, its first tasks"
    )
    num_workers: int | None = _flag(
        None, "size", integer(1, 4096), "how many workers (default 2; where the cluster is given, as many as it has)"
    )
    port_base: int | None = _flag(
        None, "size", integer(1, 65535), "Slurm: the first port of a node's tasks (default 8888; submitted: by its id)"
    )
    model: str = _flag("linear", "job", text, "a .py file, a dotted module, or a built-in model")
    data_dir: str = _flag("", "job", text, "where the data is (default: what the model carries with it)")
    model_dir: str | None = _flag(
        None,
        "job",
        directory,
        "where checkpoints, event files, logs and the summary go; the same directory again resumes",
    )
    batch_size: int = _flag(128, "job", integer(1, INT32_MAX), "examples per worker and step")
    seed: int = _flag(1, "job", integer(0, INT32_MAX), "seed of the shuffling and of the initial weights")
    learning_rate: float | None = _flag(
        None, "training", number(0), "the optimizer's step size (default: the model's own)"
    )
    optimizer: str | None = _flag(None, "training", text, "instead of the model's own")
    max_steps: int = _flag(
        1000, "training", integer(1, INT64_MAX), "the global step at which training is done, counted over all runs"
    )
    steps_to_validate: int = _flag(100, "training", integer(1, INT64_MAX), "global steps between progress lines")
    save_checkpoint_secs: float = _flag(60.0, "training", number(0), "seconds between checkpoints")
    on_nan: str = _flag(
        "stop",
        "training",
        text,
        "on a NaN or Inf loss or gradient: stop (exit code 66) or skip the batch; it is never applied",
    )
    force: bool = _flag(
        False,
        "training",
        boolean,
        "take --model_dir over from the job that holds it; that job then stops with an error",
    )
    mode: str = _flag("async", "mode", text, "how gradients become updates")
    issync: bool | None = _flag(None, "mode", boolean, "1 is --mode=sync, 0 is --mode=async")
    ps_strategy: str = _flag("greedy", "placement", text, "how variables are spread over the parameter servers")
    min_slice_mb: float = _flag(
        64.0, "placement", number(0), "split variables over the parameter servers in slices of at least this size"
    )
    wire: str = _flag(
        "packed",
        "performance",
        text,
        "how tensors are sent: packed (small ones together), bfloat16 (packed, half the bytes), plain (one by one)",
    )
    steps_per_run: int | None = _flag(
        None, "performance", integer(1, 64), "steps per session.run (default: measured during the first steps)"
    )
    runs_in_flight: int | None = _flag(
        None,
        "performance",
        integer(1, 8),
        "async: concurrent session.run calls per worker; more means staler gradients (default: measured)",
    )
    start_timeout_secs: float | None = _flag(
        None,
        "timeouts",
        number(0),
        "seconds to wait for the other tasks; then exit 171, naming who is missing "
        "(default 60; of submitted jobs 600, with Compose 120)",
    )
    stall_timeout_secs: float = _flag(
        600.0, "timeouts", number(0), "seconds without a step after which a worker exits with code 172"
    )
    max_restarts: int | None = _flag(
        None,
        "restarts",
        integer(0, 1000),
        "how often each task is started again that is lost or ends with a code from 128 up; a 170 because another task "
        "was lost does not count (default 5; of submitted jobs 10; of run 0: it is the task in its own process)",
    )
    checkpoint_path: str | None = _flag(None, "checkpoint", directory, "which checkpoint (default: the newest)")
    task: str | None = _flag(None, "logs", text, "only this task's, like worker:1")
    follow: bool = _flag(False, "logs", boolean, "go on until the job ends")
    export_dir: str | None = _flag(
        None, "export", directory, "where the SavedModel goes (default: MODEL_DIR/export/STEP)"
    )

    def replace(self, **changes: Any) -> "JobConfig":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def patience_secs(self) -> float:
        """How long a task waits for the others, in seconds."""
        return self.start_timeout_secs or 60.0

    def for_task(self, **changes: Any) -> "JobConfig":
        """Return a copy without the options that only the starter of the tasks needs."""
        groups = ("size", "platform", "resources", "restarts", "logs")
        others = {name: FIELDS[name].default for name in fields_of(groups)}
        return self.replace(**{**others, **changes})

    def to_argv(self) -> list[str]:
        """Return the command line that reproduces this config: ``--name=value`` for each non-default field."""
        given = ((f.name, getattr(self, f.name)) for f in FIELDS.values() if getattr(self, f.name) != f.default)
        return [f"--{name}={int(value) if isinstance(value, bool) else value}" for name, value in given]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain JSON values."""
        return dataclasses.asdict(self)


FIELDS: Mapping[str, "dataclasses.Field[Any]"] = {f.name: f for f in dataclasses.fields(JobConfig)}

_HEADINGS = {  # the heading of any other group is its name
    "cluster": "cluster (for run, what TF_CONFIG or srun tells need not be given)",
    "resources": "resources (default: what the platform gives)",
}
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


def fields_of(groups: Collection[str]) -> list[str]:
    """Return the names of the flags in ``groups``, in the order of ``JobConfig``."""
    return [name for name, field in FIELDS.items() if field.metadata["group"] in groups]


class _Parser(flags.ArgumentParser):  # type: ignore[misc]
    """Parses one flag's value with its field's converter; a bad value becomes an ``_Invalid``, not an exception."""

    def __init__(self, name: str, choices: Collection[str] | None) -> None:
        self._name = name
        self._choices = choices

    def parse(self, argument: Any) -> Any:
        """Return the value, or an ``_Invalid`` with the problem."""
        try:
            value = FIELDS[self._name].metadata["convert"](str(argument))
        except ValueError as error:
            return _Invalid(f"--{self._name}={show(str(argument))} {error}.")
        if self._choices is not None and value not in self._choices:
            hint = did_you_mean(str(value), self._choices)
            return _Invalid(f"--{self._name}={show(str(value))} is not one of {', '.join(self._choices)}.{hint}")
        return value


def did_you_mean(value: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `` Did you mean X?`` for a near miss of one of ``known``, else an empty string."""
    close = difflib.get_close_matches(value.lower()[:80], list(known), n=1, cutoff=0.6)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A parsed command line: the config, in which bad flags are unset, and the problems by flag or argument."""

    config: JobConfig
    problems: Mapping[str, str]


def parse(
    argv: Sequence[str],
    names: Collection[str],
    choices: Mapping[str, Collection[str]] | None = None,
    defaults: JobConfig | None = None,
) -> Parsed:
    """Parse a command line. Raises nothing: the result contains the problems.

    Args:
        argv: The arguments after the program's and the command's name: ``--name=value`` or ``--name value``. A name
            takes ``-`` or ``_``; a boolean may stand alone.
        names: The flags that this command has.
        choices: The allowed values by flag.
        defaults: The values of unset flags; ``JobConfig()`` by default.
    """
    values = flags.FlagValues()
    for name in names:
        flags.DEFINE(_Parser(name, (choices or {}).get(name)), name, None, "", flag_values=values)
    known, problems = _normal(argv, names)
    values(["tfps", *known])
    given = {name: values[name].value for name in names if values[name].present}
    problems |= {name: value.problem for name, value in given.items() if isinstance(value, _Invalid)}
    config = (defaults or JobConfig()).replace(**{n: v for n, v in given.items() if n not in problems})
    if contradiction := _mode_contradiction(config, "mode" in given and "mode" not in problems):
        problems["issync"] = contradiction
    return Parsed(_with_mode(config), problems)


def _mode_contradiction(config: JobConfig, mode_given: bool) -> str:
    meant = _with_mode(config).mode
    if not mode_given or config.mode == meant:
        return ""
    given = f"--issync={int(bool(config.issync))}"
    return f"{given} means --mode={meant}, but --mode={config.mode} is given: drop one of them."


def _with_mode(config: JobConfig) -> JobConfig:
    """Translate ``--issync`` into ``--mode``."""
    if config.issync is None:
        return config
    return config.replace(mode="sync" if config.issync else "async", issync=None)


def _normal(argv: Sequence[str], names: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Return the flags of a command as ``--name=value``, and the problems of the rest by flag or argument."""
    known: list[str] = []
    problems: dict[str, str] = {}
    seen: dict[str, str] = {}
    for arg, name, value in _read(argv):
        if name in seen:
            problems[name] = f"--{name} is given twice, {show(seen[name])} and {show(arg)}: give it once."
        seen |= {name: arg} if name in names else {}
        if name not in names:
            problems[arg] = _unknown(arg, name, names)
        elif value is None and FIELDS[name].metadata["convert"] is not boolean:
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


def _unknown(arg: str, name: str, names: Collection[str]) -> str:
    if not name:
        return f"{show(arg)} is not a flag: write --flag=value."
    if name in FIELDS:
        return f"--{name} is not a flag of this command: leave it out."
    return f"--{show(name)} is not a known flag.{did_you_mean(name, names, '--')} See --help."


def describe(names: Iterable[str], choices: Mapping[str, Collection[str]] | None = None, width: int = 100) -> str:
    """Return the help text of some flags by group, each name beside its description, ``width`` columns wide."""
    lines: list[str] = []
    for group, members in itertools.groupby(names, lambda name: str(FIELDS[name].metadata["group"])):
        lines += ["", f"{_HEADINGS.get(group, group)}:"]
        for name in members:
            told = textwrap.wrap(_help(FIELDS[name], (choices or {}).get(name)), width - 26, break_on_hyphens=False)
            lines += [f"  {head:<23} {line}" for head, line in itertools.zip_longest([f"--{name}"], told, fillvalue="")]
    return "\n".join(lines)


def _help(field: "dataclasses.Field[Any]", choices: Collection[str] | None) -> str:
    told = field.metadata["help"]
    if choices:
        told += f": {', '.join(choices)}"
    default = f"{field.default:g}" if isinstance(field.default, float) else field.default
    default = int(default) if default is True else default
    return told if default in (None, "", False) else f"{told} (default {default})"
