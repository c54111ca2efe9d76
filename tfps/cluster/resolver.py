"""Resolve the cluster, and this process's task in it, from flags, TF_CONFIG and Slurm.

The sources are merged, a contradiction is an error, and all problems of all sources are reported together. Pure and
fast: opens no socket, makes no name lookups. Must not import TensorFlow.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfps.cluster import slurm, tf_config
from tfps.cluster.addresses import MAX_TASKS, address_problem, check_hosts, first_few, normalized, parse_hosts
from tfps.errors import ConfigError
from tfps.text import did_you_mean, show

JOBS = ("ps", "worker", "evaluator")

_SLURM = "Slurm's step"
_NOTHING = (
    "No cluster is given: give --ps_hosts, --worker_hosts, --job_name and --task_index; or set TF_CONFIG (as Kubeflow "
    "does, except for a job of one task); or start the tasks with Slurm's srun. `tfps launch` starts a whole cluster "
    "on this machine."
)
_NO_STEP = " This is a Slurm job, but no step of it: start the tasks with srun."
_SPARSE = " (a TFJob with enableDynamicWorker: true hides the workers from a ps: set it to false)"
_NEEDED = {  # by flag: its label, its place in TF_CONFIG, how to give it
    "ps_hosts": ("ps", "cluster.ps", "the parameter servers: --ps_hosts=host:port,host:port"),
    "worker_hosts": ("workers", "cluster.worker", "the workers: --worker_hosts=host:port,host:port"),
    "job_name": ("job", "task.type", "what this task is: --job_name=ps, worker or evaluator"),
    "task_index": ("task index", "task.index", "which task of its job this is, from 0: --task_index=0"),
}


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of a cluster; ``str(task)`` looks like ``worker/0``."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}/{self.index}"

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which initializes and saves the variables."""
        return self.job == "worker" and self.index == 0

    @property
    def device(self) -> str:
        """TensorFlow's device name of the task, like ``/job:worker/task:0``."""
        return f"/job:{self.job}/task:{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Parse ``worker:1`` or ``worker/1``.

        Raises:
            ConfigError: If the text has neither form.
        """
        match = re.fullmatch(rf"({'|'.join(JOBS)})[:/](0|[1-9][0-9]{{0,8}})", text)
        if not match:
            raise ConfigError(f"{show(text)} is not a task: write job:index, like worker:0 (jobs: {', '.join(JOBS)}).")
        return cls(match[1], int(match[2]))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses (``host:port``) of the parameter servers and workers, by task index."""

    ps: tuple[str, ...]
    workers: tuple[str, ...]

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.ps)

    @property
    def num_workers(self) -> int:
        """The number of workers, including the chief."""
        return len(self.workers)

    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, parameter servers first."""
        return tuple(Task(job, index) for job, hosts in self.spec().items() for index in range(len(hosts)))

    def address(self, task: Task) -> str:
        """Return the address of a PS or a worker; an evaluator has none and raises ``KeyError``."""
        return {"ps": self.ps, "worker": self.workers}[task.job][task.index]

    def spec(self) -> dict[str, list[str]]:
        """Return the argument for ``tf.train.ClusterSpec``."""
        return {"ps": list(self.ps), "worker": list(self.workers)}


def hosts_flags(cluster: Cluster) -> tuple[str, str]:
    """Return the two flags that define the cluster."""
    return f"--ps_hosts={','.join(cluster.ps)}", f"--worker_hosts={','.join(cluster.workers)}"


@dataclasses.dataclass(frozen=True)
class _Said:
    """The values from one source; ``None`` marks a field that the source does not set."""

    source: str = ""
    ps_hosts: tuple[str, ...] | None = None
    worker_hosts: tuple[str, ...] | None = None
    job_name: str | None = None
    task_index: int | None = None
    note: str = ""  # how the source itself names this task
    chiefs: int = 0  # the offset of its worker indices


def resolve(
    ps_hosts: str | None,
    worker_hosts: str | None,
    job_name: str | None,
    task_index: int | None,
    num_ps: int | None,
    num_workers: int | None,
    env: Mapping[str, str],
) -> tuple[Cluster, Task]:
    """Return the cluster and this process's task in it.

    Flags and TF_CONFIG complete each other and must not contradict each other. Slurm's variables are set whether they
    are intended or not. They count only without ``--ps_hosts``, ``--worker_hosts`` and TF_CONFIG.

    Args:
        ps_hosts: The flag's value as given; here and below, ``None`` means that the flag is not given.
        worker_hosts: The flag's value as given.
        job_name: The flag's value as given.
        task_index: The flag's value.
        num_ps: The number of parameter servers in a Slurm step (default 1); elsewhere it must match the cluster.
        num_workers: Must match the cluster.
        env: The environment.

    Raises:
        ConfigError: Lists every problem.
    """
    problems: list[str] = []
    flags = _from_flags(ps_hosts, worker_hosts, job_name, task_index, problems)
    bad_told: list[str] = []
    told = _from_environment(flags, num_ps, env, bad_told)
    said = _merge(flags, told, problems)
    problems += [*bad_told, *_missing(said, bad_told, env)]
    places = [_place(flags, said, "ps_hosts"), _place(flags, said, "worker_hosts")]
    jobs = list(zip(("ps", "worker"), places, (said.ps_hosts or (), said.worker_hosts or ()), strict=True))
    problems += [*_wrong_sizes(jobs, (num_ps, num_workers)), *_repeated(jobs), *_out_of_range(flags, said)]
    if problems:
        raise ConfigError(problems)
    return Cluster(jobs[0][2], jobs[1][2]), Task(said.job_name or "", said.task_index or 0)


def _from_flags(
    ps_hosts: str | None, worker_hosts: str | None, job_name: str | None, task_index: int | None, problems: list[str]
) -> _Said:
    ps = None if ps_hosts is None else parse_hosts("ps_hosts", ps_hosts, problems)
    workers = None if worker_hosts is None else parse_hosts("worker_hosts", worker_hosts, problems)
    if job_name is not None and job_name not in JOBS:
        hint = did_you_mean(job_name, JOBS)
        if job_name.lower() in tf_config.CHIEFS:
            hint = " The chief is --job_name=worker --task_index=0."
        problems.append(f"--job_name={show(job_name)} is not one of {', '.join(JOBS)}.{hint}")
    return _Said("", ps, workers, job_name, task_index)


def is_slurms(ps_hosts: object, worker_hosts: object, env: Mapping[str, str]) -> bool:
    """Return whether a Slurm step defines the cluster, because neither flags nor TF_CONFIG do."""
    return ps_hosts is None and worker_hosts is None and not _is_given(env.get("TF_CONFIG", "")) and slurm.in_step(env)


def _is_given(tf_config_text: str) -> bool:
    return "".join(tf_config_text.split()) not in ("", "{}")


def placed(cluster: Cluster, machines: Mapping[str, slurm.Machine], port_base: int) -> Cluster:
    """Return a Slurm step's cluster with the addresses of its machines.

    Args:
        cluster: As returned by ``resolve``: each task's host is the name of its node.
        machines: The machines by node. A missing node is its own machine, and its name is the address.
        port_base: The first port on each machine.
    """
    addresses = slurm.place([*cluster.ps, *cluster.workers], machines, port_base)
    return Cluster(addresses[: cluster.num_ps], addresses[cluster.num_ps :])


def _from_environment(flags: _Said, num_ps: int | None, env: Mapping[str, str], problems: list[str]) -> _Said:
    text = env.get("TF_CONFIG", "")
    if _is_given(text):
        return _Said("TF_CONFIG", **vars(tf_config.read(text, problems)))
    if is_slurms(flags.ps_hosts, flags.worker_hosts, env):
        return _from_slurm(num_ps, flags.job_name, env, problems)
    return _Said()


def _merge(flags: _Said, told: _Said, problems: list[str]) -> _Said:
    """Return the combined values of both sources; a contradiction is a problem."""
    merged: dict[str, Any] = {}
    for name, (label, *_) in _NEEDED.items():
        mine, theirs = getattr(flags, name), getattr(told, name)
        clash = mine not in (None, ()) and theirs is not None and _plain(mine) != _plain(theirs)
        if clash:
            note = told.note if name.endswith(("_name", "_index")) else ""
            says = f"{told.source} says {label} {_shown(theirs)}{note}"
            problems.append(f"--{name}={_shown(mine)}, but {says}: drop the flag or {_fix(told.source)}.")
        merged[name] = theirs if mine is None or (clash and name == "job_name") else mine
    return dataclasses.replace(told, **merged)


def _plain(value: str | int | tuple[str, ...]) -> object:
    return [normalized(address) for address in value] if isinstance(value, tuple) else value


def _shown(value: str | int | tuple[str, ...]) -> str:
    return show(",".join(value) if isinstance(value, tuple) else str(value))


def _fix(place: str) -> str:
    return "change the srun command" if place == _SLURM else f"correct {place}"


def _missing(said: _Said, bad_told: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each value that no source gives, unless its source already has a problem there."""
    if said == _Said():
        yield _NOTHING + _NO_STEP if "SLURM_JOB_ID" in env else _NOTHING
        return
    for name, (_, place, fix) in _NEEDED.items():
        bad = ("SLURM", _SLURM, "TF_CONFIG is", "TF_CONFIG must", f"TF_CONFIG {place.split('.')[0]}")
        if getattr(said, name) is not None or any(problem.startswith(bad) for problem in bad_told):
            continue
        sparse = _SPARSE if place == "cluster.worker" else ""
        yield (
            f"TF_CONFIG has no {place}{sparse}: add it, or give {fix}."
            if said.source
            else f"--{name} is missing: give {fix}."
        )


