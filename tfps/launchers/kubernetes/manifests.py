"""The parts of all Kubernetes platforms' manifests: the pod of a task, its mounts, and its network policy."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from tfps.config.launch_protocol import TOKEN
from tfps.errors import ConfigError
from tfps.jobs.spec import KILLED, PORT, Job, Role
from tfps.launchers.common import containers
from tfps.launchers.common.yaml_writer import to_yaml
from tfps.text import show
from tfps.timeouts import POD_STOP_SECS

Object = dict[str, Any]

FEATURES = frozenset({"containers", "resources", "namespaces", "network_policies", "secrets"})
RETRIES = 3  # how often a task's pod is replaced; the task itself restarts inside its pod
TTL_SECS = 7 * 24 * 3600  # time for which the status of an ended job is kept
CONTAINER = "tensorflow"  # Kubeflow's operator requires this name, and the port's
INDEX = "$(JOB_COMPLETION_INDEX)"  # in pods of an Indexed Job; the kubelet expands it in commands

WHY_RESTARTS = f"""\
A task that is killed, or ends as another is lost, starts again inside its pod within seconds, a limited number of times
(--max_restarts). A pod that is evicted is replaced, and one whose container is killed (exit code
{", ".join(map(str, KILLED))}) up to {RETRIES} times."""

USER = 1000
_NAME = "app.kubernetes.io/"


@dataclass(frozen=True)
class Plan:
    """The objects of a job, in the order of their creation; the text contains all of them.

    ``ps_hosts`` are the addresses of its parameter servers.
    """

    name: str
    namespace: str | None
    objects: Sequence[Object]
    comment: str
    ps_hosts: Sequence[str] = ()
    is_printed_only: ClassVar[bool] = False

    def __str__(self) -> str:
        return to_yaml(self.objects, self.comment)


def with_container_paths(job: Job) -> Job:
    """Return the job with the paths of its files in the pods.

    Raises:
        ConfigError: If a pod cannot have one of the paths or volumes.
    """
    config = job.config
    problems = [problem for volume in containers.volumes(job.options) if (problem := _problem(volume))]
    if config.data_dir and not config.data_dir.startswith("/") and "://" not in config.data_dir:
        problems.append(
            f"--data_dir={show(config.data_dir)} is no path in the containers: give an absolute one, on a volume "
            "of --volumes or in the image."
        )
    problems += containers.model_problems(job)
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(job, config=containers.task_config(job))


def _problem(volume: containers.Volume) -> str:
    """Return the problem of a volume; empty if there is none."""
    if volume.on_host:
        bad = ".." in PurePosixPath(volume.source).parts
        return f"--volumes: {show(volume.source)} has a .. in it: write the path without." if bad else ""
    if re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", volume.source):
        return ""
    return f"--volumes: {show(volume.source)} is no name of a PersistentVolumeClaim: use a-z, 0-9, - and . only."


def labels(job: Job, role: str = "") -> dict[str, str]:
    """Return the labels of every object of a job, or of one of its roles."""
    found = {f"{_NAME}name": "tfps", f"{_NAME}instance": job.name, f"{_NAME}managed-by": "tfps"}
    return {**found, f"{_NAME}component": role} if role else found


def selector(name: str, role: str = "") -> str:
    """Return kubectl's selector for the objects of the job of that name, or of one of its roles."""
    of_role = f",{_NAME}component={role}" if role else ""
    return f"{_NAME}managed-by=tfps,{_NAME}instance={name}{of_role}"


def role_of(found: Mapping[str, Any]) -> str:
    """Return the role of an object from the cluster; empty if it has none."""
    return str(found.get("metadata", {}).get("labels", {}).get(f"{_NAME}component", ""))


def api_object(job: Job, api: str, kind: str, role: str = "", **fields: Any) -> Object:
    """Return an object of a job: the common head, and ``fields``."""
    where = {"namespace": job.options.namespace} if job.options.namespace else {}
    name = f"{job.name}-{role}" if role else job.name
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name, **where, "labels": labels(job, role)},
        **fields,
    }


def template(
    job: Job,
    role: Role,
    flags: Sequence[str] = (),
    env: Sequence[Object] = (),
    before: Sequence[str] = (),
    **spec: Any,
) -> Object:
    """Return the template of a role's pods.

    Args:
        job: The job, with its paths in the containers.
        role: The role.
        flags: More flags of ``tfps run``; the kubelet expands variables in these only.
        env: Variables.
        before: The first words of the command.
        **spec: More of the pod's specification.
    """
    return {
        "metadata": {"labels": labels(job, role.name), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            **spec,
            "terminationGracePeriodSeconds": POD_STOP_SECS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(job, role, flags, [*_token(job), *env], before)],
            "volumes": [volume for volume, _ in _volumes(job)],
        },
    }


