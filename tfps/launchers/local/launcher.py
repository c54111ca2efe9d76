"""A whole cluster on this machine, as ``tfps launch`` starts it.

It is not a value of ``--to``: ``tfps launch`` holds the tasks' ports, and lasts as long as the job.
"""

from collections.abc import Sequence

from tfps.cluster.spec import Cluster
from tfps.errors import ConfigError
from tfps.jobs.handle import SubmittedJob
from tfps.jobs.spec import Job
from tfps.launchers.base import Launcher
from tfps.launchers.local.job import LocalJob
from tfps.launchers.local.plan import Plan


class LocalLauncher(Launcher[Plan]):
    """This machine.

    Args:
        ports: The ports of the tasks, those of the PS first.
    """

    name = "local"

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports

    def plan(self, job: Job) -> Plan:
        """Return the arguments of each task."""
        addresses = [f"127.0.0.1:{port}" for port in self._ports]
        num_ps = job.ps.replicas
        cluster = Cluster(tuple(addresses[:num_ps]), tuple(addresses[num_ps:]))
        hosts = {"ps_hosts": ",".join(cluster.ps) or None, "worker_hosts": ",".join(cluster.workers) or None}
        given = job.config.for_task(**hosts)
        commands = {t: given.replace(job_name=t.job, task_index=t.index).to_argv() for t in cluster.tasks()}
        return Plan(job.config, commands)

    def submit(self, plan: Plan) -> LocalJob:
        """Return the job of a plan; its tasks start with the first request for its events."""
        return LocalJob(plan)

    def find(self, job_id: str) -> SubmittedJob:
        """Refuse: only the command that started a job of this machine can watch it and end it.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"local:{job_id} is not a job handle: a job on this machine ends with the command that started it."
        )
