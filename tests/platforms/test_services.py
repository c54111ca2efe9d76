"""A parameter service on real platforms, through ``tfps submit --serve``.

A client outside takes the address that the platform's command prints, and pushes. The last step ends the job with 0,
and ``tfps cancel`` ends it before; both times the checkpoint has the parameters.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import docker_engine
from support.docker_engine import docker
from support.fake_kubernetes import Cluster, serve
from support.kubernetes_jobs import PLATFORMS
from support.processes import Process, load_variable, processes, run_tfps, summary
from support.ray_engine import RayCluster, ray_cluster
from support.slurm_engine import Slurm, slurm
from support.ssh_engine import sshd

import tfps
from tfps.cluster.ports import held_ports
from tfps.errors import ServiceError

SECS = 400.0
LAST = 3
SERVE = ("--serve", "--num_ps=2", "--optimizer=sgd", "--learning_rate=1")
TOKEN = "the secret of a test"
CLIENT = """
import sys, numpy, tfps
with tfps.connect(start_timeout_secs=200) as ps:
    ps.init({"w": numpy.zeros(3, numpy.float32), "b": numpy.zeros(2, numpy.float32)})
    for _ in range(int(sys.argv[1])):
        ps.push({"w": numpy.ones(3, numpy.float32), "b": numpy.ones(2, numpy.float32)})
    print("step", ps.step, ps.pull()["w"].tolist(), ps.pull()["b"].tolist())
"""


def push(hosts: str, times: int) -> None:
    """Push gradients of ones, from this process, to a service with the token."""
    ones = {"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    with tfps.connect(hosts, token=TOKEN, start_timeout_secs=SECS) as ps:
        ps.init({name: np.zeros_like(one) for name, one in ones.items()})
        for _ in range(times):
            ps.push(ones)
        assert ps.step == times
        assert {name: value.tolist() for name, value in ps.pull().items()} == {"w": [-times] * 3, "b": [-times] * 2}


def check_refused(hosts: str) -> None:
    """A client without the token is sent away by both servers: the token has come to them."""
    for host in hosts.split(","):
        with pytest.raises(ServiceError, match="token"):
            tfps.connect(host, token="", start_timeout_secs=SECS)


def check_saved(model_dir: Path, step: int) -> None:
    """The newest checkpoint has the parameters after ``step`` pushes of ones at rate 1."""
    assert load_variable(model_dir, "global_step") == step
    assert load_variable(model_dir, "w").tolist() == [-step] * 3
    assert load_variable(model_dir, "b").tolist() == [-step] * 2


def check_hidden() -> None:
    """No process of this machine has the token in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            assert TOKEN.encode() not in argv, argv


def address_in(text: str) -> str:
    """Return the addresses of two servers in what a command has printed."""
    [found] = set(re.findall(r"^TFPS_PS_HOSTS=(\S+,\S+)$", text, re.MULTILINE))
    return str(found)


def address_in_log(handle: str, **env: str) -> str:
    """Return the addresses in the log of ps/0, as soon as it has them."""
    deadline = time.monotonic() + SECS
    while not (found := re.findall(r"serving on (\S+,\S+)", run_tfps("logs", handle, "--task=ps:0", **env).stdout)):
        assert time.monotonic() < deadline, run_tfps("logs", handle, **env).stdout
        time.sleep(0.5)
    return str(found[-1])


