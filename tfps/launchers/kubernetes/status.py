"""The state of a job's tasks, from Kubernetes' objects as ``kubectl get -o json`` prints them. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfps.cluster.spec import Task
from tfps.jobs.causes import by_cause
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status, TaskStatus
from tfps.jobs.spec import KILLED
from tfps.launchers.kubernetes import manifests
from tfps.launchers.kubernetes.manifests import Object

_INDEX = "batch.kubernetes.io/job-completion-index"
_DONE = ("Complete", "Succeeded", "Completed")  # of a Job, a TFJob, a JobSet
_PHASES = {"Running": RUNNING, "Succeeded": SUCCEEDED, "Failed": FAILED, "Pending": PENDING}


def by_conditions(found: Sequence[Object], deciding: Sequence[Object]) -> tuple[str, str]:
    """Return the state from objects' conditions, and the reason: done if all of ``deciding`` are; ``""`` if unknown."""
    if deciding and all(_condition(one, *_DONE) for one in deciding):
        return SUCCEEDED, ""
    failed = [condition for one in found if (condition := _condition(one, "Failed"))]
    if failed:
        return FAILED, _words(failed[0])
    waiting = [condition for one in found if (condition := _condition(one, "Suspended"))]
    return (PENDING, _words(waiting[0])) if waiting else ("", "")


def _condition(found: Object, *types: str) -> Object | None:
    """Return the first true condition of an object among these types."""
    conditions = found.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") in types and one.get("status") == "True"), None)


def _words(found: Mapping[str, Any]) -> str:
    """Return a reason and a message in one line."""
    parts = [str(found[name]) for name in ("reason", "message") if found.get(name)]
    return " ".join(": ".join(parts).split())


def task_of(pod: Object) -> Task | None:
    """Return the task that a pod runs."""
    index = pod["metadata"].get("annotations", {}).get(_INDEX, pod["metadata"]["name"].rpartition("-")[2])
    role = manifests.role_of(pod)
    return Task(role, int(index)) if role in ("ps", "worker") and index.isdecimal() else None


def by_task(found: Sequence[Object]) -> dict[Task, list[Object]]:
    """Return each task's pods, the oldest first."""
    known: dict[Task, list[Object]] = {}
    for pod in sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        if task := task_of(pod):
            known.setdefault(task, []).append(pod)
    return known


def has_started(pod: Object) -> bool:
    """Return whether a pod's container has logs."""
    return bool({"running", "terminated"} & set(_container(pod).get("state", {})))


def has_ended(pod: Object) -> bool:
    """Return whether a pod will print nothing more."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def has_failed(pod: Object) -> bool:
    """Return whether a pod has failed."""
    return bool(pod.get("status", {}).get("phase") == "Failed")


def task_status(found: Sequence[Object]) -> TaskStatus:
    """Return the status of the task with these pods, the oldest first."""
    pod = found[-1]
    status = pod.get("status", {})
    codes = [code for one in found if (code := _exit_code(one)) is not None]
    node = pod.get("spec", {}).get("nodeName")
    return TaskStatus(
        _PHASES.get(status.get("phase", "Pending"), UNKNOWN),
        codes[-1] if codes else None,
        len(found) - 1 + int(_container(pod).get("restartCount", 0)),
        f"{pod['metadata']['name']}{f' on {node}' if node else ''}",
        _why(pod),
    )


def _container(pod: Object) -> Object:
    found = pod.get("status", {}).get("containerStatuses") or []
    return next((one for one in found if one.get("name") == manifests.CONTAINER), {})


def _exit_code(pod: Object) -> int | None:
    container = _container(pod)
    for state in ("state", "lastState"):
        ended = container.get(state, {}).get("terminated")
        if ended:
            return int(ended["exitCode"])
    return None


def _why(pod: Object) -> str:
    """Return the reason why a pod waits, or has failed."""
    status, state = pod.get("status", {}), _container(pod).get("state", {})
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    for words in (_words(state.get("waiting", {})), _words(status)):
        if words:
            return words
    if status.get("phase") == "Failed":
        return _words(state.get("terminated", {}))
    waits = [one for one in status.get("conditions") or [] if one.get("status") == "False" and one.get("message")]
    return _words(waits[0]) if waits and status.get("phase") == "Pending" else ""


def refusal(events: Sequence[Object], name: str, owners: Collection[str], since: str = "") -> str:
    """Return the newest refusal of a pod of a job, in the cluster's words: quota, PodSecurity, LimitRange, a webhook.

    Args:
        events: Events with the reason FailedCreate.
        name: The job's name; the names of operators' objects begin with it.
        owners: The names of the job's objects.
        since: Creation time of the newest pod; an older refusal is no longer in effect.
    """
    made = [
        one
        for one in events
        if (about := str(one.get("involvedObject", {}).get("name", ""))) in owners or about.startswith(f"{name}-")
    ]
    newest = max(made, key=_when, default=None)
    return _words(newest) if newest and _when(newest)[:19] >= since[:19] else ""  # compared to the second


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def job_status(
    state: str, reason: str, replicas: Mapping[str, int], tasks: Mapping[Task, TaskStatus], refused: str = ""
) -> Status:
    """Return the status of a job, given its object's state; in a failed job, the tasks that caused it come first.

    Args:
        state: The state of the job's object; empty if that has none.
        reason: The reason, in the object's words.
        replicas: Number of tasks of each role.
        tasks: The tasks that have pods.
        refused: Why the cluster creates no pods for the others.
    """
    all_tasks = [Task(role, index) for role in ("ps", "worker") for index in range(replicas.get(role, 0))]
    known = {task: tasks.get(task) or _unseen(state, refused) for task in all_tasks}
    if state in ("", PENDING):
        known = {task: _yet_to_come(one, refused) for task, one in known.items()}
    if not state:
        state = RUNNING if any(task.state == RUNNING for task in known.values()) else PENDING
    if not reason and (state == PENDING or refused):
        reason = refused or next((task.reason for task in known.values() if task.state == PENDING and task.reason), "")
    if state == FAILED:
        known = dict(sorted(known.items(), key=lambda item: by_cause(item[0], item[1].exit_code)))
    return Status(state, known, reason)


def _yet_to_come(known: TaskStatus, refused: str) -> TaskStatus:
    """Return a task's status while its job continues: after a killed or evicted pod, it waits for the next."""
    if known.state != FAILED or (known.exit_code is not None and known.exit_code not in KILLED):
        return known
    why = refused or "its pod has failed: the cluster makes another after a back-off"
    return replace(known, state=PENDING, reason=f"{why} ({known.reason})" if known.reason and not refused else why)


def _unseen(state: str, refused: str) -> TaskStatus:
    """Return the status of a task without a pod: not created yet, or deleted with its job."""
    ended = {SUCCEEDED: SUCCEEDED, FAILED: CANCELLED, CANCELLED: CANCELLED}
    return TaskStatus(ended.get(state, PENDING), reason="" if state in ended else refused)
