"""Jobs on Kubernetes, driven by the real kubectl from end to end; the cluster behind it is a stand-in on loopback."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import Cluster, Pod, expand, kubeconfig, serve
from support.kubernetes_jobs import PLATFORMS, SMALL, plan_of
from support.processes import (
    ECHO,
    NASTY,
    POWERS,
    Process,
    alive,
    argv_of,
    children_of,
    processes,
    session_leaders,
    slow,
)

from tfps.cli.main import main
from tfps.cluster.ports import held_ports
from tfps.errors import PlatformError
from tfps.launchers.kubernetes import kubectl
from tfps.launchers.kubernetes.jobs import JobsLauncher

KINDS = {
    "kubernetes": ["ConfigMap", "NetworkPolicy", "Service", "Job", "Job"],
    "tfjob": ["NetworkPolicy", "TFJob"],
    "volcano": ["NetworkPolicy", "Job"],
    "jobset": ["ConfigMap", "NetworkPolicy", "JobSet"],
}
GROUPS = {"tfjob": "kubeflow.org", "volcano": "batch.volcano.sh", "jobset": "jobset.x-k8s.io"}
VERBS = ("status", "logs", "cancel")
SECS = 300.0
REFUSALS = ["Error from server: no", 'Error from server (Forbidden): services "a" is forbidden: exceeded quota: team']
LOST_ANSWERS = ["Unable to connect to the server: context deadline exceeded", "kubectl has not answered for 60 s"]

every_platform = pytest.mark.parametrize("platform", PLATFORMS)
two_platforms = pytest.mark.parametrize("platform", ["kubernetes", "tfjob"])  # one keeps ended pods, one deletes them


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a cluster whose pods a test moves, and make it kubectl's."""
    with serve(tmp_path) as (found, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield found


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a cluster whose pods are processes, and make it kubectl's."""
    (tmp_path / "out").mkdir()
    with serve(tmp_path, runs=True) as (found, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield found


def tfps(*args: str, code: int = 0) -> str:
    """Return what tfps prints; fails if it does not end with ``code``."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as complained:
        ended = main(args)
    assert ended == code, f"{said.getvalue()}\n{complained.getvalue()}"
    return complained.getvalue() if code else said.getvalue()


def submit(platform: str, *flags: str, code: int = 0) -> str:
    """Submit the small job."""
    model = [] if any(flag.startswith("--model=") for flag in flags) else ["--model=mnist"]
    return tfps("submit", f"--to={platform}", "--name=mnist", *model, *flags, code=code)


def wait_until(happens: Callable[[], object]) -> None:
    """Wait for something that happens elsewhere."""
    deadline = time.monotonic() + SECS
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(platform: str, name: str = "mnist") -> dict[str, list[str]]:
    """Return the words of each row that ``tfps status`` prints; the job's own is the handle's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")  # a row is a line
        found = [line.split() for line in tfps("status", f"{platform}:{name}").splitlines()]
    return {words[0]: words[1:] for words in found if words}


@every_platform
def test_what_kubectl_sends_is_the_plan(platform: str, cluster: Cluster) -> None:
    """The cluster gets, as JSON, each object as it was planned; the handle says where kubectl's namespace put it."""
    assert submit(platform) == f"{platform}:team/mnist\n"
    sent = [
        {**one, "metadata": {k: v for k, v in one["metadata"].items() if k != "namespace"}} for one in cluster.received
    ]
    assert sent == plan_of(platform, SMALL).objects
    assert cluster.kinds() == KINDS[platform]


@every_platform
def test_a_nasty_value_comes_through_kubectl(platform: str, cluster: Cluster, tmp_path: Path) -> None:
    """What kubectl's YAML reader sends, expanded as the kubelet does, is the very command and the very model file."""
    model = tmp_path / 'my "model" $(id).py'
    model.write_text(ECHO)
    nasty = (f"--data_dir=/data/{NASTY}", f"--model_dir=/out/{NASTY}")
    flags = (f"--model={model}", *nasty, "--volumes=/mnt/out:/out", "--namespace=other")
    assert submit(platform, *flags) == f"{platform}:other/mnist\n"
    assert {key[2] for key in cluster.objects} == {"other"}
    argv = cluster.argv(cluster.pod("worker", 1))
    assert [word for word in argv if word.startswith(("--model", "--data"))] == [
        '--model=/opt/model/my "model" $(id).py',
        *nasty,
    ]
    assert cluster.file("other", {"name": "mnist", "key": "model"}) == ECHO


@two_platforms
def test_a_job_that_is_there_stays_untouched(platform: str, cluster: Cluster) -> None:
    """A second job of the same name is refused, saying what to do, and takes nothing of the first along."""
    submit(platform)
    before = dict(cluster.objects)
    reported = submit(platform, code=2)
    assert reported == (
        "error: --name=mnist is taken: a job of this name exists. Give another name, or end that one and take its "
        f"objects away: tfps cancel {platform}:mnist.\n"
    )
    assert cluster.objects == before
    assert "DELETE" not in [method for method, _ in cluster.requests]


@every_platform
def test_half_a_job_is_taken_back(platform: str, cluster: Cluster) -> None:
    """When the cluster refuses one object, those that this call has created go again, and nothing else."""
    other = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "theirs"}}
    cluster.create("v1", "services", "team", other)
    cluster.refused[KINDS[platform][-1]] = "admission webhook denied the request: no quota"
    reported = submit(platform, code=69)
    assert reported.startswith("error: kubectl create: Error from server (Forbidden): ")
    assert "no quota" in reported
    assert [found["metadata"]["name"] for found in cluster.objects.values()] == ["theirs"]
    assert len(cluster.received) == len(KINDS[platform]) - (platform == "kubernetes")  # of its Jobs only the first


