"""Plain Jobs: addresses, restarts, and when such a job is done."""

from support.kubernetes_jobs import FULL, SMALL, Object, kind_of, templates

from tfps.launchers.kubernetes.jobs import JobsLauncher


def test_every_pod_has_the_name_that_the_hosts_say() -> None:
    """Pods are named JOB-INDEX in the subdomain of a headless service, even before they are ready: the very hosts."""
    data = kind_of("kubernetes", FULL, "ConfigMap")["data"]
    service = kind_of("kubernetes", FULL, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    for role, template in templates("kubernetes", FULL).items():
        job = kind_of("kubernetes", FULL, "Job", f"full-{role}")
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["completions"] == job["spec"]["parallelism"]
        domain = template["spec"]["subdomain"]
        assert domain == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        names = [f"{job['metadata']['name']}-{n}.{domain}:2222" for n in range(job["spec"]["completions"])]
        assert data[f"{role}_hosts"].split(",") == names


def test_exit_codes_drive_restarts() -> None:
    """Pods that were killed or lost are replaced, each by its own count; any other exit code fails the Job at once."""
    spec = kind_of("kubernetes", FULL, "Job", "full-worker")["spec"]
    ignored, failing = spec["podFailurePolicy"]["rules"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "backoffLimit" not in spec, "it would count, and delay, all tasks as one"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert ignored["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (failing["action"], failing["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    assert failing["onExitCodes"]["values"] == [137, 143, 255]
    assert failing["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]


def job(role: str, condition: str = "", completions: int = 1) -> Object:
    """Return a Job as the cluster tells of it."""
    reported = [{"type": condition, "status": "True", "reason": "Why", "message": "so"}] if condition else []
    labels = {"app.kubernetes.io/component": role}
    return {"metadata": {"labels": labels}, "spec": {"completions": completions}, "status": {"conditions": reported}}


def test_the_workers_decide_when_it_is_done() -> None:
    """It has succeeded when the workers' Job is complete, and failed when either Job has; else the pods tell."""
    assert JobsLauncher().state([job("ps"), job("worker", "Complete")]) == ("SUCCEEDED", "")
    assert JobsLauncher().state([job("ps", "Failed"), job("worker", "Complete")]) == ("SUCCEEDED", "")
    assert JobsLauncher().state([job("ps", "Complete"), job("worker")]) == ("", "")
    assert JobsLauncher().state([job("ps", "Failed"), job("worker")]) == ("FAILED", "Why: so")


def test_the_servers_decide_when_a_service_is_done() -> None:
    """It has no other Job."""
    assert JobsLauncher().state([job("ps", "Complete")]) == ("SUCCEEDED", "")
    assert JobsLauncher().state([job("ps")]) == ("", "")
    assert JobsLauncher().state([job("ps", "Failed")]) == ("FAILED", "Why: so")
    assert JobsLauncher().state([job("ps"), job("worker", "Failed")]) == ("FAILED", "Why: so")
    assert JobsLauncher().state([job("ps"), job("worker", "Suspended")]) == ("PENDING", "Why: so")
    assert JobsLauncher().replicas([job("ps"), job("worker", "", 3)]) == {"ps": 1, "worker": 3}


def test_the_jobs_are_the_last_to_be_created() -> None:
    """Addresses, policy and files are there before the first pod is."""
    plan = JobsLauncher().plan(SMALL)
    assert [made["kind"] for made in plan.objects] == ["ConfigMap", "NetworkPolicy", "Service", "Job", "Job"]
