"""Resolve the cluster, and this process's task in it, from flags and the environment.

What the flags and the platform's resolver give is merged, a contradiction is an error, and all problems of both are
reported together. Pure and fast: opens no socket, makes no name lookups. Must not import TensorFlow.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfps.cluster import tf_config
from tfps.cluster.addresses import MAX_TASKS, address_problem, first_few, normalized, parse_hosts
from tfps.cluster.cluster_resolver import ClusterResolver, PartialSpec
from tfps.cluster.slurm.resolver import SlurmResolver
from tfps.cluster.spec import JOBS, Cluster, Task
from tfps.cluster.tf_config import TfConfigResolver
from tfps.errors import ConfigError
from tfps.text import did_you_mean, enumerated, show

RESOLVERS: Sequence[ClusterResolver] = (  # the first that is present is used
    TfConfigResolver(),
    SlurmResolver(),
)

_NEEDED = {  # by flag: its label, how to give it
    "ps_hosts": ("ps", "the parameter servers: --ps_hosts=host:port,host:port"),
    "worker_hosts": ("workers", "the workers: --worker_hosts=host:port,host:port"),
    "job_name": ("job", "this task's role: --job_name=ps, worker or evaluator"),
    "task_index": ("task index", "this task's index in its role, from 0: --task_index=0"),
}


@dataclasses.dataclass(frozen=True)
class NumPs:
    """How many PS a job has, and what messages say about that.

    Attributes:
        count: ``None`` if any number will do, which is 1 in a Slurm step; elsewhere it must match the cluster. With 0,
            the job has none, and their addresses are not needed.
        mode: The mode, if it is the reason for 0.
        modes_without: Returns the modes that need no PS.
        has_workers: Whether workers are tasks of the cluster, and not clients of a service.
    """

    count: int | None = None
    mode: str = ""
    modes_without: Callable[[], Sequence[str]] = tuple
    has_workers: bool = True

    @property
    def why_none(self) -> str:
        """Why the job has no PS."""
        return f"--mode={self.mode} has no PS" if self.mode else "the job has no PS (--num_ps=0, or its mode)"

    @property
    def way_out(self) -> str:
        """The modes in which no PS need be given, as the end of a sentence."""
        modes = [f"--mode={mode}" for mode in self.modes_without()] if self.has_workers else []
        return f"; {enumerated(modes, 'or')} needs none" if modes else ""


def find_resolver(
    ps_hosts: object | None, worker_hosts: object | None, env: Mapping[str, str]
) -> ClusterResolver | None:
    """Return the resolver whose platform gives the cluster, or a part of it; ``None`` if only flags do.

    Args:
        ps_hosts: The flag's value; ``None`` means that the flag is not given.
        worker_hosts: The flag's value.
        env: The environment.
    """
    has_hosts = ps_hosts is not None or worker_hosts is not None
    for resolver in RESOLVERS:
        if resolver.is_present(env) and not (has_hosts and resolver.yields_to_flags):
            return resolver
    return None


def resolve(
    ps_hosts: str | None,
    worker_hosts: str | None,
    job_name: str | None,
    task_index: int | None,
    num_ps: NumPs,
    num_workers: int | None,
    env: Mapping[str, str],
) -> tuple[Cluster, Task]:
    """Return the cluster and this process's task in it.

    Args:
        ps_hosts: The flag's value as given; here and below, ``None`` means that the flag is not given.
        worker_hosts: The flag's value as given.
        job_name: The flag's value as given.
        task_index: The flag's value.
        num_ps: The number of parameter servers.
        num_workers: Must match the cluster.
        env: The environment.

    Raises:
        ConfigError: Lists every problem.
    """
    problems: list[str] = []
    no_ps = num_ps.count == 0
    ps_hosts = None if no_ps and not (ps_hosts or "").strip() else ps_hosts
    flags = _from_flags(ps_hosts, worker_hosts, job_name, task_index, problems)
    flags = flags if num_ps.has_workers else dataclasses.replace(flags, worker_hosts=())
    resolver = find_resolver(ps_hosts, worker_hosts, env)
    of_resolver: list[str] = []
    found = resolver.resolve(env, flags, num_ps.count, of_resolver) if resolver else PartialSpec()
    merged = _merge(flags, found, resolver, problems)
    problems += [*of_resolver, *_missing(merged, resolver, env, num_ps)]
    ps, workers = (_host_list(name, flags, merged, resolver) for name in ("ps_hosts", "worker_hosts"))
    problems += [*_wrong_sizes((ps, workers), num_ps, num_workers), *_repeated((ps, workers))]
    problems += [*_out_of_range(flags, merged, resolver), *_of_no_ps(merged, num_ps)]
    if problems:
        raise ConfigError(problems)
    return Cluster(ps.hosts, workers.hosts), Task(merged.job_name or "", merged.task_index or 0)


def _from_flags(
    ps_hosts: str | None, worker_hosts: str | None, job_name: str | None, task_index: int | None, problems: list[str]
) -> PartialSpec:
    ps = None if ps_hosts is None else parse_hosts("ps_hosts", ps_hosts, problems)
    workers = None if worker_hosts is None else parse_hosts("worker_hosts", worker_hosts, problems)
    if job_name is not None and job_name not in JOBS:
        hint = did_you_mean(job_name, JOBS)
        if job_name.lower() in tf_config.CHIEFS:
            hint = " The chief is --job_name=worker --task_index=0."
        problems.append(f"--job_name={show(job_name)} is not one of {', '.join(JOBS)}.{hint}")
    return PartialSpec(ps, workers, job_name, task_index)


def _merge(
    flags: PartialSpec, found: PartialSpec, resolver: ClusterResolver | None, problems: list[str]
) -> PartialSpec:
    """Return the combined values of flags and resolver; a contradiction is a problem."""
    merged: dict[str, Any] = {}
    for name, (label, _) in _NEEDED.items():
        mine, theirs = getattr(flags, name), getattr(found, name)
        clash = mine not in (None, ()) and theirs is not None and _plain(mine) != _plain(theirs)
        if clash and resolver:
            note = found.note if name.endswith(("_name", "_index")) else ""
            says = f"{resolver.source} says {label} {_shown(theirs)}{note}"
            problems.append(f"--{name}={_shown(mine)}, but {says}: drop the flag or {resolver.fix(resolver.source)}.")
        merged[name] = theirs if mine is None or (clash and name == "job_name") else mine
    return dataclasses.replace(found, **merged)


def _plain(value: str | int | tuple[str, ...]) -> object:
    return [normalized(address) for address in value] if isinstance(value, tuple) else value


def _shown(value: str | int | tuple[str, ...]) -> str:
    return show(",".join(value) if isinstance(value, tuple) else str(value))


def _missing(
    merged: PartialSpec, resolver: ClusterResolver | None, env: Mapping[str, str], num_ps: NumPs
) -> Iterator[str]:
    """Yield a problem for each value that no source gives, unless its source already has a problem there."""
    if resolver is None and merged == PartialSpec():
        yield _no_cluster(env, num_ps.count == 0)
        return
    for name, (_, fix) in _NEEDED.items():
        is_ps = name == "ps_hosts"
        if getattr(merged, name) is not None or name in merged.faulty or (is_ps and num_ps.count == 0):
            continue
        rest = f"{fix}{num_ps.way_out if is_ps else ''}."
        yield f"{resolver.missing(name)}: add it, or give {rest}" if resolver else f"--{name} is missing: give {rest}"


def _no_cluster(env: Mapping[str, str], no_ps: bool) -> str:
    hosts = "--worker_hosts" if no_ps else "--ps_hosts and --worker_hosts"
    flags = f"give {hosts}, and for a task its --job_name and --task_index"
    ways = "; or ".join([flags, *(resolver.hint for resolver in RESOLVERS)])
    notes = "".join(resolver.note_on_absence(env) for resolver in RESOLVERS)
    return f"No cluster is given: {ways}. `tfps launch` starts a whole cluster on this machine.{notes}"


@dataclasses.dataclass(frozen=True)
class _HostList:
    """The addresses of a job's tasks: the flag of their number, where a user finds them, and how to correct them."""

    size_flag: str
    place: str
    fix: str
    hosts: tuple[str, ...]