def test_what_was_there_before_a_job_is_never_deleted(cluster: Cluster) -> None:
    """Another's service of the job's name makes the job fail, and survives that, and a cancel."""
    other = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "mnist"}}
    cluster.create("v1", "services", "team", other)
    assert 'services "mnist" already exists' in submit("kubernetes", code=2)
    assert list(cluster.objects.values()) == [other]
    assert "knows no such job" in tfps("cancel", "kubernetes:mnist", code=69)
    assert list(cluster.objects.values()) == [other]


@pytest.mark.parametrize("platform", GROUPS)
def test_a_missing_operator_is_said_in_kubectls_words(platform: str, cluster: Cluster) -> None:
    """Without the platform's resource in the cluster, kubectl says so, and nothing is left of the job."""
    cluster.missing.add(GROUPS[platform])
    said = submit(platform, code=69)  # the second, where it has known the resource a moment ago
    assert "no matches for kind" in said or "could not find the requested resource" in said
    assert cluster.objects == {}
    assert "the server doesn't have a resource type" in tfps("status", f"{platform}:mnist", code=69)


def test_a_cluster_that_is_down_is_said_in_kubectls_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody answers, every command passes on why, on one plain line, with exit code 69."""
    with held_ports(1) as [port]:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, port)))
        for reported in (submit("kubernetes", code=69), *(tfps(verb, "tfjob:mnist", code=69) for verb in VERBS)):
            assert re.fullmatch("error: kubectl (create|get [a-z.,]+): .*refused.*\n", reported)


@two_platforms
def test_status_tells_what_the_pods_tell(platform: str, cluster: Cluster) -> None:
    """Pending with the scheduler's and the image puller's words, running with its node, restarts and exit codes."""
    submit(platform)
    words = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}]
    cluster.pod("worker", 1).set("Pending", {}, conditions=words)
    cluster.pod("ps", 0).set("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    reported = rows(platform)
    assert reported[f"{platform}:mnist"][0] == "PENDING:"
    assert reported["worker/1"][0] == "PENDING"
    assert " ".join(reported["worker/1"]).endswith("Unschedulable: 0/3 nodes: no gpu")
    assert " ".join(reported["ps/0"]).endswith("ImagePullBackOff: no such image")
    for pod in cluster.pods.values():
        pod.run()
    reported = rows(platform)
    assert reported[f"{platform}:mnist"] == ["RUNNING"]
    assert [reported[task][:2] for task in ("ps/0", "worker/0", "worker/1")] == [["RUNNING", "0"]] * 3
    assert reported["ps/0"][-2:] == ["on", "node-1"]


@every_platform
def test_status_tells_how_a_job_has_failed(platform: str, cluster: Cluster) -> None:
    """A worker's exit code that is permanent fails the job, whose row says why; the culprit comes first."""
    submit(platform)
    for pod in cluster.pods.values():
        pod.run()
    cluster.end(cluster.pod("worker", 0), 66)
    reported = rows(platform)
    assert reported[f"{platform}:mnist"][0] == "FAILED:"
    assert "exit code 66" in " ".join(reported[f"{platform}:mnist"])
    assert next(task for task in reported if "/" in task) == "worker/0"
    assert reported["worker/0"][:2] == ["FAILED", "66"]


