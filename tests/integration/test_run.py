"""Tasks started one by one, as in so many shells, with nothing above them."""

import contextlib
import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from support.processes import PATIENT, POWERS, Process, by_hand, processes, run_tfps, summary

from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.launchers.local import supervisor

pytestmark = pytest.mark.slow


def _last(output: str, name: str) -> float:
    """Return the last value of a name in progress lines."""
    return float(re.findall(rf"\b{re.escape(name)}=(\S+)", output)[-1])


def test_classic_flags_train_linear_and_every_task_ends_by_itself(tmp_path: Path) -> None:
    """Three shells with the classic flags train ``linear`` to 2 and 10, and all exit 0, the PS too."""
    flags = ("--issync=0", "--model=linear", "--max_steps=600", f"--model_dir={tmp_path / 'm'}")
    with by_hand(tmp_path, 1, 2, *flags) as tasks:
        assert tasks["worker/0"].wait(120) == 0, tasks["worker/0"].output()
        ended = time.monotonic()
        assert [task.wait(100) for task in tasks.values()] == [0, 0, 0]
        assert time.monotonic() - ended < 60
        said = tasks["worker/0"].output()
    assert _last(said, "weight") == pytest.approx(2, abs=0.1)
    assert _last(said, "bias") == pytest.approx(10, abs=0.1)
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"]) == ("done", 600)
    assert sum(reported["tasks"][f"worker/{i}"]["steps"] for i in (0, 1)) == 600


def _without_model_dir(tmp_path: Path) -> str:
    """Run a PS and a worker without ``--model_dir`` to their end; returns what the worker said."""
    (tmp_path / "out").mkdir()
    with held_ports(2) as ports, processes() as started:
        cluster = [f"--ps_hosts=127.0.0.1:{ports[0]}", f"--worker_hosts=127.0.0.1:{ports[1]}", "--max_steps=20"]
        for job in ("ps", "worker"):
            me = [f"--job_name={job}", "--task_index=0"]
            started.append(Process(tmp_path / "out" / job, *cluster, *me, cwd=tmp_path / "cwd"))
        assert [task.wait(120) for task in started] == [0, 0], started[1].output()
        return started[1].output()


def test_without_model_dir_the_chief_makes_one_and_says_so(tmp_path: Path) -> None:
    """The classic command keeps what it trains in a new ``runs/MODEL-TIME-PID``, and says so at its start and end."""
    (tmp_path / "cwd").mkdir()
    said = _without_model_dir(tmp_path).splitlines()
    [made] = (tmp_path / "cwd" / "runs").iterdir()
    assert re.fullmatch(r"linear-\d{8}-\d{6}-\d+", made.name)
    reported = f"there is no --model_dir: this job writes to {made}"
    assert said[0] == said[-1] == reported
    known = r"(threads|waiting for|training|step|pace|evaluating|done|saved|no checkpoint|there is no --model_dir)\b"
    assert all(re.match(known, line) for line in said), said
    assert summary(made)["global_step"] == 20
    assert (made / "model.ckpt-20.index").is_file()
    assert (made / "logs" / "worker-0.log").is_file()


