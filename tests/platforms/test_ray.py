"""``tfps submit --to=ray`` on a real Ray: a cluster of two nodes, and one that the job starts for itself."""

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import (
    ECHO,
    NASTY,
    Process,
    argv_of,
    children_of,
    load_variable,
    processes,
    run_tfps,
    session_leaders,
    slow,
    summary,
    wait_gone,
)
from support.ray_engine import NOT_NICE, OTHER, RayCluster, ray_cluster, short_path

LONG = ("--model=linear", "--max_steps=100000000", "--steps_to_validate=200", "--save_checkpoint_secs=2")


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    """Yield the cluster that the tests share."""
    with ray_cluster() as cluster:
        yield cluster


def _tasks_of(model_dir: Path, role: str = "") -> list[int]:
    """Return the processes, but not their shells, that run tasks of a job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (argv := _argv(entry)) and f"--model_dir={model_dir}" in argv and role in argv:
            found += [int(entry.name)] if "sh" not in argv[:1] else []
    return found


def _argv(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _states(cluster: RayCluster, handle: str) -> dict[str, tuple[str, ...]]:
    """Return the state, exit code and restarts of each task, as ``tfps status`` shows them."""
    shown = cluster.tfps("status", handle)
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines() if re.match(r"(ps|worker)/\d ", line)]
    return {row[0]: tuple(row[1:4]) for row in rows}


def test_without_a_cluster_a_job_brings_its_own(tmp_path: Path) -> None:
    """With no address and no Ray running, the command starts one, shows the job to its end, and leaves nothing."""
    flags = ("--model=mnist", "--max_steps=100", "--num_workers=3", f"--model_dir={tmp_path}")
    with short_path() as ours:
        env = {"HOME": str(ours), "RAY_TMPDIR": str(ours), "RAY_ADDRESS": "", **NOT_NICE}
        ended = run_tfps("submit", "--to=ray", *flags, timeout=200, cwd=ours, **env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "\ndone: step 100 after" in ended.stdout
        assert "worker/2 | done" in ended.stdout
        assert (ours / ".ray" / "auth_token").is_file()
        wait_gone(
            [int(p) for p in os.listdir("/proc") if p.isdigit() and str(ours) in " ".join(_argv(Path("/proc", p)))], 20
        )


def test_trains_on_both_nodes(ray: RayCluster, tmp_path: Path) -> None:
    """Async, with ``--wait``: exit 0, the view of ``launch``, both nodes at work, logs by task, no token in sight."""
    submitted = ray.tfps(
        *("submit", "--to=ray", f"--address={ray.address}", "--model=mnist", "--max_steps=300", "--wait"),
        *("--worker_cpu=1", "--worker_memory=100Mi", f"--model_dir={tmp_path}"),
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "\ndone: step 300 after" in submitted.stdout
    assert float(summary(tmp_path)["eval"]["accuracy"]) >= 0.85
    handle = submitted.stdout.splitlines()[0]
    shown = ray.tfps("status", handle).stdout
    assert f"{handle}  SUCCEEDED" in shown
    flat = re.sub(r"\s+", "", shown)
    assert len(set(re.findall(r"onnode([0-9a-f]{12})", flat))) == 2
    log = ray.tfps("logs", handle, "--task=worker:1").stdout
    assert "done: " in log
    assert "|" not in log
    whole = ray.tfps("logs", handle).stdout
    assert "ps/0      | done" in whole
    assert ray.token not in whole + submitted.stdout
    assert not [pid for pid in ray.processes() if any(ray.token in word for word in _argv(Path(f"/proc/{pid}")))]


def test_a_killed_worker_starts_again(ray: RayCluster, tmp_path: Path) -> None:
    """Sync: one worker is killed, starts again on its address, and each of the job's updates is the exact mean."""
    model, model_dir, steps = tmp_path / "slow.py", tmp_path / "m", 300
    model.write_text(slow(0.05))
    flags = ("--issync=1", f"--max_steps={steps}", "--steps_to_validate=10", f"--model_dir={model_dir}")
    handle = ray.submit(f"--model={model}", *flags)
    with processes() as started:
        started.append(Process(tmp_path / "followed", "logs", handle, "--follow", **ray.env))
        started[0].wait_for("worker/1  | step=", 120)
        [supervisor] = _tasks_of(model_dir, "--task_index=1")
        [victim] = session_leaders(children_of(supervisor))
        os.kill(victim, signal.SIGKILL)
        assert started[0].wait(150) == 0
        assert "worker/1  | restarted after SIGKILL (1 of 10)" in started[0].output()
    assert summary(model_dir)["global_step"] == steps
    assert load_variable(model_dir, "weight") == -1.5 * steps
    states = _states(ray, handle)
    assert {state[:3] for state in states.values()} == {("SUCCEEDED", "0", "0")}, "Ray had nothing to start again"