def wait_for_end(handle: str, state: str, **env: str) -> str:
    """Wait until ``tfps status`` shows a state, and return what it shows."""
    deadline = time.monotonic() + SECS
    while f"{handle}  {state}" not in (shown := run_tfps("status", handle, **env).stdout):
        assert time.monotonic() < deadline, shown
        time.sleep(0.5)
    return shown


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the environment in which ssh reaches the hosts 127.0.0.1 to 127.0.0.3."""
    with sshd(tmp_path_factory.mktemp("ssh")) as environment:
        yield environment


@pytest.mark.parametrize("is_stopped", [False, True])
def test_over_ssh(ssh: dict[str, str], tmp_path: Path, is_stopped: bool) -> None:
    """The command prints the address, has the secret in no command line, and ends with the service."""
    with held_ports(2) as ports, processes() as started:
        hosts = f"127.0.0.2:{ports[0]},127.0.0.3:{ports[1]}"
        flags = ["--to=hosts", "--ssh", *SERVE, f"--ps_hosts={hosts}", f"--model_dir={tmp_path / 'm'}"]
        flags += [] if is_stopped else [f"--max_steps={LAST}"]
        started.append(Process(tmp_path / "out", "submit", *flags, TFPS_TOKEN=TOKEN, **ssh))
        started[0].wait_for("serving on", 200)
        assert address_in(started[0].output()) == hosts
        check_hidden()
        check_refused(hosts)
        push(hosts, LAST)
        if is_stopped:
            started[0].signal(signal.SIGTERM)
        assert started[0].wait(200) == (143 if is_stopped else 0), started[0].output()
    check_saved(tmp_path / "m", LAST)
    assert summary(tmp_path / "m")["status"] == ("stopped" if is_stopped else "done")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Yield a running Slurm."""
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_in_slurm(cluster: Slurm, tmp_path: Path) -> None:
    """Two servers on a heterogeneous site of one machine: the log of ps/0 has the address; resumed, then cancelled."""
    env = {"SLURM_CONF": str(cluster.conf), "TFPS_TOKEN": TOKEN}
    flags = ("submit", "--to=slurm", *SERVE, "--ps_memory=100Mi", f"--model_dir={tmp_path / 'm'}")
    ended = run_tfps(*flags, f"--max_steps={LAST}", **env)
    assert ended.returncode == 0, ended.stderr
    handle = ended.stdout.strip()
    assert f"tfps logs {handle} --task=ps:0" in ended.stderr
    hosts = address_in_log(handle, **env)
    check_refused(hosts)
    check_hidden()
    push(hosts, LAST)
    shown = wait_for_end(handle, "SUCCEEDED", **env)
    assert re.search(r"ps/1 +SUCCEEDED +0", shown), shown
    assert "worker" not in shown
    check_saved(tmp_path / "m", LAST)

    handle = run_tfps("submit", "--to=slurm", *SERVE, f"--model_dir={tmp_path / 'c'}", **env).stdout.strip()
    push(address_in_log(handle, **env), 2)
    cancelled = run_tfps("cancel", handle, **env)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{handle} is cancelled\n"), cancelled.stderr
    wait_for_end(handle, "CANCELLED", **env)
    check_saved(tmp_path / "c", 2)


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    """Yield a running Ray of two nodes."""
    with ray_cluster() as running:
        yield running