def test_without_a_directory_the_chief_says_that_nothing_is_kept(tmp_path: Path) -> None:
    """Where ``runs`` cannot be made, training goes on, and the chief says at its start and end that nothing is kept."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "runs").write_text("no directory")
    said = _without_model_dir(tmp_path).splitlines()
    assert said[0] == said[-1]
    assert said[0].startswith("this job saves nothing: there is no --model_dir, and ")
    assert said[0].endswith("cannot be made (Not a directory): give a directory that you can write.")
    assert [path.name for path in (tmp_path / "cwd").iterdir()] == ["runs"]


def test_tf_config_with_chief_and_evaluator(tmp_path: Path) -> None:
    """A job given by TF_CONFIG alone (chief, worker, ps, evaluator) trains in step, evaluates and ends."""
    with held_ports(3) as ports, processes() as started:
        hosts = [f"localhost:{port}" for port in ports]
        members = {"chief": hosts[:1], "worker": hosts[1:2], "ps": hosts[2:], "evaluator": ["localhost:1"]}
        for kind in members:
            reported = json.dumps({"cluster": members, "task": {"type": kind, "index": 0}})
            flags = ["--issync=1", "--max_steps=100", f"--model_dir={tmp_path / 'm'}"]
            started.append(Process(tmp_path / kind, *flags, TF_CONFIG=reported))
        assert [task.wait(90) for task in started] == [0, 0, 0, 0], "\n".join(t.output() for t in started)
        assert "step=100" in started[3].output()
        assert _last(started[3].output(), "loss") < 1
    taken = summary(tmp_path / "m")["tasks"]
    assert taken == {"worker/0": {"steps": 100}, "worker/1": {"steps": 100}}


def test_an_unknown_host_is_named(tmp_path: Path) -> None:
    """A host name that does not resolve is 171 too, and said to be unknown."""
    with held_ports(1) as ports:
        flags = [
            f"--ps_hosts=127.0.0.1:{ports[0]}",
            "--worker_hosts=no-such-host.invalid:2222",
            "--start_timeout_secs=1",
        ]
        ended = run_tfps(*flags, "--job_name=ps", "--task_index=0")
    assert ended.returncode == 171
    assert "worker/0 (no-such-host.invalid:2222, unknown host)" in ended.stderr


def test_sigterm_to_every_task_saves_and_ends_with_143(tmp_path: Path) -> None:
    """SIGTERM to all tasks of a sync job: the chief saves, everyone ends with 143 within 10 s."""
    model_dir = tmp_path / "m"
    flags = ("--issync=1", "--max_steps=1000000", f"--model_dir={model_dir}")
    with by_hand(tmp_path, 1, 2, *flags, **PATIENT) as tasks:
        tasks["worker/0"].wait_for("step=100 ", 60)
        for task in tasks.values():
            task.signal(signal.SIGTERM)
        assert [task.wait(100) for task in tasks.values()] == [143, 143, 143]
    reported = summary(model_dir)
    assert reported["status"] == "stopped"
    assert reported["checkpoint"].endswith(f"model.ckpt-{reported['global_step']}")
    assert reported["global_step"] >= 100
    assert {reported["tasks"][f"worker/{index}"]["steps"] for index in range(2)} == {reported["global_step"]}


def test_a_model_that_is_edited_while_a_worker_waits_is_refused(tmp_path: Path) -> None:
    """The worker has imported the file as it was before, and the tasks that start later take it as it is."""
    model = tmp_path / "mine.py"
    model.write_text(POWERS)
    with held_ports(2) as ports, processes() as started:
        hosts = [f"--ps_hosts=127.0.0.1:{ports[0]}", f"--worker_hosts=127.0.0.1:{ports[1]}"]
        flags = (*hosts, f"--model={model}", "--max_steps=3", f"--model_dir={tmp_path / 'm'}")
        for job in ("worker", "ps"):
            started.append(Process(tmp_path / job, *flags, f"--job_name={job}", "--task_index=0"))
            if job == "worker":
                started[0].wait_for("waiting for ps/0", 100)
                model.write_text(f"{POWERS}\nEDITED = True\n")
        assert started[0].wait(100) == 2
        assert "--model=mine.py here differs from the file on ps/0" in started[0].output()


def test_a_taken_port_is_named_with_its_flag(tmp_path: Path) -> None:
    """A port that another process listens on is exit 2 at once, with the address and the flag."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_tfps(f"--ps_hosts={address}", "--worker_hosts=127.0.0.1:2", "--job_name=ps", "--task_index=0")
    assert ended.returncode == 2
    assert f"--ps_hosts: port {address.partition(':')[2]} of {address} is taken" in ended.stderr


def test_idle_connections_do_not_keep_the_workers_out(tmp_path: Path) -> None:
    """More connections to a PS than its soft limit of open files leave room for the job's own: the limit is raised."""
    few = ("bash", "-c", 'ulimit -Sn 256; exec "$@"', "-")
    with held_ports(2) as (ps, worker), processes() as started, contextlib.ExitStack() as idle:
        hosts = (f"--ps_hosts=127.0.0.1:{ps}", f"--worker_hosts=127.0.0.1:{worker}", "--task_index=0")
        job = (*hosts, "--model=linear", "--max_steps=300", f"--model_dir={tmp_path / 'm'}")
        started.append(Process(tmp_path / "ps", *job, "--job_name=ps", under=few))
        idle.enter_context(_connection(ps, 300))
        for _ in range(300):
            idle.enter_context(_connection(ps, 1))
        started.append(Process(tmp_path / "worker", *job, "--job_name=worker"))
        assert started[1].wait(120) == 0, started[1].output()
        assert started[0].wait(100) == 0


def _connection(port: int, secs: float) -> socket.socket:
    """Return a connection to a port of this machine, as soon as somebody listens there."""
    deadline = time.monotonic() + secs
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"nobody listens on {port}"
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("training: mode sync, 1,000 workers, 2 ps", True),
        ("training: mode gossip --topology=0-1,1-2 --collect_every=100 (default), 3 workers, 0 ps, 2 GPUs", True),
        ("training set: 5", False),
        ("training: mode of the model, 2 layers", False),
    ],
)
def test_what_a_model_prints_is_not_taken_for_the_tasks_own_words(line: str, trains: bool) -> None:
    """A task that is supervised trains when it says so, not when its model speaks of training."""
    cluster = Cluster(("127.0.0.1:1",), ("127.0.0.1:2",))
    watched = supervisor.Supervisor(JobConfig(max_restarts=1), cluster, Task("worker", 0))
    watched._pass_on(line)
    assert watched.has_reported(2) is trains
