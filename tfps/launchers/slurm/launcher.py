"""Slurm: an sbatch script whose only step is the cluster; the tasks find each other in the step's environment.

Parameter servers and workers with different resources are two components of a heterogeneous job. The workers come
first, because Slurm places the components one after the other. A parameter server that came first could take a place
on the only node with the workers' GPUs, and block the job forever.

Memory is requested per CPU, because ``--mem`` is for a node, which may run several tasks. The tasks write their logs
themselves: ``srun --output`` has no pattern for a role, and gives ``%`` a special meaning.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tfps.errors import ConfigError, WorkerFailedError
from tfps.jobs.spec import Job, Role
from tfps.launchers.base import Launcher
from tfps.launchers.common import client
from tfps.launchers.common.job_files import Files
from tfps.launchers.slurm import job as slurm_job
from tfps.launchers.slurm.job import Node, SlurmJob
from tfps.storage import JobDirectory
from tfps.text import show

_INSTALL = "use a login node of the cluster (Debian: apt-get install slurm-client)"

# Jobs get ports 16 apart, those with near ids 864 (or 400 from the 25th on), for so many tasks a node. All are below
# Linux's range of automatic ports (32768).
_PORT = "$((8888 + SLURM_JOB_ID * 727 % 1400 * 16))"

# Runs in the place of a task until it ends: its own lines go to the step's output, the task's to the task's file.
_TASK = """
trap : TERM  # the task gets it, too, and saves
if ((SLURM_PROCID < $2)); then role=$1 k=$SLURM_PROCID; else role=$3 k=$((SLURM_PROCID - $2)); fi
shift 3
echo "$role/$k started on $SLURMD_NODENAME"
"$@" "--job_name=$role" >>"$logs/slurm-$SLURM_JOB_ID-$role-$k.out" 2>&1
code=$?
echo "$role/$k ended with $code on $SLURMD_NODENAME"
exit "$code"
"""

_SCRIPT = """\
#!/bin/bash
# Written by tfps. To submit it: sbatch --parsable FILE
{options}

trap 'ending=1' TERM     # Slurm ends or requeues the job
trap 'cancelled=1' USR1  # tfps cancel does
roles='{roles}'
logs={logs}
task={task}
each=(
  --kill-on-bad-exit=1 --export=ALL --distribution=block
  bash -c "$task" tfps {ranks}
  {argv}
  "--port_base={port}"
)

mkdir -p -- "$logs" && exec >>"$logs/slurm-$SLURM_JOB_ID.out" 2>&1 || exit 74
cd -- {directory} || exit 2
unset TF_CONFIG
export logs PYTHONUNBUFFERED=1 SLURM_WAIT=0  # a worker that is done does not end the others
echo "run ${{SLURM_RESTART_COUNT:-0}}"

set -o pipefail
ended=$(
  srun {step} |
    {{ tee -a "$logs/slurm-$SLURM_JOB_ID.out" || true; }}  # a full disk ends no job
)
code=$?