def _host_list(name: str, flags: PartialSpec, merged: PartialSpec, resolver: ClusterResolver | None) -> _HostList:
    place = f"--{name}" if resolver is None or getattr(flags, name) is not None else resolver.place(name)
    fix = resolver.fix(place) if resolver else f"correct {place}"
    return _HostList("--num_ps" if name == "ps_hosts" else "--num_workers", place, fix, getattr(merged, name) or ())


def _wrong_sizes(jobs: Sequence[_HostList], num_ps: NumPs, num_workers: int | None) -> Iterator[str]:
    for job, size in zip(jobs, (num_ps.count, num_workers), strict=True):
        if job.hosts and size == 0:
            has = f"{job.place} has {len(job.hosts)} ps"
            yield f"{has}, but {num_ps.why_none}: {job.fix}, or choose a mode with PS."
        elif job.hosts and size not in (None, len(job.hosts)):
            has = f"{job.place} has {len(job.hosts)}"
            yield f"{job.size_flag}={size}, but {has}: drop {job.size_flag} or {job.fix}."
    total = sum(len(job.hosts) for job in jobs)
    if total > MAX_TASKS:
        yield f"The cluster has {total:,} tasks, ps and workers together: it can have at most {MAX_TASKS:,}."


def _repeated(jobs: Sequence[_HostList]) -> Iterator[str]:
    """Yield a problem for each address that two tasks share."""
    first: dict[str, tuple[str, str, int]] = {}
    for job in jobs:
        lines: list[str] = []
        for index, address in enumerate(job.hosts):
            me = (address, job.place, index)
            other = me if address_problem(address) else first.setdefault(normalized(address), me)
            mine, its = (f" of task {index}", f"task {other[2]}") if other[1] == job.place else ("", other[1])
            if other is not me:
                alike = f"{show(address)}{mine} is the same address as {show(other[0])} of {its}"
                lines.append(f"{job.place}: {alike}; each task needs its own.")
        yield from first_few(lines, job.place)


def _of_no_ps(merged: PartialSpec, num_ps: NumPs) -> Iterator[str]:
    if num_ps.count == 0 and merged.job_name == "ps":
        yield f"This task is a ps, but {num_ps.why_none}: do not start one."


def _out_of_range(flags: PartialSpec, merged: PartialSpec, resolver: ClusterResolver | None) -> Iterator[str]:
    hosts = {"ps": merged.ps_hosts, "worker": merged.worker_hosts}.get(merged.job_name or "")
    place, shift = "--task_index", 0
    if resolver and flags.task_index is None:
        place = resolver.place("task_index")
        shift = merged.num_chiefs if merged.job_name == "worker" else 0
    shown = f"{place}={(merged.task_index or 0) - shift}"
    if hosts and merged.task_index is not None and not 0 <= merged.task_index < len(hosts):
        last = len(hosts) - shift - 1
        tasks = f"{last + 1} tasks (0-{last})" if last else "1 task (0)"
        yield f"{shown} is out of range for job '{merged.job_name}', which has {tasks}."
    elif not hosts and (merged.task_index or 0) < 0:
        yield f"{shown} is negative: tasks are counted from 0."
