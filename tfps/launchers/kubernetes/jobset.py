"""JobSet (``jobset.x-k8s.io/v1alpha2``): one Indexed Job for each role, which end together."""

from collections.abc import Mapping, Sequence

from tfps.jobs.spec import PORT, Job, Role
from tfps.launchers.kubernetes import manifests, status, task_inputs
from tfps.launchers.kubernetes.launcher import KubernetesLauncher, hosts_by_flag
from tfps.launchers.kubernetes.manifests import Object

_WHY = f"""
The parameter servers end with the job: by themselves when every worker has said that it is done, and by JobSet, which
deletes what still runs once the workers' Job is complete (successPolicy) or either Job has failed.
{manifests.WHY_RESTARTS} Any other exit code fails the Job immediately, and with it the JobSet,
which is never started again as a whole (maxRestarts: 0).
"""


class JobSetLauncher(KubernetesLauncher):
    """JobSet: both roles are one object."""

    name = "jobset"
    resource = "jobsets.jobset.x-k8s.io"
    why = _WHY

    def objects(self, job: Job) -> Sequence[Object]:
        """Return the objects of a job.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """
        hosts = hosts_by_flag(job, self.host)
        spec = {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [job.roles[-1].name]},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": manifests.TTL_SECS,
            "replicatedJobs": [_replicated(job, role) for role in job.roles],
        }
        jobset = manifests.api_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)
        return [*task_inputs.config_maps(job, hosts), *manifests.network_policies(job), jobset]

    def host(self, job: Job, role: Role, index: int) -> str:
        """Return the address of a task for other pods of its namespace."""
        return f"{job.name}-{role.name}-0-{index}.{job.name}:{PORT}"  # the 0 is the Job's index among its replicas

    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role."""
        roles = found[0]["spec"]["replicatedJobs"]
        return {role["name"]: role["template"]["spec"]["completions"] for role in roles}

    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the state of a job, from the conditions of its JobSet."""
        return status.by_conditions(found, found)


def _replicated(job: Job, role: Role) -> Object:
    template = {"metadata": {"labels": manifests.labels(job, role.name)}, "spec": _inner(job, role)}
    return {"name": role.name, "replicas": 1, "template": template}


def _inner(job: Job, role: Role) -> Object:
    """Return the specification of a role's Job, without a TTL: it is deleted with the JobSet."""
    return {
        name: value for name, value in manifests.indexed_job(job, role).items() if name != "ttlSecondsAfterFinished"
    }
