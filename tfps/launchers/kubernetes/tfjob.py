"""Kubeflow's TFJob (``kubeflow.org/v1``): its operator makes the pods and their services, and tells them TF_CONFIG."""

from tfps.jobs.spec import Job, Role
from tfps.launchers.kubernetes import kubectl, manifests, status
from tfps.launchers.kubernetes.kubectl import KubeJob, Platform
from tfps.launchers.kubernetes.manifests import Object, Plan

FLAGS = manifests.FLAGS

_WHY = """
The parameter servers end with the job: by themselves when every worker has said that it is done, and by the operator
(cleanPodPolicy: Running) once all workers have ended with 0 (successPolicy: AllWorkers) or the job has failed.
A task that is killed, or ends as another is lost, starts again inside its pod, a limited number of times. A pod that
ends with 128 or more is made anew, one that ends with less fails the job (restartPolicy: ExitCode). The operator does
not count what it makes anew for an exit code: to bound that, set runPolicy.activeDeadlineSeconds.
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
    manifests.check_tf_config(job, f"{job.config.namespace or 'default'}.svc")
    policy = {
        "cleanPodPolicy": "Running",
        "backoffLimit": manifests.RETRIES,
        "ttlSecondsAfterFinished": manifests.TTL_SECS,
    }
    replicas = {_KINDS[role.name]: _replica(job, role) for role in job.roles}
    spec = {"runPolicy": policy, "successPolicy": "AllWorkers", "tfReplicaSpecs": replicas}
    tfjob = manifests.api_object(job, "kubeflow.org/v1", "TFJob", spec=spec)
    return manifests.plan(job, "tfjob", [*manifests.config_maps(job), *manifests.network_policies(job), tfjob], _WHY)


_KINDS = {"ps": "PS", "worker": "Worker"}


def _replica(job: Job, role: Role) -> Object:
    return {"replicas": role.replicas, "restartPolicy": "ExitCode", "template": manifests.template(job, role)}


def _replicas(found: list[Object]) -> dict[str, int]:
    specs = found[0]["spec"]["tfReplicaSpecs"]
    return {role: specs[kind].get("replicas", 1) for role, kind in _KINDS.items() if kind in specs}


def _state(found: list[Object]) -> tuple[str, str]:
    return status.by_conditions(found, found)


_PLATFORM = Platform("tfjob", "tfjobs.kubeflow.org", _replicas, _state)


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