def test_on_ray(ray: RayCluster, tmp_path: Path) -> None:
    """Two actors hold the servers: the log of ps/0 has the address; the last step ends one job, cancel another."""
    env = {**ray.env, "TFPS_TOKEN": TOKEN}
    flags = ("submit", "--to=ray", f"--address={ray.address}", *SERVE)
    ended = ray.tfps(*flags, f"--max_steps={LAST}", f"--model_dir={tmp_path / 'm'}", **env)
    assert ended.returncode == 0, ended.stderr
    handle = ended.stdout.strip()
    assert f"tfps logs {handle} --task=ps:0" in ended.stderr
    hosts = address_in_log(handle, **env)
    check_refused(hosts)
    check_hidden()
    push(hosts, LAST)
    wait_for_end(handle, "SUCCEEDED", **env)
    check_saved(tmp_path / "m", LAST)

    handle = ray.tfps(*flags, f"--model_dir={tmp_path / 'c'}", **env).stdout.strip()
    push(address_in_log(handle, **env), 2)
    cancelled = ray.tfps("cancel", handle, **env)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{handle} is cancelled\n"), cancelled.stderr
    check_saved(tmp_path / "c", 2)


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a cluster whose pods are processes and which has a Secret, and make it kubectl's."""
    (tmp_path / "out").mkdir()
    with serve(tmp_path, runs=True) as (found, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        found.secrets["ours", "token"] = TOKEN
        yield found


@pytest.mark.parametrize("platform", PLATFORMS)
def test_on_kubernetes(pods: Cluster, tmp_path: Path, platform: str) -> None:
    """Through the real kubectl: the printed names are the pods', the Secret is theirs; the last step, and cancel."""
    out = tmp_path / "out"
    flags = ("submit", f"--to={platform}", *SERVE, "--token_secret=ours", f"--volumes={out}:{out}")
    ended = run_tfps(*flags, "--name=one", f"--max_steps={LAST}", f"--model_dir={out / 'm'}")
    assert ended.returncode == 0, ended.stderr
    handle = ended.stdout.splitlines()[0]
    hosts = ",".join(map(pods.address_of, address_in(ended.stdout).split(",")))
    check_refused(hosts)
    push(hosts, LAST)
    shown = wait_for_end(handle, "SUCCEEDED")
    assert [line.split()[:3] for line in shown.splitlines()[2:]] == [[f"ps/{n}", "SUCCEEDED", "0"] for n in (0, 1)]
    check_saved(out / "m", LAST)
    assert run_tfps("cancel", handle).returncode == 0

    ended = run_tfps(*flags, "--name=two", f"--model_dir={out / 'c'}")
    assert ended.returncode == 0, ended.stderr
    push(",".join(map(pods.address_of, address_in(ended.stdout).split(","))), 2)
    cancelled = run_tfps("cancel", ended.stdout.split()[0])
    assert cancelled.returncode == 0, cancelled.stderr
    assert not pods.pods
    check_saved(out / "c", 2)


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    """Run a Docker daemon with the skeleton image."""
    with docker_engine.daemon():
        docker_engine.make_skeleton()
        yield


def in_a_container(hosts: str, network: str, times: int, token: str = TOKEN) -> str:
    """Run a client that pushes, in a container of its own; return what it says."""
    mounts = [volume for volume in docker_engine.skeleton_flags()[1].partition("=")[2].split(",") if ":ro" in volume]
    options = [f"--network={network}", f"--env=TFPS_PS_HOSTS={hosts}", "--env=TFPS_TOKEN", "--rm"]
    where = [word for mount in mounts for word in ("--volume", mount)]
    os.environ["TFPS_TOKEN"] = token
    try:
        return docker("run", *options, *where, docker_engine.SKELETON, sys.executable, "-c", CLIENT, str(times))
    finally:
        del os.environ["TFPS_TOKEN"]


@pytest.mark.parametrize("release", ["1.29", "2"])
def test_with_compose(engine: None, release: str) -> None:
    """The address is that of the containers, for others on their network; 0 at the last step, and cancel saves."""
    name = f"service{release[0]}"
    flags = ("submit", "--to=compose", *docker_engine.skeleton_flags(), *SERVE)
    with docker_engine.compose_2() if release == "2" else processes():
        ended = run_tfps(*flags, f"--name={name}", f"--max_steps={LAST}", timeout=SECS, TFPS_TOKEN=TOKEN)
        assert ended.returncode == 0, ended.stderr
        handle, address = ended.stdout.splitlines()
        assert (handle, address) == (f"compose:{name}", "TFPS_PS_HOSTS=ps-0:2222,ps-1:2222")
        assert f"on the network {name}_training" in ended.stderr
        said = in_a_container(address_in(ended.stdout), f"{name}_training", LAST)
        assert said == f"step {LAST} [-3.0, -3.0, -3.0] [-3.0, -3.0]\n"
        shown = wait_for_end(handle, "SUCCEEDED")
        assert shown.count(" SUCCEEDED ") == 2
        check_saved(docker_engine.volume("tfps") / name, LAST)
        assert run_tfps("cancel", handle, timeout=SECS).returncode == 0

        ended = run_tfps(*flags, f"--name=stopped{name}", timeout=SECS, TFPS_TOKEN=TOKEN)
        assert ended.returncode == 0, ended.stderr
        in_a_container(address_in(ended.stdout), f"stopped{name}_training", 2)
        assert TOKEN not in run_tfps("logs", ended.stdout.split()[0]).stdout
        assert run_tfps("cancel", ended.stdout.split()[0], timeout=SECS).returncode == 0
        check_saved(docker_engine.volume("tfps") / f"stopped{name}", 2)
