"""Volcano's Job: what its schema takes, and what its policies do."""

from typing import Any

import jsonschema
import pytest
import yaml
from support.kubernetes_jobs import FULL, SERVICE, SMALL, changed, kind_of, plan_of
from support.processes import REPO

from tfps.errors import ConfigError
from tfps.jobs.spec import Job
from tfps.launchers.kubernetes.volcano import VolcanoLauncher

_SPEC = yaml.safe_load((REPO / "tests/support/volcano_job.yaml").read_text())
# What users may write: pkg/webhooks/admission/jobs/validate/util.go.
_EVENTS = {"*", "PodFailed", "PodEvicted", "PodPending", "Unknown", "TaskCompleted", "TaskFailed"}
_ACTIONS = {"AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob"}


@pytest.mark.parametrize("job", [SMALL, changed(FULL, FULL.model_source, queue="team.high"), SERVICE])
def test_volcano_has_every_field(job: Job) -> None:
    """Volcano's schema takes the Job, and its webhook lets through each event and action."""
    spec = kind_of("volcano", job, "Job")["spec"]
    jsonschema.validate(spec, _SPEC)
    for policy in [*spec["policies"], *(p for t in spec["tasks"] for p in t.get("policies", []))]:
        assert policy["action"] in _ACTIONS
        assert set(policy.get("events", [])) | {policy.get("event", "*")} <= _EVENTS
        assert ("exitCode" in policy) != bool({"event", "events"} & set(policy))


@pytest.mark.parametrize(
    "wrong", [{"restartPolicy": "Never"}, {"maxRetry": "10"}, {"tasks": []}, {"policies": [{"event": "PodLost"}]}]
)
def test_the_schema_refuses_what_volcano_would(wrong: dict[str, Any]) -> None:
    """An unknown field, another type, no task or an unknown event does not pass, so the test above can fail."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(kind_of("volcano", SMALL, "Job")["spec"] | wrong, _SPEC)


def test_all_tasks_are_scheduled_together() -> None:
    """Volcano starts all tasks or none, in the queue that was asked for."""
    spec = kind_of("volcano", changed(FULL, "", queue="high"), "Job")["spec"]
    assert (spec["schedulerName"], spec["queue"], spec["minAvailable"]) == ("volcano", "high", 5)
    assert "queue" not in kind_of("volcano", SMALL, "Job")["spec"]


def test_the_workers_complete_the_job() -> None:
    """The completion of the workers, and of no other task, completes the job, which ends the ps."""
    ps, worker = kind_of("volcano", FULL, "Job")["spec"]["tasks"]
    assert worker["policies"] == [{"event": "TaskCompleted", "action": "CompleteJob"}]
    assert "policies" not in ps


def test_the_servers_of_a_service_complete_it() -> None:
    """A server alone gets its place by flags, as Volcano sets no TF_CONFIG for a job of one task."""
    [ps] = kind_of("volcano", SERVICE, "Job")["spec"]["tasks"]
    assert ps["policies"] == [{"event": "TaskCompleted", "action": "CompleteJob"}]
    alone = {"--ps_hosts=service-ps-0.service:2222", "--job_name=ps", "--task_index=0"}
    assert not alone & set(ps["template"]["spec"]["containers"][0]["command"])
    [ps] = kind_of("volcano", changed(SERVICE, num_ps=1), "Job")["spec"]["tasks"]
    assert alone <= set(ps["template"]["spec"]["containers"][0]["command"])


def test_a_worker_alone_gets_its_place_by_flags() -> None:
    """Without PS; Volcano sets TF_CONFIG only where there are two tasks or more."""
    [worker] = kind_of("volcano", changed(SMALL, num_ps=0, num_workers=1), "Job")["spec"]["tasks"]
    alone = {"--worker_hosts=mnist-worker-0.mnist:2222", "--job_name=worker", "--task_index=0"}
    assert alone <= set(worker["template"]["spec"]["containers"][0]["command"])


def test_the_job_starts_again_as_often_as_it_says() -> None:
    """Volcano counts a restart, and then fails the job if the count has reached maxRetry (restartingState)."""
    most = kind_of("volcano", SMALL, "Job")["spec"]["maxRetry"]
    assert sum(count < most for count in range(1, 100)) == 3
    assert "up to 3 times" in " ".join(VolcanoLauncher.why.split())


def act(policies: list[dict[str, Any]], event: str, code: int) -> str:
    """Return what Volcano does: the first policy with the event, or the exit code, counts (applyPolicies)."""
    fits = [p for p in policies if event in p.get("events", []) or (code and p.get("exitCode") == code)]
    return str(fits[0]["action"]) if fits else "SyncJob"


@pytest.mark.parametrize("code", range(1, 256))
def test_exit_codes_drive_restarts(code: int) -> None:
    """A container that was killed or lost starts the job again, as does an eviction; any other code ends it."""
    policies = kind_of("volcano", SMALL, "Job")["spec"]["policies"]
    assert act(policies, "PodFailed", code) == ("RestartJob" if code in (137, 143, 255) else "TerminateJob")
    assert act(policies, "PodEvicted", 0) == "RestartJob"


def test_the_plugins_are_told_about_the_tasks() -> None:
    """The tensorflow plugin knows the names of both tasks and the port; addresses are there before pods are ready."""
    spec = kind_of("volcano", SMALL, "Job")["spec"]
    assert spec["plugins"]["tensorflow"] == ["--ps=ps", "--worker=worker", "--port=2222"]
    assert "--publish-not-ready-addresses=true" in spec["plugins"]["svc"]
    assert [task["name"] for task in spec["tasks"]] == ["ps", "worker"]


@pytest.mark.parametrize("queue", ["High", "a_b", "-", "a" * 64, "no\nsuch"])
def test_a_queue_that_cannot_be_is_refused(queue: str) -> None:
    """A name that no queue of Volcano's can have is an error of the plan."""
    with pytest.raises(ConfigError, match="is no name of a queue"):
        plan_of("volcano", changed(SMALL, queue=queue))


@pytest.mark.parametrize(
    ("phase", "state"),
    [("Completed", "SUCCEEDED"), ("Failed", "FAILED"), ("Terminated", "FAILED"), ("Aborted", "CANCELLED")],
)
def test_the_phase_tells_how_it_is(phase: str, state: str) -> None:
    """A phase that is an end is one of the job; while it runs, the pods tell."""
    assert VolcanoLauncher().state([{"status": {"state": {"phase": phase}}}])[0] == state
    assert VolcanoLauncher().state([{"status": {"state": {"phase": "Running"}}}]) == ("", "")
    assert VolcanoLauncher().state([{}]) == ("", "")
    assert VolcanoLauncher().replicas([kind_of("volcano", FULL, "Job")]) == {"ps": 2, "worker": 3}
