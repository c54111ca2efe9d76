"""A job as it is handed to a platform: a name, what each task runs, and what each role asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfps.cluster.resolver import Task
from tfps.config.job_config import JobConfig

RESOURCES = frozenset(
    {"ps_cpu", "ps_memory", "worker_cpu", "worker_memory", "worker_gpu"}
)  # flags, for Launcher.options
PATIENCE_SECS = 600.0  # tasks may wait long for their machines, each for its own
MOST_RESTARTS = 10  # of each task, in its own container or on its own host
KILLED = (137, 143, 255)  # exit codes of a task that was killed with what starts it again, or told to stop, or so lost
PORT = 2222  # where a task has an address of its own, Kubeflow's tfjob-port


@dataclass(frozen=True)
class Role:
    """The tasks of one job name, all alike.

    Attributes:
        name: ``ps`` or ``worker``.
        replicas: How many tasks.
        cpu: Processor cores of each, ``None`` if nothing was asked for; so for the others.
        memory_bytes: Memory of each, in bytes.
        gpu: GPUs of each.
    """

    name: str
    replicas: int
    cpu: float | None = None
    memory_bytes: int | None = None
    gpu: int | None = None

    def tasks(self) -> tuple[Task, ...]:
        """Return the role's tasks."""
        return tuple(Task(self.name, index) for index in range(self.replicas))


@dataclass(frozen=True)
class Job:
    """What a launcher plans.

    Attributes:
        name: Up to 40 of a-z, 0-9 and ``-``: fit for any platform.
        config: What the user asked for.
        model_source: What is in the file, if ``--model`` is one of this machine's; given to containers only.
        python: The interpreter that the tasks run.
        directory: Where they run, on platforms that share this machine's files.
    """

    name: str
    config: JobConfig
    model_source: str | None = None
    python: str = "python"
    directory: str = "."

    @property
    def ps(self) -> Role:
        """The parameter servers; never with a GPU."""
        return Role("ps", self.config.num_ps or 1, self.config.ps_cpu, self.config.ps_memory)

    @property
    def worker(self) -> Role:
        """The workers."""
        config = self.config
        gpu = config.worker_gpu or None
        return Role("worker", config.num_workers or 2, config.worker_cpu, config.worker_memory, gpu)

    @property
    def roles(self) -> tuple[Role, Role]:
        """Both, the parameter servers first."""
        return self.ps, self.worker

    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, the parameter servers first."""
        return self.ps.tasks() + self.worker.tasks()

    def command(self, **changes: Any) -> Sequence[str]:
        """Return a task's command, ``changes`` being fields of its config; it starts the task again by itself."""
        asked = self.config.max_restarts
        given = {
            "start_timeout_secs": self.config.start_timeout_secs or PATIENCE_SECS,
            "max_restarts": MOST_RESTARTS if asked is None else asked,
        }
        return self.python, "-m", "tfps", "run", *self.config.for_task(**{**given, **changes}).to_argv()