# srun's exit code is the highest. The cause is a task that a restart cannot help (< 128), else the first that failed.
# A ps that ends with {told} only repeats that a worker has failed.
cause=0
while read -r name word _ told _; do
  [[ $word == ended ]] && ((told)) && [[ $name:$told != ps/*:{told} ]] || continue
  ((cause)) || cause=$told
  ((told < 128)) && cause=$told && break
done <<<"$ended"
((cause)) && code=$cause

if ((cancelled)); then
  scancel "$SLURM_JOB_ID"
elif ((code && !ending && (cause == 0 || cause == 137 || cause == 143))); then
  # A node is lost, or a task was killed with what starts it again.
  # Ten times; after ten minutes of work it is no failure that only repeats itself, but a time limit, say.
  # The requeue itself ends every process here: scontrol is to outlive that, or it looks as if it had failed.
  if ((${{SLURM_RESTART_COUNT:-0}} < 10 || SECONDS > 600)) &&
    (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID"); then
    echo "requeued after $code"
    exit "$code"
  fi
fi
echo "ended with exit code $code"
exit "$code"
"""


@dataclass(frozen=True)
class Plan:
    """The script of a job."""

    job: Job
    files: Files
    is_printed_only: ClassVar[bool] = False

    def __str__(self) -> str:
        job, files = self.job, self.files
        (first, count), *others = files.roles.items()
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {option}".rstrip() for option in _options(job)),
            roles=" ".join(f"{role} {replicas}" for role, replicas in files.roles.items()),
            logs=shlex.quote(files.logs),
            task=shlex.quote(_TASK),
            ranks=f"{first} {count} {others[0][0] if others else first}",
            argv=shlex.join(job.command(num_ps=job.ps.replicas)),
            port=_PORT if job.config.port_base is None else job.config.port_base,
            directory=shlex.quote(job.directory),
            step=" : \\\n    ".join(_step(job)),
            told=WorkerFailedError.exit_code,
        ).rstrip("\n")


class SlurmLauncher(Launcher[Plan]):
    """Slurm, through sbatch."""

    name = "slurm"
    features = frozenset({"ports", "queues", "resources"})

    def plan(self, job: Job) -> Plan:
        """Return the script of a job.

        Raises:
            ConfigError: If ``--queue`` is no partition's name.
        """
        queue = job.options.queue
        if queue is not None and not re.fullmatch(r"[\w.+@,-]+", queue):
            raise ConfigError(f"--queue={show(queue)} is not the name of a partition: sinfo lists them.")
        model_dir = job.config.model_dir or str(Path(job.directory, "runs", job.name))
        logs = str(JobDirectory(model_dir).logs)
        return Plan(job, Files(logs, {role.name: role.replicas for role in _in_order(job)}, self.name))

    def submit(self, plan: Plan) -> SlurmJob:
        """Submit a job.

        Raises:
            ConfigError: If Slurm has no nodes that can run the job, even when free.
            PlatformError: If Slurm is not installed or not up, or refuses the job.
        """
        client.require_tool("sbatch", _INSTALL)
        slurm_job.check_up()
        _check_room(plan.job)
        queue = plan.job.options.queue
        wins = [f"--partition={queue}"] if queue else []  # over SBATCH_PARTITION, which the script's option does not
        answer = client.run_client(["sbatch", "--parsable", *wins], str(plan))
        return SlurmJob(answer.strip().partition(";")[0], plan.files)

    def find(self, job_id: str) -> SlurmJob:
        """Return the job of a handle.

        Raises:
            ConfigError: If ``job_id`` is not a job id of Slurm's.
            PlatformError: If Slurm is not installed.
        """
        if not re.fullmatch("[1-9][0-9]{0,9}", job_id):
            raise ConfigError(f"slurm:{show(job_id)} is not a job handle: write slurm:JOBID, like slurm:4711.")
        client.require_tool("scontrol", _INSTALL)
        return SlurmJob(job_id)


def _differ(job: Job) -> bool:
    return len({tuple(_resources(role)) for role in job.roles}) > 1


def _in_order(job: Job) -> Sequence[Role]:
    """Return the roles in the order of their tasks' ranks."""
    return (job.worker, job.ps) if _differ(job) else job.roles


def _resources(role: Role) -> Sequence[str]:
    """Return the options of sbatch and srun for each task of a role."""
    cpus, gpus = _cpus(role), role.gpu
    options = [f"--cpus-per-task={cpus}"]
    options += [f"--mem-per-cpu={math.ceil(role.memory_bytes / 2**20 / cpus)}"] if role.memory_bytes else []
    return [*options, f"--gpus-per-task={gpus}"] if gpus else options


def _cpus(role: Role) -> int:
    return math.ceil(role.cpu or 1)


def _components(job: Job) -> Sequence[Sequence[str]]:
    """Return the options of each component of the job; there is one if the roles have the same resources."""
    if _differ(job):
        return [(f"--ntasks={role.replicas}", *_resources(role)) for role in _in_order(job)]
    return [(f"--ntasks={len(job.tasks())}", *_resources(job.roles[-1]))]


def _options(job: Job) -> Iterator[str]:
    """Yield the options of sbatch. SBATCH_... variables and flags on sbatch's command line override any of them."""
    yield from (f"--job-name={job.name}", "--output=/dev/null", "--requeue")
    for number, component in enumerate(_components(job)):
        yield from ("hetjob",) if number else ()
        yield "--signal=TERM@90"  # the tasks save, and the job is requeued
        yield from (f"--partition={job.options.queue}",) if job.options.queue else ()
        yield from component


def _step(job: Job) -> Iterator[str]:
    """Yield the arguments of srun for each component."""
    components = _components(job)
    for number, component in enumerate(components):
        group = (f"--het-group={number}",) if len(components) > 1 else ()
        yield " ".join((*group, *component, '"${each[@]}"'))


def _check_room(job: Job) -> None:
    """Check that the nodes are large enough: otherwise Slurm lets a job of several tasks wait without end."""
    if any(os.environ.get(name) for name in ("SBATCH_OVERCOMMIT", "SBATCH_CLUSTERS")):
        return
    queue = job.options.queue or os.environ.get("SBATCH_PARTITION")
    partitions = slurm_job.partitions(queue)
    if len(partitions) > 1 and _differ(job):  # each component runs in one of them
        partitions = {queue or "": [node for nodes in partitions.values() for node in nodes]}
    found = [
        _problems(job, f"partition {name}" if queue else "the default partition", nodes)
        for name, nodes in partitions.items()
    ]
    if found and all(found):
        raise ConfigError([problem for problems in found for problem in problems])


def _problems(job: Job, where: str, nodes: Sequence[Node]) -> Sequence[str]:
    """Return why the job could never run in a partition with these nodes."""
    rooms = {role: [node.room(_cpus(role), _megabytes(role), role.gpu or 0) for node in nodes] for role in job.roles}
    too_few = [
        f"{role.name}: {where} has room for {sum(room)} of {role.replicas} tasks of {_asked(role)}: see sinfo."
        for role, room in rooms.items()
        if sum(room) < role.replicas
    ]
    if too_few or job.worker not in rooms:
        return too_few
    if _differ(job):
        most = _most_workers(rooms[job.worker], rooms[job.ps], job.ps.replicas)
        apart = "Slurm runs them on different nodes, because they need different resources"
    else:
        most = sum(rooms[job.worker]) - job.ps.replicas
        apart = f"all need {_asked(job.worker)}"
    if most >= job.worker.replicas:
        return []
    return [
        f"worker: {where} has room for {max(most, 0)} of {job.worker.replicas} tasks beside the parameter servers "
        f"({apart}): see sinfo."
    ]


def _most_workers(of_workers: Sequence[int], of_ps: Sequence[int], num_ps: int) -> int:
    """Return how many workers fit on nodes with this room while all parameter servers are on other nodes."""
    best = [0] + [-math.inf] * num_ps  # by number of parameter servers that have a place
    for workers, ps in zip(of_workers, of_ps, strict=True):
        taken = list(best)
        best = [most + workers for most in best]
        for placed, most in enumerate(taken):
            now = min(placed + ps, num_ps)
            best[now] = max(best[now], most)
    return int(max(best[num_ps], 0))


def _megabytes(role: Role) -> int:
    return math.ceil((role.memory_bytes or 0) / 2**20)


def _asked(role: Role) -> str:
    return f"{_cpus(role)} CPUs, {_megabytes(role)} MB of memory and {role.gpu or 0} GPUs"
