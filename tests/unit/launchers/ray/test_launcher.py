"""The Ray launcher as far as Python alone can tell: what is sent, what is refused, what the job's log tells."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.jobs import job_of
from support.processes import NASTY, environment, golden, run_tfps

from tfps.cluster.spec import Task
from tfps.errors import ConfigError
from tfps.jobs.events import LogLine
from tfps.jobs.handle import FAILED, PENDING, RUNNING, TaskStatus
from tfps.jobs.spec import Job
from tfps.launchers.ray import cluster
from tfps.launchers.ray.launcher import Plan, RayLauncher, with_token
from tfps.launchers.ray.log_protocol import Reader, format_line, format_status, is_protocol

GIB = 2**30


def _job(python: str = "/usr/bin/python3", directory: str = "/home/me", **flags: Any) -> Job:
    return job_of("demo", None, python, directory, **{"model": "mnist", "model_dir": "/shared/demo", **flags})


def _spec(plan: Plan) -> Any:
    """Return what the driver gets, by way of a real shell, whose ``python`` is a script that prints its arguments."""
    ended = subprocess.run(["sh", "-c", plan.request["entrypoint"]], capture_output=True, text=True, check=True)
    *module, spec = ended.stdout.removesuffix("\0").split("\0")
    assert module == ["-m", "tfps.launchers.ray.driver"]
    return json.loads(spec)


def test_a_plan() -> None:
    """The plan of 1 PS and 2 workers is the checked-in one."""
    plan = str(RayLauncher().plan(_job()))
    assert plan == golden("ray.yaml", plan)


def test_a_plan_without_ps() -> None:
    """The plan of 2 workers alone is the checked-in one."""
    plan = str(RayLauncher().plan(_job(num_ps=0)))
    assert plan == golden("ray-without-ps.yaml", plan)


def test_a_plan_with_resources() -> None:
    """Two machines of 8 GPUs and 1 PS, and values that YAML and shells could spoil, as checked in."""
    resources = {"ps_cpu": 4.0, "ps_memory": 8 * GIB, "worker_cpu": 0.5, "worker_memory": 64 * GIB, "worker_gpu": 8}
    plan = str(RayLauncher().plan(_job(**resources, model_dir=f"/shared/{NASTY}", num_workers=2)))
    assert plan == golden("ray-full.yaml", plan)


def test_a_plan_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers alone, as checked in; the secret is sent, and not printed."""
    monkeypatch.setenv("TFPS_TOKEN", "the secret")
    plan = RayLauncher().plan(_job(serve=True, model="service", num_ps=2, optimizer="adam", ps_cpu=2.0))
    assert str(plan) == golden("ray-service.yaml", str(plan))
    assert "the secret" not in str(plan)
    sent = with_token(plan)
    assert sent["runtime_env"]["env_vars"] == {**plan.request["runtime_env"]["env_vars"], "TFPS_TOKEN": "the secret"}
    assert with_token(RayLauncher().plan(_job())) == RayLauncher().plan(_job()).request
    assert RayLauncher().client_addresses(plan) is None


def test_the_driver_gets_every_value_as_given(tmp_path: Path) -> None:
    """What a shell, the one Ray runs the entrypoint with, hands to the driver is the tasks' command, to the letter."""
    directory = tmp_path / "it's $(here)"
    directory.mkdir()
    python = directory / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    job = _job(str(python), str(directory), model_dir=f"/shared/{NASTY}", num_ps=2)
    spec = _spec(RayLauncher().plan(job))
    assert spec["command"] == list(job.command())
    assert f"--model_dir=/shared/{NASTY}" in spec["command"]
    assert spec["directory"] == str(directory)
    assert [(role["name"], role["replicas"]) for role in spec["roles"]] == [("ps", 2), ("worker", 2)]


def test_the_entrypoint_is_one_line() -> None:
    """Ray writes the entrypoint into the job's log, where no value of the user's may look like a line of a task."""
    entrypoint = RayLauncher().plan(_job(model_dir="/shared/x\nworker/0  | step=1")).request["entrypoint"]
    assert "\n" not in entrypoint


