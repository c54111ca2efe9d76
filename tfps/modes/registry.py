"""The modes by name. Does not import TensorFlow."""

import functools
from collections.abc import Iterator, Sequence

from tfps.cluster.resolver import NumPs
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.errors import ConfigError
from tfps.modes.base import Mode
from tfps.plugins import Registry
from tfps.text import enumerated, show

MODES: Registry[Mode] = Registry(
    Mode,
    "mode",
    "mode",
    {
        "async": "tfps.modes.asynchronous:AsyncMode",
        "sync": "tfps.modes.synchronous:SyncMode",
        "ssp": "tfps.modes.ssp:SspMode",
        "local": "tfps.modes.local_sgd:LocalMode",
        "allreduce": "tfps.modes.all_reduce:AllReduceMode",
        "gossip": "tfps.modes.gossip.mode:GossipMode",
    },
    "tfps.modes",
)


_load = functools.cache(MODES.load)


def mode_of(config: JobConfig) -> Mode:
    """Return the mode in which a job trains.

    Raises:
        ConfigError: If the mode is from another package and cannot be loaded.
    """
    return _load(config.mode).of_job(config)


def described(config: JobConfig) -> str:
    """Return a job's mode, with its flags that were given and those defaults that decide.

    Example: ``local --sync_every=20 --server_optimizer=sgd (default)``.

    Raises:
        ConfigError: If the mode is from another package and cannot be loaded.
    """
    mode = mode_of(config)
    given = {name: getattr(config, name) for name in mode.flags}
    defaults = mode.defaults(config)
    known = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    notes = {name: " (default)" for name, value in given.items() if value is None}
    told = (f"--{name}={_text(value)}{notes.get(name, '')}" for name, value in known.items() if value is not None)
    return " ".join([mode.name, *told])


def problems_of(config: JobConfig, num_workers: int | None) -> Sequence[str]:
    """Return the problems of a job's options in its mode, one message each: flag, value, and how to fix it.

    Args:
        config: The job.
        num_workers: The number of its workers; ``None`` if it is not known: then the mode itself checks nothing.

    Raises:
        ConfigError: If the mode is from another package and cannot be loaded.
    """
    mode = mode_of(config)
    of_mode = mode.validate(config, num_workers) if num_workers else ()
    return [
        *_of_other_modes(config, mode),
        *_of_data(config, mode),
        *_of_overlap(config, mode),
        *_of_ps(config, mode),
        *of_mode,
    ]


def sized(config: JobConfig) -> JobConfig:
    """Return a job with ``num_ps=0`` if its mode has no PS, unless another number was given."""
    return config.replace(num_ps=0) if config.num_ps is None and not uses_ps(config) else config


def num_ps_of(config: JobConfig) -> NumPs:
    """Return the number of PS that a given cluster must have: 0 in a mode without PS; ``None`` if any will do."""
    return NumPs((config.num_ps or None) if uses_ps(config) else 0, config.mode, _without_ps)


def uses_ps(config: JobConfig) -> bool:
    """Return whether a job's mode uses PS; true for a mode that cannot be loaded, which ``problems_of`` reports."""
    try:
        return mode_of(config).uses_ps
    except ConfigError:
        return True


def _without_ps() -> Sequence[str]:
    """Return the modes of tfps that have no PS."""
    return [name for name in MODES.builtin if not _load(name).uses_ps]


def _of_ps(config: JobConfig, mode: Mode) -> Iterator[str]:
    """Yield an error for PS in a mode without, and the other way round."""
    if config.num_ps and not mode.uses_ps:
        yield f"--num_ps={config.num_ps}, but --mode={mode.name} has no PS: leave it out, or choose another mode."
    if config.num_ps == 0 and mode.uses_ps and not config.serve:
        modes = enumerated([f"--mode={name}" for name in _without_ps()], "or")
        yield f"--num_ps=0, but --mode={mode.name} needs a PS: give 1 or more, or choose a mode without PS: {modes}."


def _of_other_modes(config: JobConfig, mode: Mode) -> Iterator[str]:
    """Yield an error for each flag that is set and that the mode does not use."""
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if option.group != "mode" or name in ("mode", "issync", *mode.flags) or value == option.default:
            continue
        users = [other for other in MODES.builtin if name in _load(other).flags]
        given, listed = f"--{name}={_text(value)}", f"--mode={enumerated(users, 'or')}"
        fix = f"give {listed}" if len(users) == 1 else "give one of these"
        yield f"{given} is for {listed}, and this job has --mode={mode.name}: {fix}, or leave it out."


def _text(value: object) -> str:
    """Return the value of a flag as a user gives it; a file's content as the name of the file."""
    text = format(value, "g") if isinstance(value, float) else int(value) if isinstance(value, bool) else value
    return show(str(getattr(value, "source", text)))


def _of_data(config: JobConfig, mode: Mode) -> Iterator[str]:
    """Yield an error for a limit of epochs that nobody counts, or that cannot be met, and for shares where none are."""
    policy, given = f"--data_policy={config.data_policy}", f"--epochs={config.epochs}"
    if config.epochs and config.data_policy is None:
        yield f"{given} needs --data_policy=shard or dynamic, which counts what is read: add it, or leave --epochs out."
    if config.epochs and config.data_policy == "shard" and mode.is_blocking:
        why = f"in {mode.name}, training ends for all where the smallest share does"
        yield f"{given} is not for {policy}: {why}. Give --data_policy=dynamic."
    if config.epochs and config.on_nan == "skip":
        yield f"{given} is not for --on_nan=skip: the examples of a skipped batch stay unread. Leave one of them out."
    if config.data_policy and config.on_nan == "skip" and mode.is_blocking:
        why = "its batches would be left out, and no checkpoint could tell which"
        yield f"{policy} is not for --on_nan=skip in {mode.name}: {why}. Leave one of them out."
    if config.data_policy == "dynamic" and config.partition:
        yield f"{policy} is not for --partition={config.partition}: no worker has a share. Leave one of them out."


def _of_overlap(config: JobConfig, mode: Mode) -> Iterator[str]:
    """Yield an error for several runs in flight where the next run needs the parameters that this one updates."""
    if (config.runs_in_flight or 1) > 1 and not mode.can_overlap:
        given = f"--runs_in_flight={config.runs_in_flight} is for --mode=async"
        yield f"{given}: in {mode.name} a step begins when the one before has ended. Leave it out."
