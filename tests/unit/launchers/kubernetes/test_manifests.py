"""What holds for the manifests of all Kubernetes platforms, as they are written and as a YAML reader reads them."""

from typing import Any

import kubernetes_validate
import pytest
from support.fake_kubernetes import expand
from support.jobs import job_of
from support.kubernetes_jobs import FULL, PLATFORMS, SERVICE, SMALL, changed, kind_of, objects_of, plan_of, templates
from support.processes import NASTY, golden, run_tfps

from tfps.errors import ConfigError
from tfps.jobs.spec import Job
from tfps.launchers.registry import LAUNCHERS

CORE = ("ConfigMap", "NetworkPolicy", "Service")

every_platform = pytest.mark.parametrize("platform", PLATFORMS)


NAMED = [("small", SMALL), ("full", FULL), ("without-ps", changed(SMALL, num_ps=0)), ("service", SERVICE)]


@every_platform
@pytest.mark.parametrize(("name", "job"), NAMED)
def test_the_manifest_is_the_one_checked_in(platform: str, name: str, job: Job) -> None:
    """A small job, one that asks for all there is, one without PS, a service: the plans are those of golden files."""
    job = changed(job, job.model_source, queue="high") if (platform, name) == ("volcano", "full") else job
    plan = str(plan_of(platform, job))
    assert plan == golden(f"{platform}-{name}.yaml", plan)


@every_platform
@pytest.mark.parametrize("job", [SMALL, FULL, SERVICE])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_has_every_field(platform: str, job: Job, version: str) -> None:
    """Kubernetes' own schemas, of an old and a new release, take every object and every pod template strictly."""
    own = [found for found in objects_of(platform, job) if found["kind"] in CORE or found["apiVersion"] == "batch/v1"]
    wrapped = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": template}
        for role, template in templates(platform, job).items()
    ]
    assert len(own) >= 1
    assert len(wrapped) == (1 if job is SERVICE else 2)
    for found in own + wrapped:
        assert kubernetes_validate.validate(found, f"{version}.0", strict=True) == version


def test_the_schemas_refuse_what_kubernetes_does_not_know() -> None:
    """The check would fail if a template had a field that Kubernetes does not have."""
    template = templates("kubernetes", SMALL)["ps"]
    template["spec"]["restartPolicies"] = "Never"
    wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ps"}, "template": template}
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicies"):
        kubernetes_validate.validate(wrapped, "1.37.0", strict=True)


@every_platform
@pytest.mark.parametrize("role", ["ps", "worker"])
def test_every_value_arrives_as_given(platform: str, role: str) -> None:
    """What YAML reads, once the kubelet has expanded it, is the very command, nasty values included."""
    command = templates(platform, FULL)[role]["spec"]["containers"][0]["command"]
    argv = [expand(word, {"PS_HOSTS": "P", "WORKER_HOSTS": "W", "JOB_COMPLETION_INDEX": "1"}) for word in command]
    wanted = FULL.config.for_task(
        max_restarts=10, model='/opt/model/my "model" $(id).py', data_dir=f"/data/{NASTY}", model_dir=f"/out/{NASTY}"
    )
    given = [f"--ps_hosts=P --worker_hosts=W --job_name={role} --task_index=1".split(), []]
    assert argv == ["python", "-m", "tfps", "run", *wanted.to_argv(), *given[platform in ("tfjob", "volcano")]]


