"""JobSet (``jobset.x-k8s.io/v1alpha2``): one Indexed Job for each role, which end together."""

from tfps.jobs.spec import PORT, Job, Role
from tfps.launchers.kubernetes import kubectl, manifests, status
from tfps.launchers.kubernetes.kubectl import KubeJob, Platform
from tfps.launchers.kubernetes.manifests import Object, Plan

FLAGS = manifests.FLAGS

_WHY = f"""
The parameter servers end with the job: by themselves when every worker has said that it is done, and by JobSet, which
deletes what still runs once the workers' Job is complete (successPolicy) or either Job has failed.
{manifests.WHY_RESTARTS} Any other exit code fails the Job at once, and with it the JobSet,
which is never started again as a whole (maxRestarts: 0).
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
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["worker"]},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": manifests.TTL_SECS,
        "replicatedJobs": [_replicated(job, role) for role in job.roles],
    }
    jobset = manifests.api_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)
    return manifests.plan(
        job, "jobset", [*manifests.config_maps(job, hosts), *manifests.network_policies(job), jobset], _WHY
    )


def _host(job: Job, role: Role, index: int) -> str:
    return f"{job.name}-{role.name}-0-{index}.{job.name}:{PORT}"  # the 0 is the Job's among its replicas


def _replicated(job: Job, role: Role) -> Object:
    template = {"metadata": {"labels": manifests.labels(job, role.name)}, "spec": _inner(job, role)}
    return {"name": role.name, "replicas": 1, "template": template}


def _inner(job: Job, role: Role) -> Object:
    """Return a role's Job, which goes with the JobSet, not by itself."""
    return {
        name: value for name, value in manifests.indexed_job(job, role).items() if name != "ttlSecondsAfterFinished"
    }


def _replicas(found: list[Object]) -> dict[str, int]:
    return {one["name"]: one["template"]["spec"]["completions"] for one in found[0]["spec"]["replicatedJobs"]}


def _state(found: list[Object]) -> tuple[str, str]:
    return status.by_conditions(found, found)


_PLATFORM = Platform("jobset", "jobsets.jobset.x-k8s.io", _replicas, _state)


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
