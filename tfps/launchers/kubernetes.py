"""Kubernetes without any operator: an Indexed Job for each role, and a headless Service that gives pods their names."""

from tfps.launchers import kubectl, pod_state, pods
from tfps.launchers.job import PORT, Job, Role
from tfps.launchers.kubectl import KubeJob, Platform
from tfps.launchers.pods import Object, Plan

FLAGS = pods.FLAGS

_WHY = f"""
The parameter servers end by themselves, though plain Jobs know nothing of each other: with 0 when every worker has said
that it is done; with a worker's exit code when it has failed for good; and when none has come for twice
--start_timeout_secs. tfps cancel ends them at once.
{pods.WHY_RESTARTS} Any other exit code fails the Job at once.
"""


def sends(job: Job) -> bool:  # noqa: ARG001
    """Tell that there is something to send."""
    return True


def plan(job: Job) -> Plan:
    """Return the objects of a job.

    Raises:
        ConfigError: If the cluster would refuse one of them.
    """
    job = pods.placed(job)
    hosts = {f"{role.name}_hosts": [_host(job, role, index) for index in range(role.replicas)] for role in job.roles}
    objects = [
        *pods.config_maps(job, hosts),
        *pods.network_policies(job),
        _service(job),
        *(_job(job, role) for role in job.roles),
    ]
    return pods.plan(job, "kubernetes", objects, _WHY)


def _host(job: Job, role: Role, index: int) -> str:
    return f"{job.name}-{role.name}-{index}.{job.name}:{PORT}"


def _service(job: Job) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": pods.labels(job),
        "ports": [{"name": "tfjob-port", "port": PORT}],
    }
    return pods.thing(job, "v1", "Service", spec=spec)


def _job(job: Job, role: Role) -> Object:
    return pods.thing(job, "batch/v1", "Job", role.name, spec=pods.indexed_job(job, role, subdomain=job.name))


def _replicas(found: list[Object]) -> dict[str, int]:
    return {pods.role_of(job): job["spec"]["completions"] for job in found}


def _state(found: list[Object]) -> tuple[str, str]:
    """Tell how a job is: done when its workers are, failed when either Job is."""
    return pod_state.by_conditions(found, [job for job in found if pods.role_of(job) == "worker"])


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
