"""Kubeflow's TFJob (``kubeflow.org/v1``): its operator creates the pods and their services, and sets TF_CONFIG."""

from collections.abc import Mapping, Sequence

from tfps.errors import ConfigError
from tfps.jobs.spec import Job, Role
from tfps.launchers.kubernetes import manifests, status, task_inputs
from tfps.launchers.kubernetes.launcher import KubernetesLauncher
from tfps.launchers.kubernetes.manifests import Object

_WHY = """
The parameter servers end with the job: by themselves when every worker has said that it is done, and by the operator
(cleanPodPolicy: Running) once all workers have ended with 0 (successPolicy: AllWorkers) or the job has failed.
A task that is killed, or ends as another is lost, starts again inside its pod, a limited number of times. A pod that
ends with 128 or more is created again, one that ends with less fails the job (restartPolicy: ExitCode). The operator
does not count the pods that it creates again for an exit code: to bound that, set runPolicy.activeDeadlineSeconds.
"""
_KINDS = {"ps": "PS", "worker": "Worker"}


class TFJobLauncher(KubernetesLauncher):
    """Kubeflow's training operator."""

    name = "tfjob"
    resource = "tfjobs.kubeflow.org"
    why = _WHY

    def objects(self, job: Job) -> Sequence[Object]:
        """Return the objects of a job.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """
        if len(job.tasks()) == 1:
            raise ConfigError(
                "--num_workers=1 without PS is one task, and Kubeflow tells it no cluster: give 2 or more, or another "
                "--to."
            )
        task_inputs.check_tf_config(job, f"{job.options.namespace or 'default'}.svc")
        policy = {
            "cleanPodPolicy": "Running",
            "backoffLimit": manifests.RETRIES,
            "ttlSecondsAfterFinished": manifests.TTL_SECS,
        }
        replicas = {_KINDS[role.name]: _replica(job, role) for role in job.roles}
        spec = {"runPolicy": policy, "successPolicy": "AllWorkers", "tfReplicaSpecs": replicas}
        tfjob = manifests.api_object(job, "kubeflow.org/v1", "TFJob", spec=spec)
        return [*task_inputs.config_maps(job), *manifests.network_policies(job), tfjob]

    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role."""
        specs = found[0]["spec"]["tfReplicaSpecs"]
        return {role: specs[kind].get("replicas", 1) for role, kind in _KINDS.items() if kind in specs}

    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the state of a job, from the conditions of its TFJob."""
        return status.by_conditions(found, found)


def _replica(job: Job, role: Role) -> Object:
    return {"replicas": role.replicas, "restartPolicy": "ExitCode", "template": manifests.template(job, role)}
