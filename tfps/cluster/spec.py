"""The cluster: its tasks and their addresses, as values. Must not import TensorFlow."""

import dataclasses
import re

from tfps.errors import ConfigError
from tfps.text import show

JOBS = ("ps", "worker", "evaluator")

STATE_OF_CHIEF = "chief/0"
"""The part of a chief without PS that holds what a PS would hold, named like a task."""
DEVICE_OF_STATE = "/job:worker/replica:0/task:0/device:CPU:0"
"""The device of ``STATE_OF_CHIEF``: one of the chief, by its full name.

The chief's work as a worker has the short name, ``Task.device``. So a graph tells the two apart.
"""


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of a cluster; ``str(task)`` looks like ``worker/0``."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}/{self.index}"

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which initializes and saves the variables."""
        return self.job == "worker" and self.index == 0

    @property
    def device(self) -> str:
        """TensorFlow's device name of the task, like ``/job:worker/task:0``."""
        return f"/job:{self.job}/task:{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Parse ``worker:1`` or ``worker/1``.

        Raises:
            ConfigError: If the text has neither form.
        """
        match = re.fullmatch(rf"({'|'.join(JOBS)})[:/](0|[1-9][0-9]{{0,8}})", text)
        if not match:
            raise ConfigError(f"{show(text)} is not a task: write job:index, like worker:0 (jobs: {', '.join(JOBS)}).")
        return cls(match[1], int(match[2]))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses (``host:port``) of the parameter servers and workers, by task index."""

    ps: tuple[str, ...]
    workers: tuple[str, ...]

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.ps)

    @property
    def state_tasks(self) -> tuple[Task, ...]:
        """The tasks that hold the variables and the job's state: the PS, or the chief if there is none."""
        return tuple(Task("ps", index) for index in range(self.num_ps)) or (Task("worker", 0),)

    @property
    def state_devices(self) -> tuple[str, ...]:
        """TensorFlow's device name of each of the ``state_tasks``, for what it holds."""
        return state_devices(self.num_ps)

    @property
    def state_holder(self) -> str:
        """What holds the variables and the job's state, for messages."""
        return "a PS" if self.ps else "the chief"

    @property
    def num_workers(self) -> int:
        """The number of workers, including the chief."""
        return len(self.workers)

    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, parameter servers first."""
        return tuple(Task(job, index) for job, hosts in self.spec().items() for index in range(len(hosts)))

    def address(self, task: Task) -> str:
        """Return the address of a PS or a worker; an evaluator has none and raises ``KeyError``."""
        return {"ps": self.ps, "worker": self.workers}[task.job][task.index]

    def spec(self) -> dict[str, list[str]]:
        """Return the argument for ``tf.train.ClusterSpec``: the addresses by job, without a job that has no task."""
        return {job: list(hosts) for job, hosts in (("ps", self.ps), ("worker", self.workers)) if hosts}


def state_devices(num_ps: int) -> tuple[str, ...]:
    """Return TensorFlow's device names of what holds the state of a job: its PS, or the chief's part if it has none."""
    return tuple(Task("ps", index).device for index in range(num_ps)) or (DEVICE_OF_STATE,)


def hosts_flags(cluster: Cluster) -> tuple[str, ...]:
    """Return the flags that define the cluster."""
    return tuple(f"--{job}_hosts={','.join(hosts)}" for job, hosts in cluster.spec().items())