def _token(job: Job) -> Sequence[Object]:
    """Return the variable with the secret of a service."""
    name = job.options.token_secret
    return [{"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}] if name else []


def _container(job: Job, role: Role, flags: Sequence[str], env: Sequence[Object], before: Sequence[str]) -> Object:
    resources = _resources(role)
    return {
        "name": CONTAINER,
        "image": containers.image(job.options),
        "command": [*before, *(word.replace("$", "$$") for word in job.command()), *flags],
        "env": [{"name": "HOME", "value": "/tmp"}, *env],  # noqa: S108  a volume of the pod's own
        "ports": [{"name": "tfjob-port", "containerPort": PORT, "protocol": "TCP"}],
        **({"resources": resources} if resources else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [mount for _, mount in _volumes(job)],
    }


def _resources(role: Role) -> Object:
    asked = {"cpu": role.cpu and _cpu(role.cpu), "memory": role.memory_bytes and _memory(role.memory_bytes)}
    asked = {name: amount for name, amount in asked.items() if amount}
    limits = {**asked, **({"nvidia.com/gpu": str(role.gpu)} if role.gpu else {})}
    return {**({"requests": asked} if asked else {}), **({"limits": limits} if limits else {})}


def _cpu(cores: float) -> str:
    millis = math.ceil(round(cores * 1000, 3))
    return f"{millis}m" if millis % 1000 else str(millis // 1000)


def _memory(size: int) -> str:
    for unit, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size % 2**power == 0:
            return f"{size >> power}{unit}"
    return str(size)


def _volumes(job: Job) -> Sequence[tuple[Object, Object]]:
    """Return each volume of a pod, and its mount."""
    found = [_volume(f"volume-{n}", volume) for n, volume in enumerate(containers.volumes(job.options))]
    if all(mount["mountPath"] != "/tmp" for _, mount in found):  # noqa: S108
        found.append(({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}))  # noqa: S108
    if job.model_source is not None:
        file = PurePosixPath(job.config.model).name
        model = {"name": job.name, "items": [{"key": "model", "path": file}]}
        mount = {"name": "model", "mountPath": containers.MODEL_DIR, "readOnly": True}
        found.append(({"name": "model", "configMap": model}, mount))
    return found


def _volume(name: str, volume: containers.Volume) -> tuple[Object, Object]:
    on_host = {"hostPath": {"path": volume.source, "type": "Directory"}}
    claimed = {"persistentVolumeClaim": {"claimName": volume.source}}
    mount = {"name": name, "mountPath": volume.target}
    read_only = {"readOnly": True} if volume.read_only else {}
    return {"name": name, **(on_host if volume.on_host else claimed)}, {**mount, **read_only}


def cluster_flags(job: Job) -> tuple[Sequence[Object], Sequence[str]]:
    """Return the variables with the hosts from the ConfigMap, and the flags that have them."""
    lists = [f"{role.name}_hosts" for role in job.roles]
    env = [{"name": name.upper(), "valueFrom": {"configMapKeyRef": {"name": job.name, "key": name}}} for name in lists]
    return env, [f"--{name}=$({name.upper()})" for name in lists]


def indexed_job(job: Job, role: Role, **spec: Any) -> Object:
    """Return the specification of the Job that runs a role's tasks; they read their hosts from the ConfigMap."""
    env, cluster = cluster_flags(job)
    flags = (*cluster, f"--job_name={role.name}", f"--task_index={INDEX}")
    final = {"containerName": CONTAINER, "operator": "NotIn", "values": list(KILLED)}  # 0 never matches
    return {
        "completionMode": "Indexed",
        "completions": role.replicas,
        "parallelism": role.replicas,
        "backoffLimitPerIndex": RETRIES,  # otherwise each pod's failure would delay all others
        "maxFailedIndexes": 0,
        "ttlSecondsAfterFinished": TTL_SECS,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": final},
            ]
        },
        "template": template(job, role, flags, env, restartPolicy="Never", **spec),
    }


def network_policies(job: Job) -> Sequence[Object]:
    """Return the policy that limits the job's pods to traffic among themselves; none without ``--network_policy``.

    A service's pods can be reached by all pods of their namespace.
    """
    return [_network_policy(job)] if job.options.network_policy else []


def _network_policy(job: Job) -> Object:
    own = [{"podSelector": {"matchLabels": labels(job)}}]
    port = [{"protocol": "TCP", "port": PORT}]
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    # Name servers are always reachable; a --data_dir that is a URL needs all egress.
    spec: Object = {"podSelector": {"matchLabels": labels(job)}, "policyTypes": ["Ingress"]}
    spec["ingress"] = [{"from": [{"podSelector": {}}] if job.config.serve else own, "ports": port}]
    if "://" not in job.config.data_dir:
        spec["policyTypes"].append("Egress")
        spec["egress"] = [{"to": own, "ports": port}, {"ports": names}]
    return api_object(job, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)
