"""Jobs on Kubernetes, of any kind, through the user's own kubectl, with its configuration, login and errors.

The objects of a job are found, and deleted, by their labels: this module never touches any object of another program.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tfps.cluster.spec import Task
from tfps.errors import ConfigError, JobNotFoundError, PlatformError
from tfps.jobs.events import LogLine
from tfps.jobs.handle import CANCELLED, PENDING, Status, SubmittedJob, TaskStatus
from tfps.launchers.common import client
from tfps.launchers.common.yaml_writer import to_yaml
from tfps.launchers.kubernetes import logs, manifests, status
from tfps.launchers.kubernetes.manifests import Object, Plan
from tfps.text import show
from tfps.timeouts import POD_DELETE_SECS

_ASK = "--request-timeout=20s"
_KLOG = re.compile(r"kubectl [^:]*: [IWEF]\d{4} ")  # kubectl's own log, which only repeats its final error
_UNANSWERED = re.compile(
    r"has not answered for|deadline exceeded|Timeout exceeded|timed out|\bEOF\b|reset by peer|connection lost"
)
_BESIDE = "configmaps,services,networkpolicies.networking.k8s.io"


class Platform(Protocol):
    """The parts of a job's kind that this module needs: see ``KubernetesLauncher``."""

    @property
    def name(self) -> str:
        """The launcher's name."""

    @property
    def resource(self) -> str:
        """The name that kubectl uses for the objects that run the tasks."""

    def replicas(self, found: Sequence[Object]) -> Mapping[str, int]:
        """Return the number of tasks of each role, from the job's objects."""

    def state(self, found: Sequence[Object]) -> tuple[str, str]:
        """Return the state of the job, and the reason, from the job's objects."""


def _kubectl(namespace: str, *args: str, given: str = "", complained: list[str] | None = None) -> str:
    path = client.require_tool(
        "kubectl", "install it (Debian: apt-get install kubernetes-client), and log in to the cluster"
    )
    where = [f"--namespace={namespace}"] if namespace else []
    try:
        return client.run_client([path, *args, *where], given, complained=complained)
    except PlatformError as error:
        said = [problem for problem in error.problems if not _KLOG.match(problem)]
        raise PlatformError(said or error.problems) from None


def submit(platform: Platform, plan: Plan) -> "KubeJob":
    """Create the objects of a plan, one after the other; if one is refused, delete those created here.

    Raises:
        ConfigError: If the job's name is taken.
        PlatformError: If kubectl is not installed, or the cluster does not answer, or refuses an object.
    """
    namespace, uid, created, said = plan.namespace or "", "", list[str](), list[str]()
    try:
        for made in plan.objects:
            say = ("-o", "jsonpath={.metadata.namespace} {.metadata.uid}", _ASK)
            answer = _kubectl(namespace, "create", "-f", "-", *say, given=f"{to_yaml([made])}\n", complained=said)
            namespace, _, uid = answer.partition(" ")
            created.append(_name(made))
    except BaseException as error:
        error = _without_answer(made, error)
        _undo(namespace, created, error)
        raise _taken(platform, namespace or plan.namespace or "", plan.name, error) from None
    job = KubeJob(platform, namespace, plan.name, [line for line in said if line.startswith("Warning: ")])
    # The last object owns the others, except a Job, which has its own ttlSecondsAfterFinished.
    job.own(plan.objects[-1], uid, [name for name in created[:-1] if not name.startswith("job.")])
    return job


def _without_answer(made: Object, error: BaseException) -> BaseException:
    """Return an error that says, if the answer about an object was lost, that it may exist.

    It is not deleted: it may be of another job of that name.
    """
    if not isinstance(error, PlatformError) or not any(map(_UNANSWERED.search, error.problems)):
        return error
    doubt = (
        f"{_name(made)} may have been created all the same: look with kubectl get, and delete it if it is this job's."
    )
    return PlatformError([*error.problems, doubt])


