"""A Ray cluster, through Ray's own Jobs API: the submitted job is a driver that runs inside the cluster.

The cluster is that of ``--address``, else that of Ray's own RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else the one that
runs on this machine. If there is none, a new one is started on this machine. It lives, with its job, only as long as
the command that started it, which therefore follows the job to its end, with or without ``--wait``.

The driver is in ``driver``, a task in ``actor``. This module needs ray only to send the job.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tfps.config.launch_protocol import TOKEN
from tfps.errors import ConfigError, PlatformError
from tfps.jobs.handle import RunningJob, SubmittedJob
from tfps.jobs.spec import Job, Role
from tfps.launchers.base import Launcher
from tfps.launchers.common.yaml_writer import to_yaml
from tfps.launchers.ray import cluster
from tfps.launchers.ray.job import OwnCluster, RayJob
from tfps.text import show
from tfps.timeouts import RAY_DRIVER_STOP_SECS


@dataclass(frozen=True)
class Plan:
    """The request to send: the arguments of Ray's ``submit_job``."""

    job: Job
    request: Mapping[str, Any]
    is_printed_only: ClassVar[bool] = False

    def __str__(self) -> str:
        comment = f"{TOKEN}, if set, is sent in env_vars: whoever sees Ray's dashboard can read it."
        return to_yaml([self.request], comment if self.job.config.serve else "")


class RayLauncher(Launcher[Plan]):
    """Ray's Jobs API."""

    name = "ray"
    features = frozenset({"dashboards", "resources"})

    def plan(self, job: Job) -> Plan:
        """Return the request to send.

        Raises:
            ConfigError: If ``--address`` is not a dashboard's, or Ray would refuse the resources.
        """
        problems = [*_bad_address(job.options.address), *_bad_cpus(job)]
        if problems:
            raise ConfigError(problems)
        roles = [{"name": role.name, "replicas": role.replicas, "bundle": _bundle(role)} for role in job.roles]
        spec = json.dumps({"directory": job.directory, "command": job.command(), "roles": roles})
        driver = shlex.join([job.python, "-m", "tfps.launchers.ray.driver", spec])
        return Plan(
            job,
            {
                "entrypoint": f"cd {shlex.quote(job.directory)} && exec {driver}",
                "metadata": {
                    "job_name": job.name,
                    "num_ps": str(job.ps.replicas),
                    "num_workers": str(job.worker.replicas),
                },
                "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(RAY_DRIVER_STOP_SECS)}},
            },
        )

    def submit(self, plan: Plan) -> SubmittedJob | RunningJob:
        """Submit the job.

        Raises:
            ConfigError: If the cluster can never hold the job, or a job of this name runs there.
            PlatformError: If ray is not installed, or the cluster does not answer, or does not take the job.
        """
        bundles = {role.name: (role.replicas, _bundle(role)) for role in plan.job.roles}
        client = cluster.find(plan.job.options.address)
        own = client is None
        client = client or cluster.start(bundles)
        with cluster.words():
            cluster.check_room(client, bundles)
            cluster.check_name(client, plan.job.name)
            job = RayJob(client, client.submit_job(**with_token(plan)))
        return OwnCluster(job) if own else job

    def find(self, job_id: str) -> SubmittedJob:
        """Return the job of a handle; ``job_id`` is its part after ``ray:``, ``ID`` or ``ID@host:port``.

        Raises:
            ConfigError: If ``job_id`` has another form.
            PlatformError: If ray is not installed, or there is no such cluster.
        """
        name, at, address = job_id.partition("@")
        if not re.fullmatch(r"[\w.-]+", name) or _bad_address(address if at else None):
            raise ConfigError(
                f"ray:{show(job_id)} is not a job handle: tfps submit --to=ray prints it, ray:ID@host:port."
            )
        client = cluster.find(address or None)
        if client is None:
            raise PlatformError(
                "no Ray runs on this machine: give the handle with the cluster's address, ray:ID@host:port."
            )
        return RayJob(client, name)


def with_token(plan: Plan) -> Mapping[str, Any]:
    """Return the request with the secret of a service, which is not printed; Ray shows it on its dashboard."""
    if not plan.job.config.serve or not os.environ.get(TOKEN):
        return plan.request
    variables = {**plan.request["runtime_env"]["env_vars"], TOKEN: os.environ[TOKEN]}
    return {**plan.request, "runtime_env": {"env_vars": variables}}


def _bad_address(address: str | None) -> list[str]:
    if address is None or re.fullmatch(r"(https?://)?(\[[0-9a-fA-F:]+\]|[\w.-]+)(:[0-9]{1,5})?(/[\w./-]*)?", address):
        return []
    return [f"--address={show(address)} is not the address of a Ray dashboard: give http://host:8265."]


def _bad_cpus(job: Job) -> list[str]:
    asked = {f"{role.name}_cpu": role.cpu for role in job.roles if role.cpu is not None}
    return [
        f"--{flag}={cpu:g}: Ray counts whole cores, or less than one in steps of 0.0001: give {max(round(cpu), 1)}."
        for flag, cpu in asked.items()
        if cpu < 0.0001 or (cpu > 1 and cpu != int(cpu))
    ]


def _bundle(role: Role) -> dict[str, float]:
    """Return the resources that a task of a role takes from its node; Ray's unit of memory is the byte."""
    cpu = 1 if role.cpu is None else int(role.cpu) if role.cpu == int(role.cpu) else role.cpu
    asked = {"CPU": cpu, "GPU": role.gpu, "memory": role.memory_bytes}
    return {name: amount for name, amount in asked.items() if amount is not None}
