"""The common base of the Kubernetes launchers: a plan is objects, kubectl creates them, labels find them."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from tfps.jobs.spec import Job, Role
from tfps.launchers.base import ClientAddresses, Launcher
from tfps.launchers.kubernetes import kubectl, manifests
from tfps.launchers.kubernetes.comment import comment_of
from tfps.launchers.kubernetes.kubectl import KubeJob
from tfps.launchers.kubernetes.manifests import Object, Plan


class KubernetesLauncher(Launcher[Plan]):
    """A kind of job on Kubernetes. A subclass defines the objects of a job, and reads their state back.

    Attributes:
        resource: The name that kubectl uses for the objects that run the tasks.
        why: Why the parameter servers end, and what restarts tasks; a comment in the manifest.

    Example::

        class TFJobLauncher(KubernetesLauncher):
            name = "tfjob"
            resource = "tfjobs.kubeflow.org"
            why = "The parameter servers end with the job."

            def objects(self, job: Job) -> Sequence[Object]:
                return [manifests.api_object(job, "kubeflow.org/v1", "TFJob", spec={...})]

            def host(self, job: Job, role: Role, index: int) -> str:
                return f"{job.name}-{role.name}-{index}:{PORT}"

            def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
                return {"ps": 1, "worker": found[0]["spec"]["tfReplicaSpecs"]["Worker"]["replicas"]}

            def state(self, found: Sequence[Object]) -> tuple[str, str]:
                return status.by_conditions(found, found)
    """

    features: ClassVar[frozenset[str]] = manifests.FEATURES
    shares_files: ClassVar[bool] = False
    resource: ClassVar[str]
    why: ClassVar[str]

    @abc.abstractmethod
    def objects(self, job: Job) -> Sequence[Object]:
        """Return the objects of a job in the order of their creation; the last one owns the others.

        Args:
            job: The job, with the paths of its files in the containers.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """

    @abc.abstractmethod
    def host(self, job: Job, role: Role, index: int) -> str:
        """Return the address of a task for other pods of its namespace."""

    @abc.abstractmethod
    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role.

        Args:
            found: The job's objects of the kind ``resource``, as the cluster has them.
        """

    @abc.abstractmethod
    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the job's state and the reason; the state is ``""`` while only the pods can show it.

        Args:
            found: The job's objects of the kind ``resource``, as the cluster has them.
        """

    def plan(self, job: Job) -> Plan:
        """Return the objects of a job.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """
        job = manifests.with_container_paths(job)
        hosts = [self.host(job, job.ps, task.index) for task in job.ps.tasks()]
        comment = comment_of(job, self.name, self.why)
        return Plan(job.name, job.options.namespace, self.objects(job), comment, hosts)

    def client_addresses(self, plan: Plan) -> ClientAddresses:
        """Return the names of the pods."""
        return ClientAddresses(plan.ps_hosts, "in pods of the same namespace")

    def submit(self, plan: Plan) -> KubeJob:
        """Create the objects of a job, all or none.

        Raises:
            ConfigError: If the job's name is taken.
            PlatformError: If kubectl is not installed, or the cluster does not answer, or refuses one of them.
        """
        return kubectl.submit(self, plan)

    def find(self, job_id: str) -> KubeJob:
        """Return the job of a handle.

        Raises:
            ConfigError: If ``job_id`` is not ``NAME`` or ``NAMESPACE/NAME``.
        """
        return kubectl.find(self, job_id)


def hosts_by_flag(job: Job, host: Callable[[Job, Role, int], str]) -> Mapping[str, Sequence[str]]:
    """Return the values of ``--ps_hosts`` and ``--worker_hosts`` where the pods' names are known in advance."""
    return {f"{role.name}_hosts": [host(job, role, index) for index in range(role.replicas)] for role in job.roles}
