"""Kubernetes without any operator: an Indexed Job for each role, and a headless Service for the pods' host names."""

from collections.abc import Mapping, Sequence

from tfps.errors import WorkerFailedError
from tfps.jobs.spec import PORT, Job, Role
from tfps.launchers.kubernetes import manifests, status, task_inputs
from tfps.launchers.kubernetes.launcher import KubernetesLauncher, hosts_by_flag
from tfps.launchers.kubernetes.manifests import Object

_WHY = f"""
The parameter servers end by themselves, though plain Jobs know nothing of each other: with 0 when every worker has said
that it is done; with a worker's exit code when it has failed for good ({WorkerFailedError.exit_code} for any other code
than 2, 65, 66 and 74); and when no worker has answered for three times --start_timeout_secs, or twice if none ever
came. tfps cancel ends them immediately.
{manifests.WHY_RESTARTS} Any other exit code fails the Job immediately.
"""


class JobsLauncher(KubernetesLauncher):
    """Plain Kubernetes: an Indexed Job for each role."""

    name = "kubernetes"
    resource = "jobs.batch"
    why = _WHY

    def objects(self, job: Job) -> Sequence[Object]:
        """Return the objects of a job.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """
        hosts = hosts_by_flag(job, self.host)
        return [
            *task_inputs.config_maps(job, hosts),
            *manifests.network_policies(job),
            _service(job),
            *(_job(job, role) for role in job.roles),
        ]

    def host(self, job: Job, role: Role, index: int) -> str:
        """Return the address of a task for other pods of its namespace."""
        return f"{job.name}-{role.name}-{index}.{job.name}:{PORT}"

    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role."""
        return {manifests.role_of(job): job["spec"]["completions"] for job in found}

    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the state of a job: done when the workers' Job is, or the service's, failed when either Job is."""
        workers = [job for job in found if manifests.role_of(job) == "worker"]
        return status.by_conditions(found, workers or found)


def _service(job: Job) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": manifests.labels(job),
        "ports": [{"name": "tfjob-port", "port": PORT}],
    }
    return manifests.api_object(job, "v1", "Service", spec=spec)


def _job(job: Job, role: Role) -> Object:
    return manifests.api_object(
        job, "batch/v1", "Job", role.name, spec=manifests.indexed_job(job, role, subdomain=job.name)
    )
