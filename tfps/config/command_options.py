"""The options of single commands: they say what a command does with a job, and are no part of the job.

``job.json`` and a task's command line hold a ``JobConfig`` only. Must not import TensorFlow.
"""

import dataclasses

from tfps.config.converters import boolean, directory, dns_label, integer, memory, number, plain_name, text
from tfps.config.options import option


@dataclasses.dataclass(frozen=True)
class SubmitOptions:
    """The options of ``tfps submit``: the platform, and the resources of each role. ``None``: not given."""

    to: str | None = option(None, "platform", text, "where the job runs", choices="tfps.launchers.registry:LAUNCHERS")
    name: str | None = option(
        None,
        "platform",
        plain_name,
        "the job's name on the platform, and its directory's without --model_dir (default: the model and the time)",
    )
    dry_run: bool = option(False, "platform", boolean, "print what would be sent, and send nothing")
    wait: bool = option(False, "platform", boolean, "watch the job to its end, and exit with its exit code")
    image: str | None = option(
        None, "platform", text, "containers: the image, with tfps in it (default tfps:VERSION)", feature="containers"
    )
    volumes: str | None = option(
        None,
        "platform",
        text,
        "containers: volumes to mount, NAME:/path or /host/path:/path,... with :ro for read-only (default tfps:/tfps); "
        "--model_dir must be on one of them (default: the job's name in the first that can be written)",
        feature="containers",
    )
    namespace: str | None = option(
        None, "platform", dns_label, "Kubernetes: the namespace (default: kubectl's own)", feature="namespaces"
    )
    network_policy: bool = option(
        True,
        "platform",
        boolean,
        "Kubernetes: only the job's own pods reach its pods (with --serve, all pods of the namespace), if the network "
        "enforces policies",
        feature="network_policies",
    )
    token_secret: str | None = option(
        None,
        "platform",
        dns_label,
        "Kubernetes, with --serve: the Secret whose key token is the value of TFPS_TOKEN for the servers",
        feature="secrets",
    )
    queue: str | None = option(
        None, "platform", text, "Volcano: the queue; Slurm: the partition (default: its own)", feature="queues"
    )
    address: str | None = option(
        None,
        "platform",
        text,
        "Ray: the dashboard, http://host:8265 (default: RAY_ADDRESS, else this machine's)",
        feature="dashboards",
    )
    ssh: bool = option(
        False,
        "platform",
        boolean,
        "hosts: start the tasks over ssh; they end when this command does",
        feature="ssh",
    )
    ps_cpu: float | None = option(
        None, "resources", number(0), "CPU cores of each parameter server", feature="resources"
    )
    ps_memory: int | None = option(
        None, "resources", memory, "memory of each parameter server, like 8Gi or 500M", feature="resources"
    )
    worker_cpu: float | None = option(None, "resources", number(0), "CPU cores of each worker", feature="resources")
    worker_memory: int | None = option(None, "resources", memory, "memory of each worker", feature="resources")
    worker_gpu: int | None = option(None, "resources", integer(0, 64), "GPUs of each worker", feature="resources")


@dataclasses.dataclass(frozen=True)
class ResultOptions:
    """The options of ``tfps eval`` and ``tfps export``: the checkpoint to read and the directory to write."""

    checkpoint_path: str | None = option(None, "checkpoint", directory, "path of the checkpoint (default: the newest)")
    export_dir: str | None = option(
        None, "export", directory, "directory of the SavedModel (default: MODEL_DIR/export/STEP)"
    )


@dataclasses.dataclass(frozen=True)
class LogsOptions:
    """The options of ``tfps logs``."""

    task: str | None = option(None, "logs", text, "only the log of this task, like worker:1")
    follow: bool = option(False, "logs", boolean, "show new lines until the job ends")
