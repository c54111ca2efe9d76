"""What a launcher is: it makes a pure plan of a job, submits the plan, and finds the job again by its handle.

A launcher is stateless: the registry makes one of its class, without arguments, for a command. A launcher never imports
TensorFlow or the runtime: its tasks run ``job.command()``, which is ``python -m tfps run`` with the job's flags. That
command starts a lost task again; a platform's own retries are for containers that were killed and nodes that were lost.
"""

import abc
from typing import ClassVar, Generic, Protocol, TypeVar

from tfps.jobs.handle import RunningJob, SubmittedJob
from tfps.jobs.spec import Job


class Plan(Protocol):
    """All that a launcher will do with a job, as data.

    ``str(plan)`` is what ``--dry_run`` prints, and all that is sent.

    Example::

        @dataclass(frozen=True)
        class ScriptPlan:
            job: Job
            is_printed_only: ClassVar[bool] = False

            def __str__(self) -> str:
                return f"exec {shlex.join(self.job.command())}"
    """

    @property
    def is_printed_only(self) -> bool:
        """Whether nothing is sent: ``tfps submit`` prints the plan for people who act on it themselves."""

    def __str__(self) -> str:
        """Return the script or manifest."""


PlanT = TypeVar("PlanT", bound=Plan)


class Launcher(abc.ABC, Generic[PlanT]):
    """A platform that jobs are submitted to.

    Attributes:
        name: The platform's name: the value of ``--to``, and what a handle ``NAME:ID`` begins with.
        options: The flags of ``tfps submit`` it understands, beside those that every platform does. Others are refused.
        shares_files: Whether tasks see the submitter's files under the same paths. If not, the tasks run in containers,
            and the plan holds what is in the model's file (``job.model_source``).

    Example::

        class EchoLauncher(Launcher[ScriptPlan]):
            name = "echo"
            options = frozenset({"queue"})

            def plan(self, job: Job) -> ScriptPlan:
                return ScriptPlan(job)

            def submit(self, plan: ScriptPlan) -> SubmittedJob:
                return EchoJob(client.run_client(["echo-submit"], given=str(plan)).strip())

            def find(self, job_id: str) -> SubmittedJob:
                return EchoJob(job_id)

    A distribution offers it with the entry point ``echo = my_package:EchoLauncher`` of the group ``tfps.launchers``.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    shares_files: ClassVar[bool] = True

    @abc.abstractmethod
    def plan(self, job: Job) -> PlanT:
        """Return the plan of a job. Pure: it asks nothing of the platform, and the same job gives the same text.

        Args:
            job: The job; its config is checked as far as that is the same for every platform.

        Raises:
            ConfigError: If a flag has a value that the platform would refuse. Holds every problem.
        """

    @abc.abstractmethod
    def submit(self, plan: PlanT) -> SubmittedJob | RunningJob:
        """Send a plan, all of it or nothing.

        Args:
            plan: One of this launcher's own.

        Returns:
            The job on its platform, or one that lasts only as long as this process.

        Raises:
            ConfigError: If a flag asks for what the platform does not have.
            PlatformError: If the platform does not answer, or refuses the job, in its own words.
        """

    @abc.abstractmethod
    def find(self, job_id: str) -> SubmittedJob:
        """Return the job of a handle ``NAME:JOB_ID``. Does not ask the platform for it yet.

        Args:
            job_id: What comes after the platform's name and the colon.

        Raises:
            ConfigError: If no job of this platform has such an id.
            PlatformError: If the platform's client is not installed.
        """
