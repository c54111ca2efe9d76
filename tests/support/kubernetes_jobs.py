"""What the tests of the Kubernetes platforms share: two jobs, their plans, and what is in them."""

import dataclasses
from typing import Any

import yaml
from support import jobs
from support.jobs import job_of
from support.processes import ECHO, NASTY

from tfps.jobs.spec import Job
from tfps.launchers.base import Plan
from tfps.launchers.registry import LAUNCHERS

Object = dict[str, Any]

PLATFORMS = ("kubernetes", "tfjob", "volcano", "jobset")
SMALL = job_of("mnist", model="mnist", num_ps=1, num_workers=2)
FULL = job_of(
    "full",
    ECHO,
    num_ps=2,
    num_workers=3,
    ps_cpu=2.5,
    ps_memory=6 * 2**30,
    worker_cpu=8,
    worker_memory=500_000_000,
    worker_gpu=8,
    image="registry.example:5000/team/tfps:1e3",
    volumes="team-data:/data:ro,/mnt/out:/out",
    namespace="team",
    model='./models/my "model" $(id).py',
    data_dir=f"/data/{NASTY}",
    model_dir=f"/out/{NASTY}",
    mode="sync",
    start_timeout_secs=120.0,
)


SERVICE = job_of(
    "service",
    model="service",
    serve=True,
    num_ps=2,
    optimizer="adam",
    max_steps=100,
    ps_cpu=2,
    ps_memory=4 * 2**30,
    token_secret="team-token",
)


def changed(job: Job, source: str | None = None, **flags: Any) -> Job:
    """Return a job with some flags, and its model's file, changed."""
    return dataclasses.replace(jobs.changed(job, **flags), model_source=source)


def plan_of(platform: str, job: Job) -> Plan:
    """Return a platform's plan of a job."""
    return LAUNCHERS.load(platform).plan(job)


def objects_of(platform: str, job: Job) -> list[Object]:
    """Return the objects of a platform's plan of a job, as a YAML reader reads them."""
    return list(yaml.safe_load_all(str(plan_of(platform, job))))


def kind_of(platform: str, job: Job, kind: str, name: str | None = None) -> Object:
    """Return the object of a kind, and with a name, in a plan."""
    [found] = [
        one for one in objects_of(platform, job) if one["kind"] == kind and name in (None, one["metadata"]["name"])
    ]
    return found


def templates(platform: str, job: Job) -> dict[str, Object]:
    """Return the pod templates of a plan, by role."""
    found: dict[str, Object] = {}

    def look(value: Any) -> None:
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(inner, dict) and "containers" in inner.get("spec", {}):
                found[inner["metadata"]["labels"]["app.kubernetes.io/component"]] = inner
            look(inner)

    look(objects_of(platform, job))
    return found
