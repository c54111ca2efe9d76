"""The cluster: its tasks and their addresses, as values. Must not import TensorFlow."""

import dataclasses
import re

from tfps.errors import ConfigError
from tfps.text import show

JOBS = ("ps", "worker", "evaluator")


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
        """Return the argument for ``tf.train.ClusterSpec``."""
        return {"ps": list(self.ps), "worker": list(self.workers)}


def hosts_flags(cluster: Cluster) -> tuple[str, str]:
    """Return the two flags that define the cluster."""
    return f"--ps_hosts={','.join(cluster.ps)}", f"--worker_hosts={','.join(cluster.workers)}"
