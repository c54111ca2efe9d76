"""The devices of a worker on which its towers are."""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Task
from tfps.config.devices import requested
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError


def of_worker(config: JobConfig, task: Task) -> Sequence[str]:
    """Return the devices of a worker on which it computes, one tower on each; a single one without several towers.

    Without the flag, they are all GPUs of this machine that the process may use.
    """
    kind = requested(config.devices_per_worker).kind
    return [f"{task.device}/device:{kind}:{index}" for index in range(count(config))] or [task.device]


def count(config: JobConfig) -> int:
    """Return the number of devices on which a worker computes; 0 for its CPU, without the flag and without a GPU."""
    asked = requested(config.devices_per_worker).count
    return len(_gpus()) if asked is None else asked


def described(config: JobConfig) -> str:
    """Return the part of a log line that says how many devices a worker uses; empty for one."""
    number = count(config)
    return f", {number} devices in this worker" if number > 1 else ""


def check(config: JobConfig) -> None:
    """Check, on a worker, that it has as many GPUs as it is to use.

    Raises:
        ConfigError: If it has fewer.
    """
    asked = requested(config.devices_per_worker)
    found = _gpus() if asked.kind == "GPU" and asked.count is not None else []
    if asked.kind == "GPU" and asked.count is not None and len(found) < asked.count:
        has = f"{len(found)}: {', '.join(found)}" if found else "none"
        raise ConfigError(
            f"--devices_per_worker={asked.count}, but TensorFlow finds fewer GPUs on this worker ({has}): give at most "
            "that number, or leave the flag out for all GPUs; cpu:N is for N logical CPU devices."
        )


def _gpus() -> Sequence[str]:
    """Return the names of the GPUs that this process may use."""
    return [device.name.removeprefix("/physical_device:") for device in tf.config.list_physical_devices("GPU")]