def _place(flags: _Said, said: _Said, name: str) -> str:
    """Return where the user can correct a list of hosts."""
    if getattr(flags, name) is not None:
        return f"--{name}"
    return said.source if said.source == _SLURM else f"TF_CONFIG {_NEEDED[name][1]}"


_Jobs = Sequence[tuple[str, str, tuple[str, ...]]]  # name, place, hosts


def _wrong_sizes(jobs: _Jobs, sizes: Iterable[int | None]) -> Iterator[str]:
    for (job, place, hosts), size in zip(jobs, sizes, strict=True):
        flag = "--num_ps" if job == "ps" else "--num_workers"
        if hosts and size not in (None, len(hosts)):
            yield f"{flag}={size}, but {place} has {len(hosts)}: drop {flag} or {_fix(place)}."
    total = sum(len(hosts) for *_, hosts in jobs)
    if total > MAX_TASKS:
        yield f"The cluster has {total:,} tasks, ps and workers together: it can have {MAX_TASKS:,}."


def _repeated(jobs: _Jobs) -> Iterator[str]:
    """Yield a problem for each address that two tasks share."""
    first: dict[str, tuple[str, str, int]] = {}
    for _, place, hosts in jobs:
        lines: list[str] = []
        for index, address in enumerate(hosts):
            me = (address, place, index)
            other = me if address_problem(address) else first.setdefault(normalized(address), me)
            mine, its = (f" of task {index}", f"task {other[2]}") if other[1] == place else ("", other[1])
            if other is not me:
                alike = f"{show(address)}{mine} is the same address as {show(other[0])} of {its}"
                lines.append(f"{place}: {alike}; each task needs its own.")
        yield from first_few(lines, place)


