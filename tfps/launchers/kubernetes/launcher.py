"""What the Kubernetes platforms' launchers share: a plan is objects, kubectl creates them, labels find them."""

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tfps.jobs.spec import Job
from tfps.launchers.base import Launcher
from tfps.launchers.kubernetes import kubectl, manifests
from tfps.launchers.kubernetes.kubectl import KubeJob
from tfps.launchers.kubernetes.manifests import Object, Plan


class KubernetesLauncher(Launcher[Plan]):
    """A kind of job on Kubernetes. A subclass says which objects make one, and reads back what becomes of them.

    Attributes:
        resource: What kubectl calls the objects that run the tasks.
        why: Why the parameter servers end, and what starts tasks again; a comment in the manifest.

    Example::

        class TFJobLauncher(KubernetesLauncher):
            name = "tfjob"
            resource = "tfjobs.kubeflow.org"
            why = "The parameter servers end with the job."

            def objects(self, job: Job) -> Sequence[Object]:
                return [manifests.api_object(job, "kubeflow.org/v1", "TFJob", spec={...})]

            def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
                return {"ps": 1, "worker": found[0]["spec"]["tfReplicaSpecs"]["Worker"]["replicas"]}

            def state(self, found: Sequence[Object]) -> tuple[str, str]:
                return status.by_conditions(found, found)
    """

    options: ClassVar[frozenset[str]] = manifests.OPTIONS
    shares_files: ClassVar[bool] = False
    resource: ClassVar[str]
    why: ClassVar[str]

    @abc.abstractmethod
    def objects(self, job: Job) -> Sequence[Object]:
        """Return the objects of a job in the order in which they are created; the last owns the others.

        Args:
            job: The job, with the paths that its files have in the containers.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """

    @abc.abstractmethod
    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return how many tasks each role has.

        Args:
            found: The job's objects of the kind ``resource``, as the cluster has them.
        """

    @abc.abstractmethod
    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the job's state, ``""`` while its pods are what tells it, and the reason.

        Args:
            found: The job's objects of the kind ``resource``, as the cluster has them.
        """

    def plan(self, job: Job) -> Plan:
        """Return the objects of a job.

        Raises:
            ConfigError: If the cluster would refuse one of them.
        """
        job = manifests.with_container_paths(job)
        return manifests.plan(job, self.name, self.objects(job), self.why)

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
            ConfigError: If it is not ``NAME`` or ``NAMESPACE/NAME``.
        """
        return kubectl.find(self, job_id)
