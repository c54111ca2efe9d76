"""The contract of a launcher: it makes a pure plan of a job, submits the plan, and finds the job again by its handle.

A launcher is stateless: for each command, the registry creates one from its class, without arguments. It never imports
TensorFlow or the runtime: its tasks run ``job.command()``, which is ``python -m tfps run`` with the job's flags. That
command restarts a lost task; a platform's own retries are for killed containers and lost nodes.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from tfps.jobs.handle import RunningJob, SubmittedJob
from tfps.jobs.spec import Job


class Plan(Protocol):
    """Everything that a launcher will do with a job, as data.

    ``str(plan)`` is the text that ``--dry_run`` prints, and everything that is sent.

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
        """Whether nothing is sent: ``tfps submit`` prints the plan, and people act on it themselves."""

    def __str__(self) -> str:
        """Return the script or manifest."""


@dataclass(frozen=True)
class ClientAddresses:
    """Where the clients of a parameter service reach its servers.

    Attributes:
        hosts: The addresses of the servers, by index.
        where: Who can use them, to complete ``for clients ...``.
    """

    hosts: Sequence[str]
    where: str


PlanT = TypeVar("PlanT", bound=Plan)


class Launcher(abc.ABC, Generic[PlanT]):
    """A platform that accepts jobs.

    Attributes:
        name: The platform's name: the value of ``--to``, and the first part of a handle ``NAME:ID``.
        features: What it has: it accepts the flags whose field names one of these (``Option.feature``), beside those of
            every platform. Others are refused.
        shares_files: Whether tasks see the submitter's files under the same paths. If not, the tasks run in containers,
            and the plan holds the text of the model's file (``job.model_source``).

    Example, with the ``ScriptPlan`` above::

        class EchoJob(SubmittedJob):
            def __init__(self, job_id: str) -> None:
                self._id = job_id

            @property
            def handle(self) -> str:
                return f"echo:{self._id}"

            def status(self) -> Status:
                return Status(client.run_client(["echo-status", self._id]).strip())

            def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
                yield from ()

            def cancel(self) -> None:
                client.run_client(["echo-cancel", self._id])


        class EchoLauncher(Launcher[ScriptPlan]):
            name = "echo"
            features = frozenset({"queues"})

            def plan(self, job: Job) -> ScriptPlan:
                return ScriptPlan(job)

            def submit(self, plan: ScriptPlan) -> SubmittedJob:
                return EchoJob(client.run_client(["echo-submit"], given=str(plan)).strip())

            def find(self, job_id: str) -> SubmittedJob:
                return EchoJob(job_id)

    ``client`` is ``tfps.launchers.common.client``; ``SubmittedJob`` and ``Status`` are in ``tfps.jobs.handle``. A
    distribution offers it with the entry point ``echo = my_package:EchoLauncher`` of the group ``tfps.launchers``.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset()
    shares_files: ClassVar[bool] = True

    @abc.abstractmethod
    def plan(self, job: Job) -> PlanT:
        """Return the plan of a job. Pure: it does not ask the platform, and the same job gives the same text.

        Args:
            job: The job; its config has passed the checks that are the same for every platform.

        Raises:
            ConfigError: If the platform would refuse the value of a flag. Holds every problem.
        """

    def check_files(self, plan: PlanT) -> None:
        """Check the files of this machine that a plan takes to the platform, for ``--dry_run`` too; by default nothing.

        Args:
            plan: A plan made by this launcher.

        Raises:
            DataError: If one is missing or damaged.
        """

    def client_addresses(self, plan: PlanT) -> ClientAddresses | None:
        """Return the addresses of a service's servers; ``None``, the default, if only its tasks learn them.

        Args:
            plan: A plan, made by this launcher, of a job with ``config.serve``.
        """
        del plan
        return None

    @abc.abstractmethod
    def submit(self, plan: PlanT) -> SubmittedJob | RunningJob:
        """Submit a plan, all of it or nothing.

        Args:
            plan: A plan made by this launcher.

        Returns:
            The job on its platform, or one that lasts only as long as this process.

        Raises:
            ConfigError: If a flag requests something that the platform does not have.
            PlatformError: If the platform does not answer, or refuses the job; in the platform's words.
        """

    @abc.abstractmethod
    def find(self, job_id: str) -> SubmittedJob:
        """Return the job of a handle ``NAME:JOB_ID``. Does not ask the platform about it yet.

        Args:
            job_id: The part of the handle after the platform's name and the colon.

        Raises:
            ConfigError: If ``job_id`` is not valid on this platform.
            PlatformError: If the platform's client is not installed.
        """