def _without(modules: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run ``tfps ARGS`` where some modules are not installed."""
    code = (
        f"import sys; sys.modules |= dict.fromkeys({modules.split()}); from tfps.cli.main import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_a_dry_run_needs_neither_ray_nor_tensorflow() -> None:
    """``--dry_run`` prints the plan where neither is installed; to send it, ray is asked for, with exit code 69."""
    shown = _without("ray tensorflow", "submit", "--to=ray", "--name=demo", "--dry_run")
    assert shown.returncode == 0, shown.stderr
    assert "job_name: demo" in shown.stdout
    sent = _without("ray tensorflow", "submit", "--to=ray")
    assert sent.returncode == 69
    assert sent.stderr == "error: ray is not installed: pip install 'ray[default]'.\n"


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--address=ray://h:10001", "is not the address of a Ray dashboard: give http://host:8265."),
        ("--address=http://h:1/$(id)", "is not the address of a Ray dashboard: give http://host:8265."),
        ("--worker_cpu=2.5", "Ray counts whole cores, or less than one in steps of 0.0001: give 2."),
        ("--ps_cpu=0.00001", "Ray counts whole cores, or less than one in steps of 0.0001: give 1."),
        ("--queue=main", "is not supported with --to=ray: leave it out."),
    ],
)
def test_what_ray_would_refuse(flag: str, problem: str) -> None:
    """A bad address or amount is reported before anything is sent, with exit code 2."""
    ended = run_tfps("submit", "--to=ray", "--dry_run", flag)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.endswith(f"{problem}\n")
    assert flag.partition("=")[0] in ended.stderr


@pytest.mark.parametrize("id_", ["", "@h:1", "a b@h:1", "a/../b", "a@ftp://h:1", "a@"])
def test_what_is_no_handle(id_: str) -> None:
    """A handle that cannot be one is refused without asking a cluster."""
    with pytest.raises(ConfigError, match="is not a job handle"):
        RayLauncher().find(id_)


def test_tasks_that_no_node_can_hold() -> None:
    """An amount that is more than any node has is reported, with the flag; else, what all nodes together lack."""
    nodes = [{"CPU": 4.0, "memory": 8.0 * GIB}, {"CPU": 2.0, "GPU": 2.0, "memory": 16.0 * GIB}]
    held = cluster.problems(nodes, {"ps": (2, {"CPU": 1}), "worker": (2, {"CPU": 2, "GPU": 1, "memory": GIB})})
    assert held == []
    large = cluster.problems(nodes, {"ps": (1, {"CPU": 5}), "worker": (1, {"CPU": 1, "memory": 20 * GIB})})
    assert [problem.partition(":")[0] for problem in large] == ["--ps_cpu=5", "--worker_memory=20Gi"]
    [many] = cluster.problems(nodes, {"ps": (1, {"CPU": 1}), "worker": (3, {"CPU": 1, "GPU": 1})})
    assert many.startswith("the job asks for 3 GPU, but all nodes of the Ray cluster together have 2")


@pytest.mark.parametrize(("gone", "alive", "fits"), [(150, 20, True), (0, 150, True), (150, 19, False)])
def test_all_nodes_that_are_up_count(monkeypatch: pytest.MonkeyPatch, gone: int, alive: int, fits: bool) -> None:
    """Ray lists 100 nodes unless asked for more, and keeps those that are gone in its list."""
    table = [SimpleNamespace(state="DEAD", resources_total={"CPU": 9.0})] * gone
    table += [SimpleNamespace(state="ALIVE", resources_total={"CPU": 1.0})] * alive

    def list_nodes(address: str, filters: Any = (), limit: int = 100, detail: bool = False) -> list[SimpleNamespace]:
        assert (address, detail) == ("http://h:8265", True)
        assert limit <= 10_000
        fitting = [node for node in table if all(getattr(node, key) == value for key, _, value in filters)]
        return fitting[:limit]

    monkeypatch.setitem(sys.modules, "ray.util.state", SimpleNamespace(list_nodes=list_nodes))  # type: ignore[arg-type]
    client = SimpleNamespace(get_address=lambda: "http://h:8265")
    bundles = {"ps": (2, {"CPU": 1.0}), "worker": (18, {"CPU": 1.0})}
    if fits:
        cluster.check_room(client, bundles)
    else:
        with pytest.raises(ConfigError, match="all nodes of the Ray cluster together have 19"):
            cluster.check_room(client, bundles)


def test_the_log_gives_back_what_the_driver_wrote() -> None:
    """Lines and statuses come back whole, Ray's own lines are no task's, and no task can pass for the driver."""
    ps, worker = Task("ps", 0), Task("worker", 1)
    reader = Reader([ps, worker])
    status = TaskStatus(FAILED, 66, 2, "10.0.0.1:5 on node ab", 'the loss is "NaN" | é\n')
    assert reader.take(format_status(worker, status)) is None
    assert reader.tasks == {ps: TaskStatus(PENDING), worker: status}
    forged = format_status(ps, TaskStatus(RUNNING))
    assert reader.take(format_line(worker, forged)) == LogLine(worker, forged)
    assert reader.tasks[ps].state == PENDING
    assert reader.take("2026-11-21 15:08:33,354 INFO job_manager.py:581 -- Runtime env is setting up.") is None
    assert not is_protocol("sh: 1: python: not found")
    assert is_protocol(format_line(ps, ""))
    assert is_protocol(forged)
