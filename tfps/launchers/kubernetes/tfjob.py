"""Kubeflow's TFJob (``kubeflow.org/v1``): its operator creates the pods and their services, and sets TF_CONFIG.

The operator counts a job as done by its chief or its workers only. So the servers of a parameter service, which has
neither, are the TFJob's workers: they get their places by flags, as TF_CONFIG would call them workers.
"""

from collections.abc import Mapping, Sequence

from tfps.errors import ConfigError
from tfps.jobs.spec import PORT, Job, Role
from tfps.launchers.kubernetes import manifests, status, task_inputs
from tfps.launchers.kubernetes.launcher import KubernetesLauncher, hosts_by_flag
from tfps.launchers.kubernetes.manifests import Object

_WHY = """
The parameter servers end with the job: by themselves when every worker has said that it is done, and by the operator
(cleanPodPolicy: Running) once all workers have ended with 0 (successPolicy: AllWorkers) or the job has failed.
A task that is killed, or ends as another is lost, starts again inside its pod, a limited number of times. A pod that
ends with 128 or more is created again, one that ends with less fails the job (restartPolicy: ExitCode). The operator
does not count the pods that it creates again for an exit code: to bound that, set runPolicy.activeDeadlineSeconds.
"""
_KINDS = {"ps": "PS", "worker": "Worker"}
_INDEX = "training.kubeflow.org/replica-index"  # the operator's label of a pod


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
        if len(job.tasks()) == 1 and not job.config.serve:
            raise ConfigError(
                "--num_workers=1 without PS is one task, and Kubeflow tells it no cluster: give 2 or more, or another "
                "--to."
            )
        hosts = hosts_by_flag(job, self.host) if job.config.serve else {}
        task_inputs.check_tf_config(job, f"{job.options.namespace or 'default'}.svc")
        policy = {
            "cleanPodPolicy": "Running",
            "backoffLimit": manifests.RETRIES,
            "ttlSecondsAfterFinished": manifests.TTL_SECS,
        }
        replicas = {_kind(job, role): _replica(job, role) for role in job.roles}
        spec = {"runPolicy": policy, "successPolicy": "AllWorkers", "tfReplicaSpecs": replicas}
        tfjob = manifests.api_object(job, "kubeflow.org/v1", "TFJob", spec=spec)
        return [*task_inputs.config_maps(job, hosts), *manifests.network_policies(job), tfjob]

    def host(self, job: Job, role: Role, index: int) -> str:
        """Return the address of a task for other pods of its namespace."""
        return f"{job.name}-{_kind(job, role).lower()}-{index}:{PORT}"

    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role."""
        specs = found[0]["spec"]["tfReplicaSpecs"]
        sizes = {kind: spec.get("replicas", 1) for kind, spec in specs.items()}
        return {manifests.role_of(specs[kind]["template"]): size for kind, size in sizes.items()}

    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the state of a job, from the conditions of its TFJob."""
        return status.by_conditions(found, found)


def _kind(job: Job, role: Role) -> str:
    return "Worker" if job.config.serve else _KINDS[role.name]


def _replica(job: Job, role: Role) -> Object:
    template = _server(job, role) if job.config.serve else manifests.template(job, role)
    return {"replicas": role.replicas, "restartPolicy": "ExitCode", "template": template}


def _server(job: Job, role: Role) -> Object:
    """Return the template of a service's pods, which do not read TF_CONFIG."""
    env, flags = manifests.cluster_flags(job)
    index = {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}}
    flags = (*flags, f"--job_name={role.name}", "--task_index=$(TASK_INDEX)")
    return manifests.template(job, role, flags, [*env, index], ("env", "--unset=TF_CONFIG"))