def _out_of_range(flags: _Said, said: _Said) -> Iterator[str]:
    hosts = {"ps": said.ps_hosts, "worker": said.worker_hosts}.get(said.job_name or "")
    given = flags.task_index is not None
    shift = said.chiefs if said.job_name == "worker" and not given else 0
    shown = f"{'--task_index' if given else 'TF_CONFIG task.index'}={(said.task_index or 0) - shift}"
    if hosts and said.task_index is not None and not 0 <= said.task_index < len(hosts):
        last = len(hosts) - shift - 1
        tasks = f"{last + 1} tasks (0-{last})" if last else "1 task (0)"
        yield f"{shown} is out of range for job '{said.job_name}', which has {tasks}."
    elif not hosts and (said.task_index or 0) < 0:
        yield f"{shown} is negative: tasks are counted from 0."


def _from_slurm(num_ps: int | None, job_name: str | None, env: Mapping[str, str], problems: list[str]) -> _Said:
    try:
        step = slurm.read(env, MAX_TASKS)
    except ConfigError as error:
        problems += error.problems
        return _Said(_SLURM)
    first = step.components[0] if len(step.components) > 1 else num_ps or 1
    jobs = ("worker", "ps") if _is_reversed(step, job_name) else ("ps", "worker")
    hosts = dict(zip(jobs, (step.addresses[:first], step.addresses[first:]), strict=True))
    ps, workers = hosts["ps"], hosts["worker"]
    if not workers:
        fix = "srun --het-group=0,1" if env.get("SLURM_HET_SIZE") else f"srun --ntasks={first + 2}"
        problems.append(
            f"{_SLURM} has {len(ps)} of at least {first + 1} tasks, {first} ps and a worker: start it with {fix}."
        )
        return _Said(_SLURM)
    check_hosts("SLURM_STEP_NODELIST", step.addresses, problems)
    job, index = (jobs[0], step.rank) if step.rank < first else (jobs[1], step.rank - first)
    return _Said(_SLURM, ps, workers, job, index, f" (SLURM_PROCID={step.rank})")


def _is_reversed(step: slurm.Step, job_name: str | None) -> bool:
    """Return whether the workers are the first of two components, according to each component's ``--job_name``."""
    mine = step.rank >= step.components[0]
    return len(step.components) == 2 and job_name == ("worker", "ps")[mine]