@pytest.mark.parametrize("killed", ["supervisor", "keeper"])
def test_what_looks_after_a_task_is_killed(ray: RayCluster, tmp_path: Path, killed: str) -> None:
    """The task ends with it, and starts again on its address when that is free: the job goes on to its end."""
    model, model_dir, steps = tmp_path / "slow.py", tmp_path / "m", 800
    model.write_text(slow(0.05))
    flags = (f"--max_steps={steps}", "--steps_to_validate=10", f"--model_dir={model_dir}")
    handle = ray.submit(f"--model={model}", *flags)
    ray.wait_for(handle, "worker/1  | step=")
    [supervisor] = _tasks_of(model_dir, "--task_index=1")
    keeper = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor if killed == "supervisor" else keeper, signal.SIGKILL)
    with processes() as started:
        started.append(Process(tmp_path / "followed", "logs", handle, "--follow", **ray.env))
        assert started[0].wait(150) == 0
    states = _states(ray, handle)
    assert {state[:2] for state in states.values()} == {("SUCCEEDED", "0")}
    assert states["worker/1"][2] == "1"
    assert summary(model_dir)["global_step"] == steps


def test_cancel_lets_the_tasks_save(ray: RayCluster, tmp_path: Path) -> None:
    """``cancel`` returns when all tasks have saved and ended with 143; before, no second job takes the name."""
    handle = ray.submit(*LONG, "--name=twice", f"--model_dir={tmp_path}")
    ray.wait_for(handle, "worker/0  | step=")
    again = ray.tfps("submit", "--to=ray", f"--address={ray.address}", "--name=twice")
    assert again.returncode == 2
    assert "runs: cancel it, or give another" in again.stderr
    cancelled = ray.tfps("cancel", handle)
    assert cancelled.returncode == 0, cancelled.stderr
    assert _tasks_of(tmp_path) == []
    assert {state[:2] for state in _states(ray, handle).values()} == {("CANCELLED", "143")}
    log = ray.tfps("logs", handle, "--task=worker:0").stdout
    assert re.search(r"saved .*\nstopped by SIGTERM\n\Z", log)


def test_values_arrive_as_they_are(ray: RayCluster, tmp_path: Path) -> None:
    """Quotes, newlines, ``$()`` and what looks like YAML arrive in every task exactly as given."""
    model = tmp_path / "echo.py"
    model.write_text(ECHO)
    model_dir = f"{tmp_path}/{NASTY}"
    handle = ray.submit(f"--model={model}", f"--model_dir={model_dir}", "--max_steps=2")
    ray.wait_for(handle, "worker/1  | done")
    argv = argv_of(ray.tfps("logs", handle, "--task=worker:1").stdout)
    assert f"--model_dir={model_dir}" in argv
    assert (Path(model_dir) / "checkpoint").is_file()
    assert not list(tmp_path.rglob("spoilt"))


def test_a_task_that_fails_for_good_fails_the_job(ray: RayCluster, tmp_path: Path) -> None:
    """An exit code below 128 is the job's, nothing starts again, and ``status`` says why."""
    flags = ("--model=linear", "--learning_rate=1e30", "--max_steps=100", f"--model_dir={tmp_path}", "--wait")
    ended = ray.tfps("submit", "--to=ray", f"--address={ray.address}", *flags)
    assert ended.returncode == 66, ended.stdout + ended.stderr
    handle = ended.stdout.splitlines()[0]
    states = _states(ray, handle)
    assert ("FAILED", "66", "0") in states.values()
    assert {state[2] for state in states.values()} == {"0"}
    assert re.search(r"FAILED: worker/\d: .*the loss", ray.tfps("status", handle).stdout)


