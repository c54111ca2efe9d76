"""Kubernetes without any operator: an Indexed Job for each role, and a headless Service that gives pods their names."""

from tfps.jobs.spec import PORT, Job, Role
from tfps.launchers.kubernetes import kubectl, manifests, status
from tfps.launchers.kubernetes.kubectl import KubeJob, Platform
from tfps.launchers.kubernetes.manifests import Object, Plan

FLAGS = manifests.FLAGS

_WHY = f"""
The parameter servers end by themselves, though plain Jobs know nothing of each other: with 0 when every worker has said
that it is done; with a worker's exit code when it has failed for good; and when none has come for twice
--start_timeout_secs. tfps cancel ends them at once.
{manifests.WHY_RESTARTS} Any other exit code fails the Job at once.
"""


def sends(job: Job) -> bool:  # noqa: ARG001
    """Tell that there is something to send."""
    return True


def plan(job: Job) -> Plan:
    """Return the objects of a job.

    Raises:
        ConfigError: If the cluster would refuse one of them.
    """
    job = manifests.with_container_paths(job)
    hosts = {f"{role.name}_hosts": [_host(job, role, index) for index in range(role.replicas)] for role in job.roles}
    objects = [
        *manifests.config_maps(job, hosts),
        *manifests.network_policies(job),
        _service(job),
        *(_job(job, role) for role in job.roles),
    ]
    return manifests.plan(job, "kubernetes", objects, _WHY)


def _host(job: Job, role: Role, index: int) -> str:
    return f"{job.name}-{role.name}-{index}.{job.name}:{PORT}"


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


def _replicas(found: list[Object]) -> dict[str, int]:
    return {manifests.role_of(job): job["spec"]["completions"] for job in found}


def _state(found: list[Object]) -> tuple[str, str]:
    """Tell how a job is: done when its workers are, failed when either Job is."""
    return status.by_conditions(found, [job for job in found if manifests.role_of(job) == "worker"])


_PLATFORM = Platform("kubernetes", "jobs.batch", _replicas, _state)


def submit(plan: Plan) -> KubeJob:
    """Create the objects of a job, all or none.

    Raises:
        ConfigError: If kubectl is not installed, or the cluster refuses one of them.
    """
    return kubectl.submit(_PLATFORM, plan)


def find(name: str) -> KubeJob:
    """Return the job of a handle.

    Raises:
        ConfigError: If it is not ``NAME`` or ``NAMESPACE/NAME``.
    """
    return kubectl.find(_PLATFORM, name)
