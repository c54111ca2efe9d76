"""Volcano's Job (``batch.volcano.sh/v1alpha1``): it schedules its tasks all together, and sets their TF_CONFIG."""

import re
from collections.abc import Mapping, Sequence

from tfps.errors import ConfigError
from tfps.jobs import handle
from tfps.jobs.spec import KILLED, PORT, Job, Role
from tfps.launchers.kubernetes import manifests, task_inputs
from tfps.launchers.kubernetes.launcher import KubernetesLauncher
from tfps.launchers.kubernetes.manifests import Object
from tfps.text import show

_WHY = f"""
The parameter servers end with the job: by themselves when every worker has said that it is done, and by Volcano, which
completes the job once all workers (not the first of them) have ended with 0, and ends it when a task has failed.
A task that is killed, or ends as another is lost, starts again inside its pod, a limited number of times. A
pod that is evicted, or whose container is killed (exit code {", ".join(map(str, KILLED))}), starts the whole job
again from its last checkpoint, up to {manifests.RETRIES} times; any other exit code ends the job.
"""
_PLUGINS = {
    "env": [],
    "svc": ["--publish-not-ready-addresses=true", "--disable-network-policy=true"],  # tfps's own policy is narrower
}
_PHASES = {
    "Completed": handle.SUCCEEDED,
    "Failed": handle.FAILED,
    "Terminated": handle.FAILED,
    "Aborted": handle.CANCELLED,
    "Restarting": handle.PENDING,
}


class VolcanoLauncher(KubernetesLauncher):
    """Volcano: all tasks of a job are scheduled together, in a queue."""

    name = "volcano"
    resource = "jobs.batch.volcano.sh"
    why = _WHY
    features = manifests.FEATURES | {"queues"}

    def objects(self, job: Job) -> Sequence[Object]:
        """Return the objects of a job.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """
        task_inputs.check_tf_config(job, job.name)
        spec = {
            "schedulerName": "volcano",
            **_queue(job),
            "minAvailable": len(job.tasks()),
            "maxRetry": manifests.RETRIES + 1,  # Volcano fails the job at this restart
            "ttlSecondsAfterFinished": manifests.TTL_SECS,
            "plugins": {
                **_PLUGINS,
                "tensorflow": [*(f"--{role.name}={role.name}" for role in job.roles), f"--port={PORT}"],
            },
            "policies": _policies(),
            "tasks": [_task(job, role, self._alone(job)) for role in job.roles],
        }
        volcano = manifests.api_object(job, "batch.volcano.sh/v1alpha1", "Job", spec=spec)
        return [*task_inputs.config_maps(job), *manifests.network_policies(job), volcano]

    def _alone(self, job: Job) -> Sequence[str]:
        """Return the flags with the place of a job's only task, which Volcano does not tell; none if there are more."""
        if len(job.tasks()) > 1:
            return ()
        [role] = job.roles
        return f"--{role.name}_hosts={self.host(job, role, 0)}", f"--job_name={role.name}", "--task_index=0"

    def host(self, job: Job, role: Role, index: int) -> str:
        """Return the address of a task for other pods of its namespace."""
        return f"{job.name}-{role.name}-{index}.{job.name}:{PORT}"

    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role."""
        return {task["name"]: task.get("replicas", 1) for task in found[0]["spec"]["tasks"]}

    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the state of a job, from its phase."""
        state = found[0].get("status", {}).get("state", {})
        words = ": ".join(str(state[name]) for name in ("reason", "message") if state.get(name))
        phase = str(state.get("phase", ""))
        return _PHASES.get(phase, ""), words or (phase if phase in _PHASES and phase != "Completed" else "")


def _queue(job: Job) -> Object:
    queue = job.options.queue
    if queue is None:
        return {}
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", queue) or len(queue) > 63:
        raise ConfigError(f"--queue={show(queue)} is no name of a queue: up to 63 of a-z, 0-9, - and . make one.")
    return {"queue": queue}


def _policies() -> list[Object]:
    """Return the actions for a task that ends badly: the first match counts."""
    killed = [{"exitCode": code, "action": "RestartJob"} for code in KILLED]
    evicted = {"events": ["PodEvicted"], "action": "RestartJob"}
    return [*killed, evicted, {"events": ["PodFailed"], "action": "TerminateJob"}]


def _task(job: Job, role: Role, flags: Sequence[str]) -> Object:
    template = manifests.template(job, role, flags, restartPolicy="Never")
    completes = [{"event": "TaskCompleted", "action": "CompleteJob"}] if role == job.roles[-1] else []
    ending = {"policies": completes} if completes else {}
    return {"name": role.name, "replicas": role.replicas, **ending, "template": template}
