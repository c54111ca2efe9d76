"""What tasks on Kubernetes get besides their flags: the hosts and the model's file, and the limits of their sizes.

Where no operator sets TF_CONFIG, the hosts are in a ConfigMap. The model's file always is.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tfps.cluster.spec import Task
from tfps.errors import ConfigError
from tfps.jobs.spec import PORT, Job
from tfps.launchers.kubernetes import manifests
from tfps.launchers.kubernetes.manifests import Object
from tfps.text import show

_CONFIG_MAP_BYTES = 2**20
_ARGUMENT_BYTES = 2**17  # Linux's limit for one argument or variable, including the zero byte at its end


def config_maps(job: Job, hosts: Mapping[str, Sequence[str]] | None = None) -> Sequence[Object]:
    """Return the ConfigMap with the hosts, by flag, and the model's file; none if it would be empty.

    Raises:
        ConfigError: If the content is too large for a task or a ConfigMap.
    """
    data = {flag: ",".join(addresses) for flag, addresses in (hosts or {}).items()}
    for flag, text in data.items():
        _check_argument(job, f"--{flag}={text}")
    size = sum(len(text.encode()) for text in data.values())
    model = None if job.model_source is None else job.model_source.encode(errors="surrogateescape")
    size += len(model or b"")
    if size > _CONFIG_MAP_BYTES:
        raise ConfigError(
            f"--model={show(job.config.model)} is too large: a ConfigMap holds {_CONFIG_MAP_BYTES:,} bytes, not "
            f"{size:,}; put the model into the image, and give its dotted name."
        )
    fields = _with_model(data, model)
    return [manifests.api_object(job, "v1", "ConfigMap", **fields)] if fields else []


def _with_model(data: Mapping[str, str], model: bytes | None) -> Mapping[str, Any]:
    """Return the fields of a ConfigMap that hold the data and the model's file, byte for byte."""
    if model is None:
        return {"data": data} if data else {}
    try:
        return {"data": {**data, "model": model.decode()}}
    except UnicodeDecodeError:  # the file declares another coding
        return {**({"data": data} if data else {}), "binaryData": {"model": base64.b64encode(model).decode()}}


def tf_config(job: Job, domain: str, task: Task) -> str:
    """Return the TF_CONFIG that an operator sets for a task whose host is ``JOB-ROLE-INDEX.DOMAIN``."""
    hosts = {
        role.name: [f"{job.name}-{role.name}-{n}.{domain}:{PORT}" for n in range(role.replicas)] for role in job.roles
    }
    return json.dumps({"cluster": hosts, "task": {"type": task.job, "index": task.index}})


def check_tf_config(job: Job, domain: str) -> None:
    """Check that the cluster fits into an operator's TF_CONFIG.

    Raises:
        ConfigError: If there are too many tasks.
    """
    _check_argument(job, f"TF_CONFIG={tf_config(job, domain, job.tasks()[-1])}")


def _check_argument(job: Job, text: str) -> None:
    """Check that an argument with all the hosts is not too long for a process.

    Raises:
        ConfigError: If there are too many tasks.
    """
    if len(text.encode()) >= _ARGUMENT_BYTES:
        raise ConfigError(
            f"{len(job.tasks()):,} tasks are too many: their addresses take {len(text):,} bytes, and a process takes "
            f"{_ARGUMENT_BYTES:,} in one argument; ask for fewer, or give a shorter --name."
        )