def test_a_replaced_pod_counts_as_a_restart(cluster: Cluster) -> None:
    """The pods that a Job keeps of a task's earlier tries are its restarts, and the last exit code is shown."""
    submit("kubernetes")
    cluster.pod("ps", 0).run()
    cluster.end(cluster.pod("ps", 0), 137)
    assert rows("kubernetes")["ps/0"][:3] == ["PENDING", "137", "1"]


@every_platform
def test_refused_pods_are_reported(platform: str, cluster: Cluster, tmp_path: Path) -> None:
    """Where the cluster refuses pods (quota, PodSecurity, LimitRange), status and --wait say so in its words."""
    cluster.refused["Pod"] = 'pods "x" is forbidden: exceeded quota: compute'
    with processes() as started:
        waiting = Process(tmp_path / "waited", "submit", f"--to={platform}", "--name=mnist", "--model=mnist", "--wait")
        started.append(waiting)
        waiting.wait_for("waiting: FailedCreate: Error creating: pods", SECS)
        assert waiting.output().count("exceeded quota") == 1, "once is enough"
    reported = rows(platform)
    assert reported[f"{platform}:mnist"][0] == "PENDING:"
    for row in (f"{platform}:mnist", "ps/0", "worker/1"):
        assert "FailedCreate: Error creating:" in " ".join(reported[row])
        assert "exceeded quota: compute" in " ".join(reported[row])


def test_another_jobs_events_are_not_taken_for_ones_own(cluster: Cluster) -> None:
    """A job whose pods are on their way has nothing of the refusals of another."""
    cluster.refused["Pod"] = "no quota"
    tfps("submit", "--to=kubernetes", "--name=other", "--model=mnist")
    del cluster.refused["Pod"]
    submit("kubernetes")
    assert "quota" not in tfps("status", "kubernetes:mnist")
    assert "no quota" in tfps("status", "kubernetes:other")


