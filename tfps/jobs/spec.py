"""A job as a platform gets it: a name, the command of each task, and the resources of each role."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfps.cluster.spec import Task
from tfps.config.command_options import SubmitOptions
from tfps.config.job_config import JobConfig

START_TIMEOUT_SECS = 600.0  # tasks may wait long for their machines, each for a different one
MAX_RESTARTS = 10  # per task, in its own container or on its own host
KILLED = (137, 143, 255)  # exit codes of a task that was killed with its supervisor, or asked to stop, or lost that way
PORT = 2222  # used where each task has its own address; Kubeflow's tfjob-port


@dataclass(frozen=True)
class Role:
    """The tasks of one job name, all alike.

    Attributes:
        name: ``ps`` or ``worker``.
        replicas: Number of tasks.
        cpu: Processor cores of each task; ``None``, here and below, if not requested.
        memory_bytes: Memory of each task, in bytes.
        gpu: GPUs of each task.
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
    """The job that a launcher plans.

    Attributes:
        name: Up to 40 of a-z, 0-9 and ``-``: valid on any platform.
        config: The config that the user gave.
        options: What the platform is asked for.
        model_source: The text of the model's file, if ``--model`` is one on this machine; for containers only. Bytes
            that are not UTF-8 are surrogates, as in ``os.fsdecode``.
        python: The interpreter that the tasks run.
        directory: The tasks' working directory, on platforms that share this machine's files.
    """

    name: str
    config: JobConfig
    options: SubmitOptions = field(default_factory=SubmitOptions)
    model_source: str | None = None
    python: str = "python"
    directory: str = "."

    @property
    def ps(self) -> Role:
        """The parameter servers, which never get a GPU; a job in a mode without has none."""
        return Role(
            "ps", 1 if self.config.num_ps is None else self.config.num_ps, self.options.ps_cpu, self.options.ps_memory
        )

    @property
    def worker(self) -> Role:
        """The workers; a parameter service has none."""
        options = self.options
        gpu = options.worker_gpu or None
        replicas = 0 if self.config.serve else self.config.num_workers or 2  # a service's are its clients
        return Role("worker", replicas, options.worker_cpu, options.worker_memory, gpu)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that have tasks, the parameter servers first."""
        return tuple(role for role in (self.ps, self.worker) if role.replicas)

    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, the parameter servers first."""
        return self.ps.tasks() + self.worker.tasks()

    def command(self, **changes: Any) -> Sequence[str]:
        """Return a task's command, with ``changes`` to its config; the command also restarts a lost task."""
        asked = self.config.max_restarts
        given = {
            "start_timeout_secs": self.config.start_timeout_secs or START_TIMEOUT_SECS,
            "max_restarts": MAX_RESTARTS if asked is None else asked,
        }
        return self.python, "-m", "tfps", "run", *self.config.for_task(**{**given, **changes}).to_argv()
