"""Kubeflow's TFJob: what its own models take, and what its operator needs."""

import re
from typing import Any

import kubeflow.training.models as kubeflow_models
import kubernetes.client.models as kubernetes_models
import pytest
from support.kubernetes_jobs import FULL, SERVICE, SMALL, Object, kind_of, templates

from tfps.jobs.spec import Job
from tfps.launchers.kubernetes.tfjob import TFJobLauncher

_PLAIN = {"str": str, "int": int, "bool": bool, "object": object}


def check(value: Any, kind: str) -> None:
    """Fail if a value is not of one of the Kubernetes clients' types, or has a field that the type does not have."""
    if inner := re.fullmatch(r"(?:list\[|dict\(str, )(.*)[\])]", kind):
        assert isinstance(value, dict if kind.startswith("dict") else list)
        for one in value.values() if isinstance(value, dict) else value:
            check(one, inner[1])
    elif kind in _PLAIN:
        assert isinstance(value, _PLAIN[kind]), f"{value!r} is no {kind}"
    else:
        model = getattr(kubeflow_models, kind, None) or getattr(kubernetes_models, kind)
        fields = {written: name for name, written in model.attribute_map.items()}
        assert set(value) <= set(fields), f"{kind} has no {sorted(set(value) - set(fields))}"
        for written, inner_value in value.items():
            check(inner_value, model.openapi_types[fields[written]])


@pytest.mark.parametrize("job", [SMALL, FULL, SERVICE])
def test_kubeflow_has_every_field(job: Job) -> None:
    """Kubeflow's own models have every field of the TFJob, down to the containers, with values of their types."""
    check(kind_of("tfjob", job, "TFJob"), "KubeflowOrgV1TFJob")


def test_the_models_refuse_what_kubeflow_does_not_know() -> None:
    """The check would fail if the TFJob had a field that Kubeflow does not have."""
    found = kind_of("tfjob", SMALL, "TFJob")
    found["spec"]["runPolicy"]["cleanPods"] = "All"
    with pytest.raises(AssertionError, match="cleanPods"):
        check(found, "KubeflowOrgV1TFJob")


def test_the_operator_finds_its_container_and_port() -> None:
    """The container is named tensorflow, its port tfjob-port is 2222, and Istio adds no proxy that would never end."""
    for template in templates("tfjob", FULL).values():
        [container] = template["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert container["ports"] == [{"name": "tfjob-port", "containerPort": 2222, "protocol": "TCP"}]
        assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        assert "restartPolicy" not in template["spec"]  # the operator's own says it


def test_exit_codes_drive_restarts_and_the_ps_end_with_the_job() -> None:
    """Kubeflow's ExitCode policy starts tasks again from 128 up; when all workers are done, running pods go."""
    spec = kind_of("tfjob", FULL, "TFJob")["spec"]
    assert {one["restartPolicy"] for one in spec["tfReplicaSpecs"].values()} == {"ExitCode"}
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 3,
        "ttlSecondsAfterFinished": 604800,
    }
    assert spec["successPolicy"] == "AllWorkers"
    assert {kind: one["replicas"] for kind, one in spec["tfReplicaSpecs"].items()} == {"PS": 2, "Worker": 3}


@pytest.mark.parametrize(("condition", "state"), [("Succeeded", "SUCCEEDED"), ("Failed", "FAILED"), ("Running", "")])
def test_the_conditions_tell_how_it_is(condition: str, state: str) -> None:
    """A TFJob's condition that is true says how it ended; one that is no more says nothing."""
    reported = [{"type": "Failed", "status": "False"}, {"type": condition, "status": "True", "message": "so"}]
    found: Object = {"status": {"conditions": reported}}
    assert TFJobLauncher().state([found]) == (state, "so" if state == "FAILED" else "")


def test_the_roles_are_counted() -> None:
    """What the cluster tells of a TFJob says how many tasks there are."""
    assert TFJobLauncher().replicas([kind_of("tfjob", FULL, "TFJob")]) == {"ps": 2, "worker": 3}


def test_the_servers_of_a_service_are_workers_to_the_operator() -> None:
    """Which counts a job as done by its workers alone. What it tells them by TF_CONFIG does not reach tfps."""
    found = kind_of("tfjob", SERVICE, "TFJob")
    assert list(found["spec"]["tfReplicaSpecs"]) == ["Worker"]
    assert TFJobLauncher().replicas([found]) == {"ps": 2}
    [container] = templates("tfjob", SERVICE)["ps"]["spec"]["containers"]
    assert container["command"][:3] == ["env", "--unset=TF_CONFIG", "python"]
    assert {"--job_name=ps", "--task_index=$(TASK_INDEX)", "--ps_hosts=$(PS_HOSTS)"} <= set(container["command"])
    hosts = kind_of("tfjob", SERVICE, "ConfigMap")["data"]["ps_hosts"]
    assert hosts == "service-worker-0:2222,service-worker-1:2222"
