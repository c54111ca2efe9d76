"""The mounts of a job's containers: the user's volumes, the model's file, and a data directory of this machine."""

import contextlib
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tfps.errors import ConfigError, PlatformError
from tfps.jobs.spec import Job
from tfps.launchers.common import containers
from tfps.launchers.common.containers import HOME, Volume
from tfps.launchers.docker.job import ask_docker
from tfps.text import show

DATA_DIR = "/opt/data"  # mount point of a directory of this machine

_FOR = "tfps.volumes_of"  # the label of a container that only gives a volume its owner


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
    """Return a mount as a Compose file has it.

    Docker gives an empty volume the files and the owner of the image's directory where it is mounted, which may be
    root. At ``HOME`` that is what tasks need; elsewhere the volume stays as ``make`` leaves it.
    """
    kind = "bind" if volume.on_host else "volume"
    made: dict[str, Any] = {"type": kind, "source": volume.source, "target": volume.target}
    if volume.read_only:
        made["read_only"] = True
    if not volume.on_host and volume.target != HOME:
        made["volume"] = {"nocopy": True}
    return made


def declared(mounted: Sequence[Volume]) -> Mapping[str, Any]:
    """Return the volumes of a Compose file, which only uses them: Compose creates, compares and deletes none."""
    return {volume.source: {"name": volume.source, "external": True} for volume in mounted if not volume.on_host}


def commands(job: Job) -> Sequence[str]:
    """Return the shell commands that do what ``make`` does, for whoever has only the Compose file."""
    to_own = _to_own(job)
    plain = [f"docker volume create {name}" for name in _names(job) if name not in to_own]
    owners = (shlex.join(["docker", "create", *_owner(job, name)]) for name in to_own)
    return [*plain, *(f"docker rm --volumes $({owner})" for owner in owners)]


def make(job: Job) -> None:
    """Create the job's volumes that are not there, and give empty ones to the image's user.

    Raises:
        PlatformError: If Docker refuses.
    """
    for name in _names(job):
        if not _exists(name):
            ask_docker("volume", "create", name)
    if to_own := _to_own(job):
        _give_owner(job, to_own)


def _give_owner(job: Job, names: Sequence[str]) -> None:
    mark = f"{_FOR}={job.name}"
    try:
        for name in names:
            with contextlib.suppress(PlatformError):  # a volume's file system may have owners of its own, like NFS
                ask_docker("create", f"--label={mark}", *_owner(job, name))
    finally:  # also what was left by a submission that was killed
        if made := ask_docker("ps", "--all", "--quiet", f"--filter=label={mark}").split():
            ask_docker("rm", "--force", "--volumes", *made)  # only volumes without a name


def _owner(job: Job, name: str) -> Sequence[str]:
    """Return what ``docker create`` takes to give an empty volume to the image's user.

    Docker gives an empty volume the owner of the image's directory where the volume is mounted, but root if the image
    has none there. So each volume to write to is mounted once where the image has a directory.
    """
    return f"--volume={name}:{HOME}", containers.image(job.options), "true"


def _names(job: Job) -> Sequence[str]:
    return list(dict.fromkeys(one.source for one in containers.volumes(job.options) if not one.on_host))


def _to_own(job: Job) -> Sequence[str]:
    """Return the names of the volumes that tasks write to, but those that are mounted where they get an owner."""
    found = [one for one in containers.volumes(job.options) if not (one.on_host or one.read_only)]
    at_home = {one.source for one in found if one.target == HOME}
    return list(dict.fromkeys(one.source for one in found if one.source not in at_home))


def _exists(name: str) -> bool:
    try:
        ask_docker("volume", "inspect", name)
    except PlatformError:
        return False
    return True
