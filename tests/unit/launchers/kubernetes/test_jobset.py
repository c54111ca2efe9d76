"""JobSet: what its own models take, how its pods are named, and when such a job is done."""

import kubernetes_validate
import pytest
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from support.kubernetes_jobs import FULL, SMALL, Object, kind_of

from tfps.jobs.spec import Job
from tfps.launchers.kubernetes.jobset import JobSetLauncher


@pytest.mark.parametrize("job", [SMALL, FULL])
def test_jobset_has_every_field(job: Job) -> None:
    """JobSet's own models lose nothing of the manifest: every field is one of theirs, with a value of its type."""
    found = kind_of("jobset", job, "JobSet")
    read = JobsetV1alpha2JobSet.from_dict(found)
    assert read is not None
    assert read.to_dict() == found


@pytest.mark.parametrize("job", [SMALL, FULL])
def test_each_inner_job_is_one_that_kubernetes_takes(job: Job) -> None:
    """The template of each role, made a Job, passes Kubernetes' own schema strictly."""
    replicated = kind_of("jobset", job, "JobSet")["spec"]["replicatedJobs"]
    assert [one["name"] for one in replicated] == ["ps", "worker"]
    for one in replicated:
        inner = {"apiVersion": "batch/v1", "kind": "Job", **one["template"]}
        inner["metadata"]["name"] = one["name"]
        assert kubernetes_validate.validate(inner, "1.37.0", strict=True) == "1.37"


def test_every_pod_has_the_name_that_the_hosts_say() -> None:
    """Pods are named SET-ROLE-0-INDEX in the set's subdomain: the very hosts."""
    spec = kind_of("jobset", FULL, "JobSet")["spec"]
    data = kind_of("jobset", FULL, "ConfigMap")["data"]
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "full"}
    for one in spec["replicatedJobs"]:
        names = [f"full-{one['name']}-0-{n}.full:2222" for n in range(one["template"]["spec"]["completions"])]
        assert one["replicas"] == 1
        assert data[f"{one['name']}_hosts"].split(",") == names


def test_the_workers_end_the_set() -> None:
    """The set is complete with the workers' Job, and failed with either: no restart of the whole set."""
    spec = kind_of("jobset", FULL, "JobSet")["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert spec["failurePolicy"] == {"maxRestarts": 0}


@pytest.mark.parametrize(
    ("condition", "state"), [("Completed", "SUCCEEDED"), ("Failed", "FAILED"), ("Suspended", "PENDING")]
)
def test_the_conditions_tell_how_it_is(condition: str, state: str) -> None:
    """A JobSet's condition says how it is, and why if it has not succeeded."""
    found: Object = {"status": {"conditions": [{"type": condition, "status": "True", "reason": "Why"}]}}
    assert JobSetLauncher().state([found]) == (state, "" if state == "SUCCEEDED" else "Why")
    assert JobSetLauncher().replicas([kind_of("jobset", FULL, "JobSet")]) == {"ps": 2, "worker": 3}
