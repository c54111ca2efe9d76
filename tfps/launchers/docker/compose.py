"""A cluster of containers on one Docker machine: a Compose file, sent by Docker's own clients.

The file uses only features that both ``docker-compose`` 1.29 and ``docker compose`` read. Once the job exists, its
state comes from Docker alone, by the labels of its containers, so nobody has to keep the file.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.config.launch_protocol import TOKEN
from tfps.errors import ClientMissingError, ConfigError, PlatformError
from tfps.jobs.spec import PORT, Job, Role
from tfps.launchers.base import ClientAddresses, Launcher
from tfps.launchers.common import client, containers
from tfps.launchers.common.containers import Volume
from tfps.launchers.common.yaml_writer import to_yaml
from tfps.launchers.docker import volumes
from tfps.launchers.docker.job import PROJECT, TASK, DockerJob, ask_docker, docker_client
from tfps.models import loader
from tfps.text import show
from tfps.timeouts import CONTAINER_STOP_SECS

_NETWORK = "training"
_PATIENCE_SECS = 120.0  # the containers of one machine are all there immediately, and restart within seconds
_LEAST_MEMORY = 6 * 2**20  # Docker refuses less
_COMMENT = """Made by tfps submit --to=compose --dry_run, for docker-compose 1.29 and docker compose.
A task that is lost is started again inside its container, at most --max_restarts times.
Checkpoints stay on the volume."""
_TMP = "/tmp"  # noqa: S108  the container's own


@dataclass(frozen=True)
class Plan:
    """A Compose file, and the facts to check before it is sent; ``data_dir`` is a directory of this machine."""

    job: Job
    image: str
    document: Mapping[str, Any]
    data_dir: str = ""
    is_printed_only: ClassVar[bool] = False

    def __str__(self) -> str:
        first = [f"Before the first use, as tfps submit does: {command}" for command in volumes.commands(self.job)]
        return to_yaml([self.document], "\n".join([_COMMENT, *first]))


class ComposeLauncher(Launcher[Plan]):
    """Docker Compose on one machine."""

    name = "compose"
    features = frozenset({"containers", "resources"})
    shares_files = False

    def plan(self, job: Job) -> Plan:
        """Return the Compose file of a job.

        Raises:
            ConfigError: If the volumes or the directories are wrong, or Docker would refuse a resource.
        """
        config = containers.task_config(job)
        _check_memory(job)
        data_dir = volumes.data_of_this_machine(job)
        config = config.replace(data_dir=volumes.DATA_DIR) if data_dir else config
        mounted = [*containers.volumes(job.options), *volumes.of_files(job, data_dir)]
        services = {
            _service(task): _container(job, config, role, task, mounted) for role in job.roles for task in role.tasks()
        }
        document = {
            "services": _literal(services),
            "networks": {_NETWORK: {"internal": True}},
            "volumes": volumes.declared(mounted),
        }
        return Plan(
            job, containers.image(job.options), {key: value for key, value in document.items() if value}, data_dir
        )

    def check_files(self, plan: Plan) -> None:
        """Check a ``--data_dir`` of this machine.

        Raises:
            DataError: If it does not exist, or the model cannot read it.
        """
        if not plan.job.config.serve:
            loader.check_data(plan.job.config.model, plan.data_dir, plan.job.worker.replicas)

    def client_addresses(self, plan: Plan) -> ClientAddresses:
        """Return the names of the containers."""
        return ClientAddresses(_hosts(plan.job.ps), f"in containers on the network {plan.job.name}_{_NETWORK}")

    def submit(self, plan: Plan) -> DockerJob:
        """Start the containers of a job; first remove a job of the same name that has ended.

        Raises:
            ConfigError: If the name is taken, or Docker's machine lacks something that the job requests.
            PlatformError: If Docker or Compose is missing, or refuses; then nothing of the job is left.
        """
        compose = _compose()
        _check_machine(plan.job)
        ended = _ended_before(plan.job)
        _get_image(plan)
        if ended:
            ask_docker("rm", "--volumes", *ended)  # only volumes without a name
        volumes.make(plan.job)
        job = DockerJob(plan.job.name)
        try:
            options = [f"--project-name={plan.job.name}", "--file=-"]
            client.run_client([*compose, *options, "up", "--detach", "--no-build"], given=f"{plan}\n")
        except BaseException:
            job.remove()
            raise
        return job

    def find(self, job_id: str) -> DockerJob:
        """Return the job of a Compose project."""
        return DockerJob(job_id)


def _check_memory(job: Job) -> None:
    small = [role.name for role in job.roles if role.memory_bytes and role.memory_bytes < _LEAST_MEMORY]
    if small:
        raise ConfigError([f"--{name}_memory is less than Docker takes: give at least 6Mi." for name in small])


def _service(task: Task) -> str:
    """Return the name of a task's service, which is its host name for the others."""
    return f"{task.job}-{task.index}"