@every_platform
def test_what_the_cluster_warns_of_is_shown(
    platform: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning that kubectl prints as it creates an object is on standard error; the handle alone on the other."""
    cluster.warned[KINDS[platform][-1]] = "would violate PodSecurity restricted:latest"
    assert main(["submit", f"--to={platform}", "--name=mnist", "--model=mnist"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{platform}:team/mnist\n"
    assert "Warning: would violate PodSecurity restricted:latest" in printed.err


def test_a_pod_in_the_back_off_is_waited_for(cluster: Cluster) -> None:
    """Between a killed pod and the next, the task is pending, and status says for what."""
    cluster.backoff_secs = (3600.0, 3600.0)
    submit("kubernetes")
    for pod in cluster.pods.values():
        pod.run()
    cluster.end(cluster.pod("worker", 1), 137)
    reported = rows("kubernetes")
    assert reported["worker/1"][:2] == ["PENDING", "137"]
    assert "the cluster makes another after a back-off" in " ".join(reported["worker/1"])


@every_platform
def test_what_has_ended_does_not_stay_for_ever(platform: str, cluster: Cluster) -> None:
    """The cluster deletes a job a week after its end, and with it all that is beside it, which the job owns."""
    submit(platform)
    *beside, job = list(cluster.objects.values())
    ttl = job["spec"].get("ttlSecondsAfterFinished") or job["spec"]["runPolicy"]["ttlSecondsAfterFinished"]
    assert ttl == 7 * 24 * 3600
    for found in beside:
        if found["kind"] == "Job":  # of another role, and with such a time itself
            assert found["spec"]["ttlSecondsAfterFinished"] == ttl
            continue
        [owner] = found["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["name"]) == (job["metadata"]["uid"], job["metadata"]["name"])
        assert (owner["apiVersion"], owner["kind"]) == (job["apiVersion"], job["kind"])


@every_platform
def test_the_network_policy_can_be_left_out(platform: str, cluster: Cluster) -> None:
    """With --network_policy=0 there is none, and the manifest says what that means."""
    submit(platform, "--network_policy=0")
    assert cluster.kinds() == [kind for kind in KINDS[platform] if kind != "NetworkPolicy"]
    assert "no NetworkPolicy keeps others away" in submit(platform, "--network_policy=0", "--dry_run")


@pytest.mark.parametrize(
    ("platform", "stuck"), [("kubernetes", ("Job", "mnist-worker")), ("jobset", ("JobSet", "mnist"))]
)
def test_cancel_tries_everything(
    platform: str, stuck: tuple[str, str], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not go, as a finalizer or a lost node keeps it, is reported, and keeps nothing else from going."""
    monkeypatch.setattr(kubectl, "POD_DELETE_SECS", 2)
    submit(platform)
    cluster.stuck.add(stuck)
    reported = tfps("cancel", f"{platform}:mnist", code=69)
    assert "timed out" in reported
    assert f"{platform}:mnist is asked to stop, but not all of it has gone: cancel it again." in reported
    assert [(found["kind"], found["metadata"]["name"]) for found in cluster.objects.values()] == [stuck]
    assert "CANCELLED: being deleted" in tfps("status", f"{platform}:mnist")


def test_an_unknown_job_is_an_error(cluster: Cluster) -> None:
    """A job that is not there is an error of every command, with exit code 69."""
    for verb in VERBS:
        assert "knows no such job" in tfps(verb, "kubernetes:team/nobody", code=69)


@every_platform
def test_logs_are_each_tasks_own(platform: str, cluster: Cluster) -> None:
    """Logs of all tasks have each line after its task's name; those of one have them bare; a waiting one says why."""
    submit(platform)
    assert "worker/0 has not started: ContainerCreating" in tfps(
        "logs", f"{platform}:mnist", "--task=worker:0", code=69
    )
    for pod in cluster.pods.values():
        pod.run()
        pod.say(f"I am {pod.name[:14]}")
    assert re.fullmatch(
        r"ps/0 +\| I am mnist-ps-0.*\nworker/0 +\| I am mnist-worker-0.*\nworker/1 +\| I am mnist-worker-.*\n",
        tfps("logs", f"{platform}:mnist"),
    )
    assert tfps("logs", f"{platform}:mnist", "--task=worker:0").startswith("I am mnist-worker-0")
    assert "has no task worker/2: it has ps/0, worker/0, worker/1" in tfps(
        "logs", f"{platform}:mnist", "--task=worker:2", code=2
    )


@two_platforms
def test_followed_logs_survive_broken_streams_and_replaced_pods(
    platform: str, cluster: Cluster, tmp_path: Path
) -> None:
    """--follow loses and repeats no line when a stream breaks, goes on with the next pod, and ends with the job."""
    submit(platform)
    for pod in cluster.pods.values():
        pod.run()
    first = cluster.pod("worker", 0)
    first.cut_after = 2
    for n in range(4):
        first.say(f"line {n}")
    with processes() as started:
        follower = Process(tmp_path / "followed", "logs", f"{platform}:mnist", "--follow")
        started.append(follower)
        follower.wait_for("line 3", SECS)
        first.say("last words")
        follower.wait_for("last words", SECS)
        cluster.end(first, 143)
        second = cluster.pod("worker", 0)
        assert second is not first
        second.run()
        second.say("back again")
        follower.wait_for("back again", SECS)
        for pod in [pod for pod in cluster.pods.values() if not pod.ended]:
            cluster.end(pod, 0)
        assert follower.wait(SECS) == 0
    said = [line.partition("| ")[2] for line in follower.output().splitlines() if line.startswith("worker/0")]
    assert said == ["line 0", "line 1", "line 2", "line 3", "last words", "back again"]


def test_interrupted_followers_leave_no_kubectl_behind(cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C ends tfps logs --follow, and submit --wait with 143, and every kubectl that they have started."""
    submit("kubernetes")
    with processes() as started:
        for n, args in enumerate(
            [("logs", "kubernetes:mnist", "--follow"), ("submit", "--to=tfjob", "--name=b", "--wait")]
        ):
            follower = Process(tmp_path / f"followed-{n}", *args)
            started.append(follower)
            wait_until(lambda pods=3 * (n + 1): len(cluster.pods) == pods)
            for pod in cluster.pods.values():
                pod.run()
                pod.say(f"hello {n}")
            follower.wait_for(f"hello {n}", SECS)
            kubectls = children_of(follower.pid)
            assert kubectls
            follower.signal(signal.SIGINT)
            assert follower.wait(SECS) == 143
            wait_until(lambda pids=kubectls: not alive(pids))
    assert "TFJob" in cluster.kinds()  # it goes on


@two_platforms
def test_waiting_ends_as_the_job_does(platform: str, cluster: Cluster, tmp_path: Path) -> None:
    """--wait exits with the exit code of the worker that failed, not with that of a ps that it took along."""
    with processes() as started:
        waiting = Process(tmp_path / "waited", "submit", f"--to={platform}", "--name=mnist", "--model=mnist", "--wait")
        started.append(waiting)
        wait_until(lambda: len(cluster.pods) == 3)
        for pod in cluster.pods.values():
            pod.run()
        cluster.pod("worker", 0).say("error: the loss is NaN at step 7")
        waiting.wait_for("the loss is NaN at step 7", SECS)
        cluster.pod("ps", 0).end(143)
        cluster.end(cluster.pod("worker", 0), 66)
        assert waiting.wait(SECS) == 66
    assert waiting.output().splitlines()[-2] == "error: worker/0: the loss is NaN at step 7"


@every_platform
def test_cancel_leaves_nothing_of_the_job_and_all_else(platform: str, cluster: Cluster) -> None:
    """Cancelling deletes the job first, waiting for its pods, then what is beside it; other jobs stay."""
    submit(platform)
    tfps("submit", f"--to={platform}", "--name=other", "--model=mnist")
    cluster.requests.clear()
    assert tfps("cancel", f"{platform}:mnist") == f"{platform}:mnist is cancelled\n"
    assert [found["metadata"]["name"].partition("-")[0] for found in cluster.objects.values()] == ["other"] * len(
        KINDS[platform]
    )
    assert {pod.name.partition("-")[0] for pod in cluster.pods.values()} == {"other"}
    deleted = [path.split("/")[-2] for method, path in cluster.requests if method == "DELETE"]
    jobs = KINDS[platform].count(KINDS[platform][-1])
    assert all(name in ("jobs", "tfjobs", "jobsets") for name in deleted[:jobs])
    assert set(deleted[jobs:]) <= {"configmaps", "networkpolicies", "services"}


@every_platform
def test_a_job_really_trains(platform: str, running: Cluster, tmp_path: Path) -> None:
    """Submitted and waited for, with a model of this machine's and a nasty flag, it trains to the end and exits 0."""
    model = tmp_path / "echo.py"
    model.write_text(ECHO)
    out = tmp_path / "out"
    (out / NASTY).mkdir()
    flags = ("--max_steps=20", f"--volumes={out}:{out}", f"--data_dir={out}/{NASTY}")
    reported = tfps("submit", f"--to={platform}", "--name=demo", f"--model={model}", *flags, "--wait")
    assert "\ndone: step 20 after " in reported
    assert (out / "demo" / "model.ckpt-20.index").is_file()
    status = rows(platform, "demo")
    assert status[f"{platform}:demo"] == ["SUCCEEDED"]
    assert [status[task][:3] for task in ("ps/0", "worker/0", "worker/1")] == [["SUCCEEDED", "0", "0"]] * 3
    for task in ("ps:0", "worker:0", "worker:1"):
        said = tfps("logs", f"{platform}:demo", f"--task={task}")
        assert "done" in said
        if task.startswith("worker"):
            assert f"--data_dir={out}/{NASTY}" in argv_of(said)
    tfps("cancel", f"{platform}:demo")
    assert (running.objects, running.pods) == ({}, {})
    assert (out / "demo" / "model.ckpt-20.index").is_file()


def test_a_lost_ps_costs_seconds(running: Cluster, tmp_path: Path) -> None:
    """A PS process is killed twice, where the cluster's back-off is Kubernetes' own: all step again within seconds."""
    running.backoff_secs = (10.0, 600.0)
    out = tmp_path / "out"
    model = tmp_path / "slow.py"
    model.write_text(slow(0.05))
    flags = ("--max_steps=100000000", "--steps_to_validate=5", "--save_checkpoint_secs=1", f"--volumes={out}:{out}")
    tfps("submit", "--to=kubernetes", "--name=demo", f"--model={model}", "--num_workers=3", *flags)
    workers = [running.pod("worker", index) for index in range(3)]
    wait_until(lambda: all(steps_of(pod) for pod in workers))
    wait_until(lambda: any("saved " in line for _, line in list(workers[0].lines)))
    for _ in range(2):
        before = [steps_of(pod) for pod in workers]
        os.kill(task_in(running.pod("ps", 0)), signal.SIGKILL)
        lost = time.monotonic()
        wait_until(lambda before=before: all(steps_of(p) > n + 1 for p, n in zip(workers, before, strict=True)))
        assert time.monotonic() - lost < 100
    assert [running.pod("worker", index) for index in range(3)] == workers, "no pod was replaced"


@pytest.mark.parametrize("code", [3, 77, 127])
def test_nothing_of_a_failed_job_runs_on(code: int, running: Cluster, tmp_path: Path) -> None:
    """A worker that ends with any code below 128 is not started again, and the PS end too: no process is left."""
    out = tmp_path / "out"
    model = tmp_path / "bad.py"
    model.write_text(f"import os\nos._exit({code})\n{POWERS}")
    tfps("submit", "--to=kubernetes", "--name=demo", f"--model={model}", "--num_ps=2", f"--volumes={out}:{out}")
    wait_until(lambda: all(pod.ended for pod in list(running.pods.values())))
    assert len(running.pods) == 4, "no pod was replaced"
    status = rows("kubernetes", "demo")
    assert status["kubernetes:demo"][0] == "FAILED:"
    assert ["FAILED", str(code), "0"] in [status[task][:3] for task in ("worker/0", "worker/1")]


def steps_of(pod: Pod) -> int:
    """Return how often a worker has reported a step."""
    return sum(line.startswith("step=") for _, line in list(pod.lines))


def task_in(pod: Pod) -> int:
    """Return the process in a pod that is the task: below the one that starts it again, it leads a session."""
    pid = pod.process.pid if pod.process else 0
    found: list[int] = []

    def is_there() -> bool:
        found[:] = session_leaders(children_of(pid))
        return len(found) == 1

    wait_until(is_there)
    return found[0]


def test_a_killed_worker_joins_again_and_a_cancelled_job_saves(running: Cluster, tmp_path: Path) -> None:
    """A worker that is killed is replaced and trains on; cancelling then ends every process, with the state saved."""
    out = tmp_path / "out"
    with processes() as started:
        flags = ("--max_steps=100000000", "--steps_to_validate=50", f"--volumes={out}:{out}")
        waiting = Process(tmp_path / "waited", "submit", "--to=kubernetes", "--name=demo", *flags, "--wait")
        started.append(waiting)
        waiting.wait_for("worker/1 | training", SECS)
        victim = running.pod("worker", 1)
        assert victim.process is not None
        victim.kill()
        waiting.wait_for("worker/1 | restarted after exit code 137, the 1st time", SECS)
        wait_until(lambda: any("step=" in line for _, line in running.pod("worker", 1).lines))
        assert running.pod("worker", 1) is not victim
        pids = [pod.process.pid for pod in running.pods.values() if pod.process]
        tfps("cancel", "kubernetes:demo")
        assert waiting.wait(SECS) == 143
    assert alive(pids) == []
    assert (running.objects, running.pods) == ({}, {})
    assert list((out / "demo").glob("model.ckpt-*.index"))


def test_the_check_of_commands_sees_a_value_that_was_spoilt() -> None:
    """Were a dollar not doubled, the kubelet would change the value, and the checks above would fail."""
    assert expand(NASTY, {}) != NASTY
    assert expand(NASTY.replace("$", "$$"), {"touch spoilt": "x"}) == NASTY
    assert expand("$(PS)$$(PS)$PS$(NO)$", {"PS": "p"}) == "p$(PS)$PS$(NO)$"


@pytest.mark.parametrize(
    ("said", "is_doubted"), [*((line, True) for line in LOST_ANSWERS), *((line, False) for line in REFUSALS)]
)
def test_an_object_whose_answer_was_lost_may_exist(
    monkeypatch: pytest.MonkeyPatch, said: str, is_doubted: bool
) -> None:
    """The last one is named, and not deleted, as it may be another job's; those before it are deleted."""
    plan = plan_of("kubernetes", SMALL)
    asked: list[tuple[str, ...]] = []

    def answer(_: str, *args: str, **__: Any) -> str:
        asked.append(args)
        if len(asked) == len(plan.objects):
            raise PlatformError(said)
        return "default uid"

    monkeypatch.setattr(kubectl, "_kubectl", answer)
    with pytest.raises(PlatformError) as refused:
        kubectl.submit(JobsLauncher(), plan)
    last = kubectl._name(plan.objects[-1])
    assert (f"{last} may have been created" in str(refused.value)) == is_doubted
    verb, *deleted = [arg for arg in asked[-1] if not arg.startswith("-")]
    assert verb == "delete"
    assert sorted(deleted) == sorted(map(kubectl._name, plan.objects[:-1]))
