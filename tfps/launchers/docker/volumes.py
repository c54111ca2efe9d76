"""The mounts of a job's containers: the user's volumes, the model's file, and a data directory of this machine."""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from tfps.errors import ConfigError
from tfps.jobs.spec import Job
from tfps.launchers.common import containers
from tfps.launchers.common.containers import HOME, Volume
from tfps.launchers.docker.job import ask_docker
from tfps.text import show

DATA_DIR = "/opt/data"  # mount point of a directory of this machine


def data_of_this_machine(job: Job) -> str:
    """Return the absolute path of a ``--data_dir`` that is on no volume, else an empty string.

    Raises:
        ConfigError: If the containers could not reach it, or Docker would refuse a volume.
    """
    data_dir, found = job.config.data_dir, containers.volumes(job.options)
    on_volume = not data_dir or "://" in data_dir or any(volume.holds(data_dir) for volume in found)
    here = "" if on_volume else posixpath.normpath(posixpath.join(job.directory, data_dir))
    _check(job, found, here)
    return here


def _check(job: Job, found: Sequence[Volume], data_of_host: str) -> None:
    problems = [
        f"--volumes: {volume.source} is too short for Docker: give a name of at least two characters."
        for volume in found
        if len(volume.source) == 1 and not volume.on_host
    ]
    problems += containers.model_problems(job)
    if data_of_host and any(volume.target == DATA_DIR for volume in found):
        problems.append(f"--volumes mounts {DATA_DIR}, where --data_dir goes: mount it elsewhere.")
    if "://" in job.config.data_dir and not job.config.data_dir.startswith("file://"):
        problems.append(
            f"--data_dir={show(job.config.data_dir)} cannot be reached, as the containers' network is internal: copy "
            "the data to a directory of this machine, or to a volume of --volumes."
        )
    if problems:
        raise ConfigError(problems)


def of_files(job: Job, data_dir: str) -> Sequence[Volume]:
    """Return the mounts of the job's own files from this machine."""
    model = posixpath.join(job.directory, job.config.model)
    source = [] if job.model_source is None else [Volume(model, containers.model_path(job), read_only=True)]
    return [*source, *([Volume(data_dir, DATA_DIR, read_only=True)] if data_dir else [])]


def mount(volume: Volume) -> Mapping[str, Any]:
    """Return a mount as a Compose file has it."""
    kind = "bind" if volume.on_host else "volume"
    made = {"type": kind, "source": volume.source, "target": volume.target}
    return {**made, "read_only": True} if volume.read_only else made


def owner_commands(job: Job) -> Sequence[Sequence[str]]:
    """Return Docker commands that each create a container, and thereby give an empty volume to the image's user.

    Docker gives an empty volume the owner of the image's directory where the volume is mounted, but root if the image
    has none there. So each volume to write to is mounted once where the image has a directory.
    """
    found = containers.volumes(job.options)
    names = [one.source for one in found if not (one.on_host or one.read_only or one.target == HOME)]
    image = containers.image(job.options)
    return [("create", f"--volume={name}:{HOME}", image, "true") for name in dict.fromkeys(names)]


def give_owner(job: Job) -> None:
    """Give the job's volumes that are empty to the image's user.

    Raises:
        PlatformError: If Docker refuses.
    """
    for command in owner_commands(job):
        ask_docker("rm", ask_docker(*command).strip())
