"""Parts that the container platforms share: the image, the mounts, and the paths of the job's files inside."""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import tfps
from tfps.config.command_options import SubmitOptions
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.jobs.spec import Job
from tfps.text import show

HOME = "/tfps"  # a directory of the image for the files that jobs leave
MODEL_DIR = "/opt/model"  # mount point of the user's model file


@dataclass(frozen=True)
class Volume:
    """A mount of every container: ``source`` is a volume's name, or a path of the host."""

    source: str
    target: str
    read_only: bool = False

    @property
    def on_host(self) -> bool:
        """Whether the source is a path of the host."""
        return self.source.startswith("/")

    def holds(self, path: str) -> bool:
        """Return whether a path in the containers is on this volume."""
        return PurePosixPath(posixpath.normpath(path)).is_relative_to(self.target)


def image(options: SubmitOptions) -> str:
    """Return the image that the tasks run."""
    return options.image or f"tfps:{tfps.__version__}"


def volumes(options: SubmitOptions) -> Sequence[Volume]:
    """Return the volumes that ``--volumes`` lists.

    Raises:
        ConfigError: If a part of it is not ``NAME:/path`` or ``/host/path:/path``, with or without ``:ro``; or if two
            have the same path.
    """
    text = f"tfps:{HOME}" if options.volumes is None else options.volumes
    found = [_volume(part) for part in text.split(",")]
    targets = [volume.target for volume in found]
    for target in targets:
        if targets.count(target) > 1:
            raise ConfigError(f"--volumes={show(text)} mounts two volumes at {show(target)}: drop one.")
    return found


def _volume(text: str) -> Volume:
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_.-]*|/[^:]*):(/[^:]+)(:ro|:rw)?", text)
    if not match or ".." in PurePosixPath(match[2]).parts:
        raise ConfigError(
            f"--volumes: {show(text)} is not NAME:/path or /host/path:/path, absolute paths, with :ro to only read."
        )
    return Volume(match[1], str(PurePosixPath(match[2])), match[3] == ":ro")


def task_config(job: Job) -> JobConfig:
    """Return the job's config with the paths of its files in the containers.

    Raises:
        ConfigError: If ``--model_dir`` is not absolute, or is on no writable volume.
    """
    config = job.config
    model_dir = config.model_dir or str(PurePosixPath(_first_writable(job.options).target) / job.name)
    if not PurePosixPath(model_dir).is_absolute():
        raise ConfigError(
            f"--model_dir={show(model_dir)} is no path in the containers: give an absolute one on a volume, like "
            f"{_first_writable(job.options).target}/{PurePosixPath(model_dir).name}, or leave it out."
        )
    if not any(volume.holds(model_dir) and not volume.read_only for volume in volumes(job.options)):
        if all(volume.read_only for volume in volumes(job.options)):
            raise ConfigError("--volumes: each can only be read, and the job needs one to write to: add NAME:/path.")
        raise ConfigError(
            f"--model_dir={show(model_dir)} is on no volume, so what the job leaves there would be lost: "
            f"give --volumes=NAME:{show(model_dir)}, or leave --model_dir out."
        )
    return config.replace(model=model_path(job), model_dir=model_dir)


def model_path(job: Job) -> str:
    """Return ``--model`` for the containers: the mounted path, if the model is a file of the user's."""
    model = job.config.model
    return model if job.model_source is None else f"{MODEL_DIR}/{PurePosixPath(model).name}"


def model_problems(job: Job) -> list[str]:
    """Return the problem with ``--volumes`` if a volume is where the model's file goes."""
    if job.model_source is None or all(volume.target != MODEL_DIR for volume in volumes(job.options)):
        return []
    return [f"--volumes mounts {MODEL_DIR}, where the model's file goes: mount it elsewhere."]


def _first_writable(options: SubmitOptions) -> Volume:
    found = volumes(options)
    return next((volume for volume in found if not volume.read_only), found[0])