def _taken(platform: Platform, namespace: str, name: str, error: BaseException) -> BaseException:
    """Return an error that says how to proceed, if the cause is that a job's name is taken."""
    if not isinstance(error, PlatformError) or not any("AlreadyExists" in problem for problem in error.problems):
        return error
    job = KubeJob(platform, namespace, name)
    try:
        job.status()
    except PlatformError:
        return ConfigError([*error.problems, f"--name={name} is taken by another program's object: give another name."])
    return ConfigError(
        f"--name={name} is taken: a job of this name exists. Give another name, or end that one and take its objects "
        f"away: tfps cancel {job.handle}."
    )


def _name(made: Object) -> str:
    """Return the name of an object on kubectl's command line: ``job.v1.batch/NAME``."""
    group, _, version = made["apiVersion"].rpartition("/")
    full = f"{made['kind']}.{version}.{group}" if group else made["kind"]
    return f"{full.lower()}/{made['metadata']['name']}"


def _undo(namespace: str, created: Sequence[str], error: BaseException) -> None:
    """Delete the objects created before an error; if that fails too, raise an error that lists the rest."""
    if not created:
        return
    try:
        _kubectl(namespace, "delete", *reversed(created), "--ignore-not-found", "--wait=false", _ASK)
    except PlatformError as left:
        problems = error.problems if isinstance(error, PlatformError) else []
        raise PlatformError([*problems, *left.problems, f"left behind: {', '.join(created)}; delete them."]) from None


