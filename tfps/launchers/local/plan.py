"""The tasks of a job on this machine, and the command of each."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig


@dataclass(frozen=True)
class Plan:
    """The tasks of a job and the arguments of ``tfps run`` for each."""

    config: JobConfig
    commands: Mapping[Task, Sequence[str]]
    is_printed_only: ClassVar[bool] = False

    def __str__(self) -> str:
        return "\n".join(shlex.join(["tfps", "run", *argv]) for argv in self.commands.values())
