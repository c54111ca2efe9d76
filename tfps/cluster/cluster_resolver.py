"""The contract of a cluster resolver: it reads the cluster, and this process's task in it, from the environment.

Each platform that tells this to its tasks has a resolver; ``resolver.RESOLVERS`` is the table. A resolver is pure: it
opens no socket and makes no name lookups, except in ``locate``. Must not import TensorFlow.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from tfps.cluster.spec import Cluster

FIELDS = ("ps_hosts", "worker_hosts", "job_name", "task_index")


@dataclasses.dataclass(frozen=True)
class PartialSpec:
    """What one source gives of the cluster and of this process's task in it, under the names of the flags.

    Attributes:
        ps_hosts: The addresses of the parameter servers; here and below, ``None`` if the source does not give them.
        worker_hosts: The addresses of the workers.
        job_name: This task's job.
        task_index: This task's index in its job.
        note: How the source itself names this task, for messages.
        num_chiefs: How many of the workers the source counts apart from them, so that its indices start later.
        faulty: The values that are ``None`` because the source gives them wrongly, which is reported already.
    """

    ps_hosts: tuple[str, ...] | None = None
    worker_hosts: tuple[str, ...] | None = None
    job_name: str | None = None
    task_index: int | None = None
    note: str = ""
    num_chiefs: int = 0
    faulty: frozenset[str] = frozenset()


class ClusterResolver(abc.ABC):
    """Reads the cluster, and this process's task in it, from the environment of a platform.

    Attributes:
        source: The name of what it reads, for messages.
        variable: The environment variable that is set where the platform gives a cluster.
        hint: How a user makes the platform give a cluster, for the message that there is none.
        yields_to_flags: Whether it is ignored if ``--ps_hosts`` or ``--worker_hosts`` is given. If not, flags complete
            what it gives and must not contradict it.
        port_flag: The flag that sets the ports of its tasks; empty if the addresses have them.
    """

    source: ClassVar[str]
    variable: ClassVar[str]
    hint: ClassVar[str]
    yields_to_flags: ClassVar[bool] = False
    port_flag: ClassVar[str] = ""

    @abc.abstractmethod
    def is_present(self, env: Mapping[str, str]) -> bool:
        """Return whether the environment gives a cluster."""

    @abc.abstractmethod
    def resolve(
        self, env: Mapping[str, str], flags: PartialSpec, num_ps: int | None, problems: list[str]
    ) -> PartialSpec:
        """Return what the environment gives. Called only if ``is_present``.

        Args:
            env: The environment.
            flags: What the flags give; ``worker_hosts`` is empty if all tasks are parameter servers.
            num_ps: The flag's value, for a platform that does not tell a PS from a worker; 0 if the job has no PS.
            problems: Gets a line for each problem with the environment.
        """

    def place(self, name: str) -> str:
        """Return where a user finds a value, by the name of its flag."""
        del name
        return self.source

    def fix(self, place: str) -> str:
        """Return how a user corrects a value, given where it is found."""
        return f"correct {place}"

    def missing(self, name: str) -> str:
        """Return the message that the environment does not give a value, by the name of its flag."""
        return f"{self.source} has no {name}"

    def note_on_absence(self, env: Mapping[str, str]) -> str:
        """Return a sentence for a user who may believe that the platform gives a cluster; empty if there is none."""
        del env
        return ""

    def locate(self, cluster: Cluster, port_base: int | None, env: Mapping[str, str]) -> Cluster:
        """Return a resolved cluster with addresses that can be reached; may ask the platform and the name service."""
        del port_base, env
        return cluster