def find(platform: Platform, name: str) -> "KubeJob":
    """Return the job of a handle.

    Raises:
        ConfigError: If ``name`` is not ``NAME`` or ``NAMESPACE/NAME``.
    """
    if not re.fullmatch("([a-z0-9-]+/)?[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise ConfigError(f"{platform.name}:{show(name)} is not a job handle: write {platform.name}:NAMESPACE/NAME.")
    namespace, _, name = name.rpartition("/")
    return KubeJob(platform, namespace, name)


class KubeJob(SubmittedJob):
    """A job on Kubernetes.

    Attributes:
        warnings: The cluster's warnings when the job was submitted.
    """

    def __init__(self, platform: Platform, namespace: str, name: str, warnings: Sequence[str] = ()) -> None:
        self._platform, self._namespace, self._name = platform, namespace, name
        self.warnings: list[str] = list(warnings)
        self._last: Status | None = None
        self._pods: Sequence[Object] = ()  # the newest pod of each task, unless it has failed, at the last query
        self._seen: dict[Task, set[str]] = {}  # all pods of each task that were ever seen: operators delete some

    @property
    def handle(self) -> str:
        """``PLATFORM:NAMESPACE/NAME``, or without the namespace, for kubectl's own."""
        where = f"{self._namespace}/" if self._namespace else ""
        return f"{self._platform.name}:{where}{self._name}"

    def own(self, owner: Object, uid: str, names: Sequence[str]) -> None:
        """Make the job the owner of other objects, deleted with it ``ttlSecondsAfterFinished`` after its end."""
        reference = {name: owner[name] for name in ("apiVersion", "kind")} | {
            "name": owner["metadata"]["name"],
            "uid": uid,
        }
        patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
        try:
            _kubectl(self._namespace, "patch", *names, "--type=merge", f"--patch={patch}", "-o", "name", _ASK)
        except PlatformError as error:
            note = (
                f"{', '.join(names)} will stay when the job's other objects go: tfps cancel {self.handle} deletes them."
            )
            self.warnings += [*error.problems, note]

    def status(self) -> Status:
        """Ask the cluster for the job's status.

        Raises:
            PlatformError: If it does not answer, or knows no such job.
        """
        return self._look()[0]

    def _look(self) -> tuple[Status, dict[Task, list[Object]]]:
        """Return the job's status, and the pods of each task."""
        found = json.loads(self._ask("get", f"{self._platform.resource},pods", "-o", "json"))["items"]
        running = status.by_task([one for one in found if one["kind"] == "Pod"])
        owners = [one for one in found if one["kind"] != "Pod"]
        self._pods = [pods_[-1] for pods_ in running.values() if not status.has_failed(pods_[-1])]
        if owners:
            self._last = self._status(owners, running)
        elif self._last:
            self._last = replace(self._last, state=CANCELLED, reason="deleted")
        else:
            raise JobNotFoundError(
                f"{self.handle}: the cluster knows no such job; kubectl get {self._platform.resource}."
            )
        return self._last, running

    def _status(self, owners: list[Object], running: Mapping[Task, list[Object]]) -> Status:
        state, reason = self._platform.state(owners)
        refused = "" if state and state != PENDING else self._refused(owners)
        if any(one["metadata"].get("deletionTimestamp") for one in owners):
            state, reason = CANCELLED, "being deleted"
        known = {task: self._task(task, found) for task, found in running.items()}
        restarted = max(one.get("status", {}).get("retryCount", 0) for one in owners)  # Volcano's count, for all tasks
        tasks = {task: replace(one, restarts=max(one.restarts, restarted)) for task, one in known.items()}
        return status.job_status(state, reason, self._platform.replicas(owners), tasks, refused)

    def _refused(self, owners: list[Object]) -> str:
        """Return why the cluster creates no pods for tasks without one, in its words; asks only if there are any."""
        wanted = sum(self._platform.replicas(owners).values())
        if wanted <= len(self._pods):
            return ""
        try:
            asked = _kubectl(
                self._namespace, "get", "events", "--field-selector=reason=FailedCreate", "-o", "json", _ASK
            )
        except PlatformError:  # not every user may read events
            return ""
        names = {one["metadata"]["name"] for one in owners}
        newest = max((str(pod["metadata"].get("creationTimestamp", "")) for pod in self._pods), default="")
        return status.refusal(json.loads(asked)["items"], self._name, names, newest)

    def _task(self, task: Task, found: list[Object]) -> TaskStatus:
        seen = self._seen.setdefault(task, set())
        seen.update(pod["metadata"]["uid"] for pod in found)
        known = status.task_status(found)
        return replace(known, restarts=known.restarts + len(seen) - len(found))

    def _ask(self, verb: str, what: str, *args: str, role: str = "") -> str:
        selector = manifests.selector(self._name, role)
        return _kubectl(self._namespace, verb, what, f"--selector={selector}", *args, _ASK)

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of all tasks, or only of ``task``; with ``follow``, until the job ends.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If the cluster does not answer, or knows no such job, or the task has not started.
        """
        whole, running = self._look()
        if task and task not in whole.tasks:
            raise ConfigError(f"{self.handle} has no task {task}: it has {', '.join(map(str, whole.tasks))}.")
        if follow:
            yield from logs.follow(self._look, self._log, [task] if task else list(whole.tasks))
            return
        if task and whole.tasks[task].state == PENDING:
            raise PlatformError(f"{task} has not started: {whole.tasks[task].reason or 'it waits for its pod'}.")
        for one in [task] if task else whole.tasks:
            for pod in filter(status.has_started, running.get(one, [])):
                yield from (LogLine(one, text) for text in self._said(pod))

    def _log(self, pod: Object) -> list[str]:
        """Return the command that prints a pod's log."""
        where = [f"--namespace={self._namespace}"] if self._namespace else []
        return ["kubectl", "logs", pod["metadata"]["name"], f"--container={manifests.CONTAINER}", *where]

    def _said(self, pod: Object) -> Sequence[str]:
        return client.run_client([*self._log(pod), _ASK]).splitlines()

    def cancel(self) -> None:
        """End the job and wait until its pods are gone, which have time to save; then delete the other objects.

        A part that cannot be deleted does not keep the rest from going.

        Raises:
            PlatformError: If the cluster does not answer, or knows no such job, or some of it does not go.
        """
        self.status()
        wait = ("--cascade=foreground", "--wait=true", f"--timeout={POD_DELETE_SECS}s")
        problems: list[str] = []
        for role in ("worker", ""):  # if each role has a Job, the workers go first: they save on the parameter servers
            problems += self._deleted(self._platform.resource, *wait, role=role)
        problems += self._deleted(_BESIDE, "--wait=false")
        if problems:
            raise PlatformError(
                [*problems, f"{self.handle} is asked to stop, but not all of it has gone: cancel it again."]
            )

    def _deleted(self, what: str, *args: str, role: str = "") -> Sequence[str]:
        """Delete objects; return the problems."""
        try:
            self._ask("delete", what, "--ignore-not-found", *args, role=role)
        except PlatformError as error:
            return error.problems
        return ()
