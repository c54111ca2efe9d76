"""What is read from the objects of a cluster: why a task waits, how it ended, and how often it began again."""

from typing import Any

import pytest

from tfps.cluster.spec import Task
from tfps.jobs.handle import TaskStatus
from tfps.launchers.kubernetes import status


def pod(name: str, phase: str, state: dict[str, Any] | None = None, made: str = "1", **status: Any) -> dict[str, Any]:
    """Return a pod as the cluster tells of it."""
    container = [{"name": "tensorflow", "state": state, "restartCount": 0}] if state else []
    role = "ps" if "-ps-" in name else "worker"
    metadata = {"name": name, "creationTimestamp": made, "labels": {"app.kubernetes.io/component": role}}
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase, "containerStatuses": container, **status}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    """Return the state of a container that has ended."""
    return {"terminated": {"exitCode": code, "reason": reason}}


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        (pod("a-ps-0", "Pending"), TaskStatus("PENDING")),
        (pod("a-ps-0", "Running", {"running": {}}), TaskStatus("RUNNING")),
        (pod("a-ps-0", "Succeeded", ended(0, "Completed")), TaskStatus("SUCCEEDED", 0)),
        (pod("a-ps-0", "Failed", ended(137, "OOMKilled")), TaskStatus("FAILED", 137, reason="OOMKilled")),
        (pod("a-ps-0", "Unknown"), TaskStatus("UNKNOWN")),
        (
            pod("a-ps-0", "Failed", reason="Evicted", message="The node was low on resource: memory.\nBye."),
            TaskStatus("FAILED", reason="Evicted: The node was low on resource: memory. Bye."),
        ),
        (
            pod("a-ps-0", "Pending", {"waiting": {"reason": "ErrImagePull", "message": "denied"}}),
            TaskStatus("PENDING", reason="ErrImagePull: denied"),
        ),
    ],
)
def test_a_pod_tells_how_its_task_is(found: dict[str, Any], reported: TaskStatus) -> None:
    """Phase, exit code and the platform's words, as one line, are those of the pod."""
    known = status.task_status([found])
    assert (known.state, known.exit_code, known.reason) == (reported.state, reported.exit_code, reported.reason)


def test_a_deleted_pod_is_terminating() -> None:
    """A pod that is being deleted says so, whatever else it says."""
    found = pod("a-ps-0", "Running", {"running": {}})
    found["metadata"]["deletionTimestamp"] = "2"
    assert status.task_status([found]).reason == "Terminating"


def test_the_newest_pod_speaks_for_its_task() -> None:
    """The pods of a task are told by index, in the order of their making: the others are its restarts."""
    index = "batch.kubernetes.io/job-completion-index"
    found = [pod("a-worker-1-xyz", "Running", {"running": {}}, "2"), pod("a-worker-1-abc", "Failed", ended(143), "1")]
    for one in found:
        one["metadata"]["annotations"] = {index: "1"}
    by_task = status.by_task([*found, pod("a-worker-0", "Running"), pod("a-worker-x", "Running")])
    assert set(by_task) == {Task("worker", 0), Task("worker", 1)}
    known = status.task_status(by_task[Task("worker", 1)])
    assert (known.state, known.exit_code, known.restarts, known.where) == ("RUNNING", 143, 1, "a-worker-1-xyz")


@pytest.mark.parametrize(
    ("state", "worker", "job", "task"),
    [
        ("", "RUNNING", "RUNNING", "PENDING"),
        ("", "PENDING", "PENDING", "PENDING"),
        ("SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"),
        ("FAILED", "FAILED", "FAILED", "CANCELLED"),
        ("CANCELLED", "RUNNING", "CANCELLED", "CANCELLED"),
    ],
)
def test_a_task_without_a_pod_follows_its_job(state: str, worker: str, job: str, task: str) -> None:
    """A task whose pod is not made yet is pending; one whose pod went with its job ended as that did, or with it."""
    whole = status.job_status(state, "", {"ps": 1, "worker": 1}, {Task("worker", 0): TaskStatus(worker, reason="why")})
    assert (whole.state, whole.tasks[Task("ps", 0)].state) == (job, task)
    assert whole.reason == ("why" if job == "PENDING" else "")


def test_who_failed_by_itself_comes_first() -> None:
    """In a failed job those tasks come last that ended because another one had failed."""
    codes = {Task("ps", 0): 143, Task("worker", 0): 170, Task("worker", 1): 66, Task("worker", 2): 0}
    tasks = {task: TaskStatus("FAILED", code) for task, code in codes.items()}
    whole = status.job_status("FAILED", "", {"ps": 1, "worker": 3}, tasks)
    assert next(iter(whole.tasks)) == Task("worker", 1)
    assert dict(whole.tasks) == tasks


@pytest.mark.parametrize("code", [77, 137, 170, 171, 172])
def test_a_ps_that_was_told_of_a_failure_did_not_cause_it(code: int) -> None:
    """The worker comes first, also if the cluster has made another pod for it."""
    tasks = {Task("ps", 0): TaskStatus("FAILED", 67), Task("worker", 0): TaskStatus("PENDING", code, restarts=1)}
    whole = status.job_status("FAILED", "", {"ps": 1, "worker": 2}, tasks)
    assert next(iter(whole.tasks)) == Task("worker", 0)


def event(name: str, when: str, message: str) -> dict[str, Any]:
    """Return an event as the cluster tells of it."""
    reported = {"reason": "FailedCreate", "message": message, "lastTimestamp": when}
    return {**reported, "involvedObject": {"kind": "Job", "name": name}}


def test_the_newest_refusal_of_ones_own_pods_counts() -> None:
    """Events of the job's objects, and of what operators name after it, are its own; those of other jobs are not."""
    events = [
        event("a-ps", "1", "old"),
        event("a-worker-0", "2", "quota"),
        event("ab", "3", "other's"),
        event("a", "0", ""),
    ]
    assert status.refusal(events, "a", {"a"}) == "FailedCreate: quota"
    assert status.refusal(events[2:3], "a", {"a"}) == ""
    assert status.refusal(events, "a", {"a"}, "2") == "FailedCreate: quota"
    assert status.refusal(events, "a", {"a"}, "3") == "", "a pod was made since"
    whole = status.job_status("", "", {"ps": 1, "worker": 1}, {Task("ps", 0): TaskStatus("RUNNING")}, "no quota")
    assert (whole.state, whole.reason, whole.tasks[Task("worker", 0)].reason) == ("RUNNING", "no quota", "no quota")
