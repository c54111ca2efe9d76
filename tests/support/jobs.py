"""Jobs of tests, made of flags as ``tfps submit`` makes them."""

import dataclasses
from typing import Any

from tfps.config.command_options import SubmitOptions
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.jobs.spec import Job


def job_of(
    name: str = "job", model_source: str | None = None, python: str = "python", at: str = ".", **flags: Any
) -> Job:
    """Return a job with flags; ``at`` is its directory."""
    return changed(Job(name, JobConfig(), SubmitOptions(), model_source, python, at), **flags)


def changed(job: Job, **flags: Any) -> Job:
    """Return a job with some flags changed."""
    of_job = {name: value for name, value in flags.items() if name in OPTIONS}
    of_platform = {name: value for name, value in flags.items() if name not in OPTIONS}
    options = dataclasses.replace(job.options, **of_platform)
    return dataclasses.replace(job, config=job.config.replace(**of_job), options=options)