def test_a_task_that_has_used_up_its_restarts_fails_the_job(ray: RayCluster, tmp_path: Path) -> None:
    """The job ends as the worker that is killed again and again, though the driver has started it once more."""
    model = tmp_path / "killed.py"
    model.write_text(f"import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n{slow(0.05)}")
    flags = (f"--model={model}", "--max_restarts=1", "--num_workers=1", f"--model_dir={tmp_path / 'm'}", "--wait")
    ended = ray.tfps("submit", "--to=ray", f"--address={ray.address}", *flags)
    assert ended.returncode == 137, ended.stdout + ended.stderr
    states = _states(ray, ended.stdout.splitlines()[0])
    assert states["worker/0"][:2] == ("FAILED", "137")
    assert states["ps/0"][1] == "67"


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (["--worker_gpu=8"], {}, r"error: --worker_gpu=8: no node of the Ray cluster has more than 0 GPU"),
        (["--num_workers=20"], {}, r"error: the job asks for 21 CPU, but all nodes .* together have 6"),
        ([], {"RAY_AUTH_TOKEN": "0" * 64}, r"error: ray: Authentication failed: .*[Ii]nvalid authentication token"),
        (["--address=127.0.0.1:9"], {}, r"error: ray: Failed to connect to Ray at address: http://127.0.0.1:9\."),
    ],
)
def test_what_ray_cannot_take_is_said_at_once(
    ray: RayCluster, flags: list[str], env: dict[str, str], words: str
) -> None:
    """Too many GPUs or tasks, a wrong token, no cluster: one plain line, and nothing is submitted."""
    address = [] if any(flag.startswith("--address=") for flag in flags) else [f"--address={ray.address}"]
    ended = ray.tfps("submit", "--to=ray", "--name=refused", *address, *flags, **env)
    assert ended.returncode == (69 if "error: ray" in words else 2), ended.stdout + ended.stderr
    assert re.fullmatch(words + r".*\n", ended.stderr)
    assert ended.stdout == ""
    assert '"refused"' not in _jobs(ray)


def _jobs(cluster: RayCluster) -> str:
    headers = {"Authorization": f"Bearer {cluster.token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{cluster.address}/api/jobs/", headers=headers)
    ) as answer:
        return str(answer.read().decode())


def test_a_job_or_a_task_that_is_not_there(ray: RayCluster) -> None:
    """A handle that the cluster does not know gets Ray's words and exit 69; the address may come from RAY_ADDRESS."""
    ended = ray.tfps("status", "ray:nope", RAY_ADDRESS=f"http://{ray.address}")
    assert ended.returncode == 69
    assert ended.stderr == "error: ray: Request failed with status code 404: Job nope does not exist.\n"


def test_a_lost_node_and_a_lost_driver(ray: RayCluster, tmp_path: Path) -> None:
    """With a node lost, the cluster forms anew and goes on from a checkpoint; a killed driver takes all tasks along."""
    handle = ray.submit(*LONG, f"--model_dir={tmp_path}")
    ray.wait_for(handle, "worker/0  | saved ")
    ray.lose(OTHER)
    assert "| resumed from" in ray.wait_for(handle, "| resumed from")
    assert {state[:2] for state in _states(ray, handle).values()} == {("RUNNING", "1")}  # without an exit code
    tasks = _tasks_of(tmp_path, "--job_name=worker") + _tasks_of(tmp_path, "--job_name=ps")
    [driver] = _drivers(ray, tmp_path)
    os.kill(driver, signal.SIGKILL)
    wait_gone(tasks, 60)
    deadline = time.monotonic() + 100
    while "  FAILED" not in (shown := ray.tfps("status", handle).stdout):
        assert time.monotonic() < deadline, shown
        time.sleep(0.5)


def _drivers(cluster: RayCluster, model_dir: Path) -> list[int]:
    """Return the processes of a job's driver."""
    argvs = {pid: _argv(Path(f"/proc/{pid}")) for pid in cluster.processes()}
    return [
        pid for pid, argv in argvs.items() if "tfps.launchers.ray.driver" in argv and str(model_dir) in " ".join(argv)
    ]