@every_platform
@pytest.mark.parametrize("job", [SMALL, FULL])
def test_pods_have_no_privilege(platform: str, job: Job) -> None:
    """Every pod is non-root, cannot become more, writes only to its volumes, and has no token."""
    for template in templates(platform, job).values():
        spec = template["spec"]
        [container] = spec["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec)
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


@every_platform
def test_each_role_gets_what_it_asks_for(platform: str) -> None:
    """Requests are limits, GPUs are the workers' alone, and who asks for nothing says nothing of resources."""
    found = {role: one["spec"]["containers"][0]["resources"] for role, one in templates(platform, FULL).items()}
    ps = {"cpu": "2500m", "memory": "6Gi"}
    worker = {"cpu": "8", "memory": "500000000"}
    assert found["ps"] == {"requests": ps, "limits": ps}
    assert found["worker"] == {"requests": worker, "limits": {**worker, "nvidia.com/gpu": "8"}}
    assert "resources" not in templates(platform, SMALL)["ps"]["spec"]["containers"][0]


@pytest.mark.parametrize(("cores", "written"), [(0.1, "100m"), (0.0001, "1m"), (1.2345, "1235m"), (3.0, "3")])
def test_cores_are_written_as_kubernetes_counts_them(cores: float, written: str) -> None:
    """Processor cores are whole thousandths, rounded up."""
    container = templates("kubernetes", changed(SMALL, ps_cpu=cores))["ps"]["spec"]["containers"][0]
    assert container["resources"]["requests"] == {"cpu": written}


@every_platform
def test_only_the_jobs_own_pods_reach_its_pods(platform: str) -> None:
    """The policy selects the job's pods, lets only these in, on the one port, and out only to these and to names."""
    policy = kind_of(platform, FULL, "NetworkPolicy")["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/instance"] == "full"
    for template in templates(platform, FULL).values():
        assert labels.items() <= template["metadata"]["labels"].items()
    own = [{"podSelector": {"matchLabels": labels}}]
    port = [{"protocol": "TCP", "port": 2222}]
    names = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    assert policy["ingress"] == [{"from": own, "ports": port}]
    assert policy["egress"] == [{"to": own, "ports": port}, {"ports": names}]


def test_data_elsewhere_can_be_reached() -> None:
    """A job whose data is a URL may reach other hosts: else it could not read it."""
    policy = kind_of("kubernetes", changed(SMALL, data_dir="gs://bucket/mnist"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert "egress" not in policy


@every_platform
def test_the_namespace_is_written_only_if_given(platform: str) -> None:
    """Every object of a job with --namespace is there, and none of one without names any."""
    assert {found["metadata"].get("namespace") for found in objects_of(platform, FULL)} == {"team"}
    assert {found["metadata"].get("namespace") for found in objects_of(platform, SMALL)} == {None}


@every_platform
def test_the_comment_says_why_the_ps_end(platform: str) -> None:
    """The manifest begins with a comment that says why the parameter servers end, and what happens to the volume."""
    comment = [line for line in str(plan_of(platform, SMALL)).splitlines() if line.startswith("#")]
    assert any("The parameter servers end" in line for line in comment)
    assert any("Volume claims that must exist: tfps." in line for line in comment)
    assert all(len(line) <= 122 for line in comment)


def test_the_comment_says_what_each_directory_of_a_node_is_for() -> None:
    """A line for each: one that is mounted with ``:ro`` need not be the user's to write to."""
    job = changed(FULL, volumes="/mnt/out:/out,/mnt/data:/data:ro,claim:/else:ro", model_dir="/out/m")
    comment = [line for line in str(plan_of("kubernetes", job)).splitlines() if line.startswith("# The directory")]
    assert comment == [
        "# The directory /mnt/out must be on every node, for user 1000 to write to.",
        "# The directory /mnt/data must be on every node, for user 1000 to read.",
    ]


@every_platform
def test_names_stay_within_limits(platform: str) -> None:
    """With the longest name, every name and label of a job of 4096 tasks a role is at most 63 characters long."""
    name = "a" * 40
    found = [
        one["metadata"]["name"] for one in objects_of(platform, job_of(name, num_ps=1, num_workers=2, model="mnist"))
    ]
    longest = f"{name}-worker-0-4095-abcde" if platform == "jobset" else f"{name}-worker-4095-abcde"
    assert max(map(len, [*found, longest])) <= 63


@every_platform
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data_dir": "mnist"}, "--data_dir=mnist is no path in the containers"),
        ({"volumes": "My_Data:/data"}, "--volumes: My_Data is no name of a PersistentVolumeClaim"),
        ({"volumes": "/mnt/../etc:/data"}, "--volumes: /mnt/../etc has a .. in it"),
        ({"model_dir": "/elsewhere"}, "--model_dir=/elsewhere is on no volume"),
    ],
)
def test_bad_input_is_found_in_the_plan(platform: str, changes: dict[str, Any], problem: str) -> None:
    """What the cluster or the tasks would refuse is said before anything is sent."""
    with pytest.raises(ConfigError) as reported:
        plan_of(platform, changed(job_of("a" * 30, num_ps=1, num_workers=2, model="mnist"), **changes))
    assert problem in str(reported.value)


def test_volumes_may_be_mounted_anywhere_but_over_the_model() -> None:
    """A volume at /tmp takes the place of the pod's own; one at the model's place is an error."""
    spec = templates("kubernetes", changed(SMALL, volumes="scratch:/tmp"))["ps"]["spec"]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "volume-0", "mountPath": "/tmp"}]
    with pytest.raises(ConfigError, match="where the model's file goes"):
        plan_of("kubernetes", changed(FULL, "", volumes="a:/opt/model,b:/out,c:/data"))


@every_platform
def test_a_dry_run_needs_no_kubectl(platform: str) -> None:
    """--dry_run prints the manifest alone, on a machine without kubectl; submitting there says what to install."""
    argv = ("submit", f"--to={platform}", "--name=mnist", "--model=mnist", "--num_ps=1", "--num_workers=2")
    printed = run_tfps(*argv, "--dry_run", PATH="/nowhere")
    assert (printed.returncode, printed.stderr, printed.stdout) == (0, "", f"{plan_of(platform, SMALL)}\n")
    refused = run_tfps(*argv, PATH="/nowhere")
    assert (refused.returncode, refused.stdout) == (69, "")
    assert refused.stderr.startswith("error: kubectl is not installed: install it")


@every_platform
@pytest.mark.parametrize("name", ["", "Mnist", "team/", "a/b/c", "mnist;id", "-n"])
def test_a_handle_is_read_strictly(platform: str, name: str) -> None:
    """What is no NAME or NAMESPACE/NAME never reaches kubectl's command line."""
    with pytest.raises(ConfigError, match="is not a job handle: write"):
        LAUNCHERS.load(platform).find(name)


def test_a_flag_of_another_platform_is_refused() -> None:
    """--queue is Volcano's; with plain Jobs it is an error, not ignored."""
    ended = run_tfps("submit", "--to=kubernetes", "--queue=high", "--dry_run")
    assert ended.returncode == 2
    assert "--queue is not supported with --to=kubernetes" in ended.stderr


def test_small_is_what_the_defaults_are() -> None:
    """The small golden files show what a job without any flag but its model gets."""
    assert objects_of("kubernetes", job_of("mnist", model="mnist")) == objects_of("kubernetes", SMALL)
