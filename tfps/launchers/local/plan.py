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

    def holds_state(self, task: Task) -> bool:
        """Return whether the job restarts from a checkpoint if a task is lost: a PS, or the chief of a job without."""
        return task.job == "ps" or (task.is_chief and self.config.num_ps == 0)

    @property
    def why_recalled(self) -> str:
        """Why a worker that is done starts again, after the loss of what held the job's state."""
        return f"with the {'chief' if self.config.num_ps == 0 else 'PS'} that was lost"