def _hosts(role: Role) -> Sequence[str]:
    return [f"{_service(task)}:{PORT}" for task in role.tasks()]


def _container(job: Job, config: JobConfig, role: Role, task: Task, mounted: Sequence[Volume]) -> Mapping[str, Any]:
    return {
        "image": containers.image(job.options),
        "command": _command(job, config, task),
        **({"environment": [TOKEN]} if job.config.serve else {}),  # the value is that of Compose's own environment
        "labels": {TASK: str(task)},
        "networks": [_NETWORK],
        "volumes": [volumes.mount(volume) for volume in mounted],
        "restart": "no",  # Docker cannot tell which failures a restart mends
        "stop_grace_period": f"{CONTAINER_STOP_SECS}s",
        "read_only": True,
        **({} if any(volume.target == _TMP for volume in mounted) else {"tmpfs": [_TMP]}),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        **_resources(role, task),
    }


def _command(job: Job, config: JobConfig, task: Task) -> Sequence[str]:
    hosts = {f"{role.name}_hosts": ",".join(_hosts(role)) for role in job.roles}
    return job.command(
        **hosts,
        job_name=task.job,
        task_index=task.index,
        model=config.model,
        model_dir=config.model_dir,
        data_dir=config.data_dir,
        start_timeout_secs=config.start_timeout_secs or _PATIENCE_SECS,
    )


def _resources(role: Role, task: Task) -> Mapping[str, Any]:
    """Return a task's limits. Docker gives the same GPUs to all that request a number, so each gets its own ids."""
    found: dict[str, Any] = {} if role.cpu is None else {"cpus": role.cpu}
    if role.memory_bytes is not None:
        found["mem_limit"] = role.memory_bytes
    if role.gpu:
        ids = [str(number) for number in range(task.index * role.gpu, (task.index + 1) * role.gpu)]
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        found["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return found


def _literal(value: Any) -> Any:
    """Return a value with every ``$`` doubled, so that Compose takes it literally."""
    if isinstance(value, Mapping):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, str):
        return value.replace("$", "$$")
    return [_literal(item) for item in value] if isinstance(value, (list, tuple)) else value


def _compose() -> Sequence[str]:
    """Return the command that runs Compose here."""
    if subprocess.run([docker_client(), "compose", "version"], capture_output=True, check=False).returncode == 0:
        return docker_client(), "compose"
    if (classic := shutil.which("docker-compose")) is not None:
        return (classic,)
    raise ClientMissingError(
        "docker compose is not installed: apt-get install docker-compose-plugin, or docker-compose."
    )


def _check_machine(job: Job) -> None:
    """Check that Docker's machine has the resources that the job requests.

    Raises:
        ConfigError: If it does not have them.
        PlatformError: If Docker does not answer.
    """
    machine = json.loads(ask_docker("info", "--format={{json .}}"))
    problems = [
        f"--{role.name}_cpu={role.cpu:g} is more than Docker's machine has: at most {machine['NCPU']}."
        for role in job.roles
        if role.cpu and role.cpu > machine["NCPU"]
    ]
    if job.worker.gpu and "nvidia" not in machine.get("Runtimes", {}) and not machine.get("DiscoveredDevices"):
        problems.append(
            f"--worker_gpu={job.worker.gpu}: Docker has no nvidia runtime there: install the NVIDIA Container Toolkit, "
            "then nvidia-ctk runtime configure."
        )
    if problems:
        raise ConfigError(problems)


def _ended_before(job: Job) -> Sequence[str]:
    """Return the containers of a job of this name that has ended.

    Raises:
        ConfigError: If a running job or another project has the name.
    """
    form = f"--format={{{{.ID}}}} {{{{.State}}}} {{{{.Label {json.dumps(TASK)}}}}}"
    found = [
        line.split() for line in ask_docker("ps", "--all", f"--filter=label={PROJECT}={job.name}", form).splitlines()
    ]
    if any(len(words) < 3 or words[1] not in ("exited", "dead") for words in found):
        raise ConfigError(
            f"--name={job.name} is taken: Docker has {len(found)} containers of a project of this name. "
            f"Give another name, or end that one: tfps cancel compose:{job.name}."
        )
    return [words[0] for words in found]


def _get_image(plan: Plan) -> None:
    """Pull the image if it is not there.

    Raises:
        PlatformError: If it cannot be pulled.
    """
    try:
        ask_docker("image", "inspect", "--format={{.Id}}", plan.image)
        return
    except PlatformError:
        pass
    try:
        ask_docker("pull", "--quiet", plan.image, timeout_secs=None)
    except PlatformError as error:
        own = plan.job.options.image is None
        fix = f"docker build -t {plan.image} -f docker/Dockerfile . in tfps's repository makes it." if own else ""
        problem = f"the image {show(plan.image)} is not on Docker's machine and cannot be pulled. {fix}".rstrip()
        raise PlatformError([*error.problems, problem]) from None
