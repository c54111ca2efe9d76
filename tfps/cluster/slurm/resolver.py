"""Resolve the cluster from a Slurm step: its first tasks are the parameter servers. Must not import TensorFlow."""

from collections.abc import Mapping

from tfps.cluster.addresses import MAX_TASKS, check_hosts
from tfps.cluster.cluster_resolver import FIELDS, ClusterResolver, PartialSpec
from tfps.cluster.slurm import nodes, step
from tfps.cluster.slurm.step import Step
from tfps.cluster.spec import Cluster
from tfps.errors import ConfigError

_FAULTY = PartialSpec(faulty=frozenset(FIELDS))


class SlurmResolver(ClusterResolver):
    """Reads the variables of a Slurm step, which are set whether they are intended or not: so flags have precedence."""

    source = "Slurm's step"
    variable = step.VARIABLE
    hint = "start the tasks with Slurm's srun"
    yields_to_flags = True
    port_flag = "--port_base"

    def is_present(self, env: Mapping[str, str]) -> bool:
        """Return whether ``srun`` started this process."""
        return step.in_step(env)

    def resolve(
        self, env: Mapping[str, str], flags: PartialSpec, num_ps: int | None, problems: list[str]
    ) -> PartialSpec:
        """Return the step's tasks; each task's host is the name of its node."""
        try:
            found = step.read(env, MAX_TASKS)
        except ConfigError as error:
            problems += error.problems
            return _FAULTY
        if flags.worker_hosts == ():
            return _of_ps_alone(found, problems)
        first = found.components[0] if len(found.components) > 1 else num_ps or 1
        first = 0 if num_ps == 0 else first
        jobs = ("worker", "ps") if first and _is_reversed(found, flags.job_name) else ("ps", "worker")
        hosts = dict(zip(jobs, (found.addresses[:first], found.addresses[first:]), strict=True))
        ps, workers = hosts["ps"], hosts["worker"]
        if not workers:
            fix = "srun --het-group=0,1" if env.get("SLURM_HET_SIZE") else f"srun --ntasks={first + 2}"
            problems.append(
                f"{self.source} has {len(ps)} tasks, but needs at least {first + 1}, {first} ps and a worker: "
                f"start it with {fix}."
            )
            return _FAULTY
        check_hosts("SLURM_STEP_NODELIST", found.addresses, problems)
        job, index = (jobs[0], found.rank) if found.rank < first else (jobs[1], found.rank - first)
        return PartialSpec(ps, workers, job, index, f" (SLURM_PROCID={found.rank})")

    def fix(self, place: str) -> str:
        """Return how to correct the step."""
        return "change the srun command" if place == self.source else super().fix(place)

    def note_on_absence(self, env: Mapping[str, str]) -> str:
        """Return a note for a process of a Slurm job that is in no step."""
        return " This Slurm job's process is in no step: start the tasks with srun." if "SLURM_JOB_ID" in env else ""

    def locate(self, cluster: Cluster, port_base: int | None, env: Mapping[str, str]) -> Cluster:
        """Return the cluster with the addresses of its nodes' machines, and ports from ``port_base`` on each."""
        names = [cluster.address(task).rpartition(":")[0] for task in cluster.tasks()]
        addresses = nodes.place(
            [*cluster.ps, *cluster.workers], nodes.lookup_nodes(names, env), port_base or step.PORT_BASE
        )
        return Cluster(addresses[: cluster.num_ps], addresses[cluster.num_ps :])


def _of_ps_alone(found: Step, problems: list[str]) -> PartialSpec:
    """Return the tasks of a step that are all parameter servers."""
    check_hosts("SLURM_STEP_NODELIST", found.addresses, problems)
    return PartialSpec(found.addresses, (), "ps", found.rank, f" (SLURM_PROCID={found.rank})")


def _is_reversed(found: Step, job_name: str | None) -> bool:
    """Return whether the workers are the first of two components, according to each component's ``--job_name``."""
    mine = found.rank >= found.components[0]
    return len(found.components) == 2 and job_name == ("worker", "ps")[mine]
