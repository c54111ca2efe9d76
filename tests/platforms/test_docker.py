"""Jobs on a real Docker daemon, through ``tfps submit --to=compose`` and docker-compose."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support import docker_engine as engine
from support.docker_engine import SKELETON, docker, inspect
from support.jobs import job_of
from support.processes import (
    ECHO,
    NASTY,
    REPO,
    Process,
    argv_of,
    children_of,
    processes,
    run_tfps,
    session_leaders,
    slow,
    summary,
)

import tfps
from tfps.errors import JobNotFoundError
from tfps.jobs.handle import CANCELLED, PENDING
from tfps.launchers.docker import volumes as making
from tfps.launchers.docker.job import DockerJob, ask_docker

SLOW = slow(0.05)
SECS = 800  # for a job's end, on a machine that has more to do
IMAGE = f"tfps:{tfps.__version__}"


class Build(threading.Thread):
    """Builds the shipped image in the background, while other tests run."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self._directory = directory
        self.error: BaseException | None = None

    def run(self) -> None:
        """Build it."""
        try:
            engine.build_image(self._directory, IMAGE)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module")
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """Start a daemon, make the skeleton, and begin to build the shipped image, if a test is to run that wants it."""
    with engine.daemon() as directory:
        engine.make_skeleton()
        thread = Build(directory)
        if wanted := any("shipped_image" in item.name for item in request.session.items):
            thread.start()
        yield thread
        if wanted:
            thread.join(600)


@pytest.fixture(autouse=True)
def tidy(build: Build) -> Iterator[None]:
    """Leave no container to the next test."""
    yield
    engine.remove_containers()


def submit(name: str, *flags: str, image: bool = False, timeout: float = SECS) -> "subprocess.CompletedProcess[str]":
    """Run ``tfps submit`` with the skeleton, or with the shipped image."""
    given = {flag.partition("=")[0] for flag in flags}
    how = () if image else [flag for flag in engine.skeleton_flags() if flag.partition("=")[0] not in given]
    return run_tfps("submit", "--to=compose", f"--name={name}", *how, *flags, timeout=timeout)


def submitted(name: str, *flags: str) -> None:
    """Submit a job, which must be taken."""
    result = submit(name, *flags)
    assert (result.returncode, result.stdout) == (0, f"compose:{name}\n"), result.stderr


def container(name: str, task: str) -> str:
    """Return the container of a task, ``worker/0``."""
    filters = f"--filter=label=com.docker.compose.project={name}", f"--filter=label=tfps.task={task}"
    return docker("ps", "--all", "--quiet", "--no-trunc", *filters).strip()


def wait_until_said(name: str, task: str, text: str, times: int = 1) -> None:
    """Wait until a task has said something so many times."""
    deadline = time.monotonic() + SECS
    while (said := _said(name, task)).count(text) < times:
        assert time.monotonic() < deadline, f"{task} has not said {text!r} but:\n{said}"
        time.sleep(0.3)


def _said(name: str, task: str) -> str:
    result = subprocess.run(["docker", "logs", container(name, task)], capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def compose_of(release: str) -> str:
    """Return the path of Compose of a release."""
    return "docker-compose" if release == "1.29" else str(engine.COMPOSE_2 / "docker-compose")


def model(directory: Path, source: str, name: str = "model.py") -> str:
    """Write a model that containers may read, and return the flag."""
    (directory / name).write_text(source)
    return f"--model={directory / name}"


def test_a_cluster_of_2_ps_and_4_workers_trains_to_its_end(build: Build) -> None:
    """--wait shows it and exits 0; every container has, and is as bounded and as powerless as was asked for."""
    sizes = "--num_ps=2", "--num_workers=4", "--ps_cpu=0.75", "--worker_cpu=1.5", "--ps_memory=700M"
    result = submit("large", *sizes, "--worker_memory=1Gi", "--model=mnist", "--max_steps=200", "--wait")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 200" in result.stdout
    tasks = ["ps/0", "ps/1", "worker/0", "worker/1", "worker/2", "worker/3"]
    known = dict(zip(tasks, inspect(*(container("large", task) for task in tasks)), strict=True))
    assert {each["State"]["ExitCode"] for each in known.values()} == {0}
    for task, each in known.items():
        host = each["HostConfig"]
        bounds = (750_000_000, 700_000_000) if task.startswith("ps") else (1_500_000_000, 2**30)
        assert (host["NanoCpus"], host["Memory"]) == bounds
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert host["ReadonlyRootfs"] is True
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert not host["PortBindings"]
        assert not host["Privileged"]
    assert inspect("large_training")[0]["Internal"] is True
    assert summary(engine.volume("tfps") / "large")["global_step"] == 200

    status = run_tfps("status", "compose:large")
    assert status.returncode == 0
    assert status.stdout.startswith("compose:large  SUCCEEDED")
    assert status.stdout.count("SUCCEEDED") == 7
    one = run_tfps("logs", "compose:large", "--task=worker:1")
    assert "training: mode async, 4 workers, 2 ps" in one.stdout
    assert "evaluating" not in one.stdout  # the chief does
    assert "ps/1      | done" in run_tfps("logs", "compose:large").stdout


def test_every_value_arrives_as_it_is(build: Build, tmp_path: Path) -> None:
    """Quotes, ends of line, $, and what YAML or Compose could read as something else: the task's own argv has them."""
    tmp_path.chmod(0o755)
    data = tmp_path / "data" / NASTY
    data.mkdir(parents=True)
    name, model_dir = f"{NASTY}.py", f"/tfps/{NASTY}"
    flags = [f"--model_dir={model_dir}", f"--data_dir={data}", "--num_workers=1", "--max_steps=2", "--seed=7"]
    result = submit("nasty", model(tmp_path, ECHO, name), *flags, "--wait")
    assert result.returncode == 0, result.stdout + result.stderr
    argv = argv_of(_said("nasty", "worker/0"))
    assert {f"--model=/opt/model/{name}", f"--model_dir={model_dir}", "--data_dir=/opt/data", "--seed=7"} <= set(argv)
    [mount] = [m for m in inspect(container("nasty", "worker/0"))[0]["Mounts"] if m["Destination"] == "/opt/data"]
    assert (mount["Source"], mount["RW"]) == (str(data), False)
    assert summary(engine.volume("tfps") / NASTY)["global_step"] == 2
    assert not list(tmp_path.glob("**/spoilt"))


@pytest.mark.parametrize("release", ["1.29", "2"])
def test_docker_compose_reads_what_is_planned(build: Build, release: str) -> None:
    """docker-compose config takes the golden file, GPUs included, and gives its commands back; so does 2."""
    golden = REPO / "tests" / "golden" / "compose-large.yaml"
    read = subprocess.run([compose_of(release), "-f", golden, "config"], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    planned, known = yaml.safe_load(golden.read_text())["services"], yaml.safe_load(read.stdout)["services"]
    assert {name: each["command"] for name, each in known.items()} == {n: p["command"] for n, p in planned.items()}
    assert known["worker-0"]["deploy"] == planned["worker-0"]["deploy"]


def test_docker_compose_2_submits_and_cancels(build: Build, tmp_path: Path) -> None:
    """With docker compose 2: every value arrives as it is, the job ends by itself; another one is cancelled."""
    tmp_path.chmod(0o755)
    before = docker("network", "ls", "--quiet")
    with engine.compose_2():
        result = submit("second", model(tmp_path, ECHO, f"{NASTY}.py"), "--max_steps=2", "--seed=7", "--wait")
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"--model=/opt/model/{NASTY}.py" in argv_of(_said("second", "worker/0"))
        assert inspect("second_training")[0]["Internal"] is True
        assert {each["HostConfig"]["CapDrop"][0] for each in inspect(container("second", "ps/0"))} == {"ALL"}
        assert run_tfps("cancel", "compose:second", timeout=SECS).returncode == 0
        submitted("stopped", model(tmp_path, SLOW), "--max_steps=100000")
        wait_until_said("stopped", "worker/0", "step=")
        result = run_tfps("cancel", "compose:stopped", timeout=SECS)
        assert (result.returncode, result.stdout) == (0, "compose:stopped is cancelled\n"), result.stderr
        assert _checkpoints("stopped")
    assert (docker("ps", "--all", "--quiet"), docker("network", "ls", "--quiet")) == ("", before)


def test_cancel_saves_and_the_same_name_goes_on(build: Build, tmp_path: Path) -> None:
    """Cancelled tasks exit 143 with their state saved; nothing is left but the volume; the same job goes on from it."""
    tmp_path.chmod(0o755)
    flags = model(tmp_path, SLOW), "--save_checkpoint_secs=3600", "--steps_to_validate=20"
    before = docker("network", "ls", "--quiet")
    began = int(time.time())
    submitted("stop", *flags, "--max_steps=100000")
    wait_until_said("stop", "worker/0", "step=")
    again = submit("stop", *flags)
    assert again.returncode == 2
    assert "--name=stop is taken" in again.stderr
    result = run_tfps("cancel", "compose:stop", timeout=SECS)
    assert (result.returncode, result.stdout) == (0, "compose:stop is cancelled\n"), result.stderr
    mine = "--filter=event=die", "--filter=label=com.docker.compose.project=stop"
    died = docker("events", f"--since={began}", f"--until={int(time.time()) + 1}", *mine, "--format={{json .}}")
    codes = [json.loads(line)["Actor"]["Attributes"]["exitCode"] for line in died.splitlines()]
    assert codes == ["143", "143", "143"]
    assert (docker("ps", "--all", "--quiet"), docker("network", "ls", "--quiet")) == ("", before)
    assert run_tfps("status", "compose:stop").returncode == 69
    saved = max(int(path.suffix[1:].partition("-")[2]) for path in _checkpoints("stop"))

    resumed = submit("stop", *flags, f"--max_steps={saved + 10}", "--wait")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(engine.volume("tfps") / "stop")["resumed_from_step"] == saved


def _checkpoints(name: str) -> list[Path]:
    return [path.with_suffix("") for path in (engine.volume("tfps") / name).glob("model.ckpt-*.index")]


def test_waiting_ends_with_a_cancellation_elsewhere(build: Build) -> None:
    """A job that was there and is gone is cancelled for whom watches it; others learn that Docker knows none."""
    docker("create", "--label=com.docker.compose.project=gone", "--label=tfps.task=ps/0", SKELETON, "true")
    job = DockerJob("gone")
    assert job.status().state == PENDING
    engine.remove_containers()
    assert [job.status().state for _ in range(2)] == [CANCELLED] * 2
    with pytest.raises(JobNotFoundError):
        DockerJob("gone").status()


@pytest.mark.parametrize("place", ["/tfps", "/data/x", "/home"])  # the image's /home is root's
def test_a_volume_is_kept_and_found_by_its_name(build: Build, tmp_path: Path, place: str) -> None:
    """Wherever a new volume is mounted, tasks without rights write to it; the next job, of another name, goes on."""
    tmp_path.chmod(0o755)
    name = f"mine{place.replace('/', '.')}"
    [image, volumes] = engine.skeleton_flags()
    flags = image, volumes.replace("tfps:/tfps", f"{name}:{place}"), f"--model_dir={place}/m", "--num_workers=1"
    for job, steps in (("before", 2), ("after", 4)):
        result = submit(f"{job}-{len(place)}", model(tmp_path, ECHO), *flags, f"--max_steps={steps}", "--wait")
        assert result.returncode == 0, result.stdout + result.stderr
    assert summary(engine.volume(name) / "m")["resumed_from_step"] == 2
    assert (engine.volume(name).stat().st_uid, engine.volume(name).stat().st_gid) == (1000, 1000)
    assert name in docker("volume", "ls", "--quiet").split()


@pytest.mark.parametrize("release", ["1.29", "2"])
def test_a_printed_file_works_by_its_head_and_deletes_no_volume(build: Build, tmp_path: Path, release: str) -> None:
    """What the head says gives each new volume to the tasks, at /home and /opt as well; down -v leaves the volumes."""
    [image, volumes] = engine.skeleton_flags()
    printed = submit("head", image, f"{volumes},printed-1:/home,printed-2:/opt,printed-3:/not/there", "--dry_run")
    first = re.findall(r"^# Before the first use, .*?: (.*)$", printed.stdout, re.MULTILINE)
    assert len(first) == 4
    for command in first:
        subprocess.run(["sh", "-c", command], check=True, timeout=SECS)
    (tmp_path / "compose.yaml").write_text(printed.stdout)
    compose = [compose_of(release), "--project-name=head", f"--file={tmp_path}/compose.yaml"]
    subprocess.run([*compose, "up", "--no-start"], check=True, timeout=SECS)
    subprocess.run([*compose, "down", "--volumes"], check=True, timeout=SECS)
    names = [f"printed-{number}" for number in (1, 2, 3)]
    owners = [(engine.volume(name).stat().st_uid, list(engine.volume(name).iterdir())) for name in names]
    assert owners == [(1000, [])] * 3
    assert engine.volume("tfps").is_dir()
    docker("volume", "rm", *names)


@pytest.mark.parametrize("release", ["1.29", "2"])
def test_a_volume_with_options_is_used_as_it_is(build: Build, tmp_path: Path, release: str) -> None:
    """A user's own volume that has a driver's options, and takes no other owner, is no reason to refuse the job."""
    tmp_path.chmod(0o755)
    docker("volume", "create", *(f"--opt={option}" for option in ("type=tmpfs", "device=tmpfs", "o=ro")), "theirs")
    before = inspect("theirs")
    [image, volumes] = engine.skeleton_flags()
    with engine.compose_2() if release == "2" else contextlib.nullcontext():
        name = f"theirs-{release[0]}"
        flags = image, f"{volumes},theirs:/data", "--num_workers=1", "--max_steps=2"
        result = submit(name, model(tmp_path, ECHO), *flags, "--wait")
    assert result.returncode == 0, result.stdout + result.stderr
    assert inspect("theirs") == before
    engine.remove_containers()
    docker("volume", "rm", "theirs")


def test_making_volumes_leaves_nothing_else(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """No container, and no volume without a name for an image that has a VOLUME; not after Ctrl-C either."""
    with_volume = docker("commit", "--change=VOLUME /more", docker("create", SKELETON, "true").strip()).strip()
    engine.remove_containers()
    before = set(docker("volume", "ls", "--quiet").split())
    job = job_of("made", image=with_volume, volumes="made-1:/x,made-2:/y,made-3:/tfps")

    def interrupted(*arguments: str) -> str:
        said = ask_docker(*arguments)
        if arguments[0] == "create":
            raise KeyboardInterrupt
        return said

    with monkeypatch.context() as patch:
        patch.setattr(making, "ask_docker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            making.make(job)
    assert docker("ps", "--all", "--quiet") == ""
    making.make(job)
    making.make(job)
    assert docker("ps", "--all", "--quiet") == ""
    names = {"made-1", "made-2", "made-3"}
    assert set(docker("volume", "ls", "--quiet").split()) - before == names
    assert [engine.volume(name).stat().st_uid for name in ("made-1", "made-2")] == [1000] * 2
    docker("volume", "rm", *names)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_killed_worker_is_started_again_and_the_job_ends(build: Build, tmp_path: Path, mode: str) -> None:
    """A worker whose process is killed is started again in its container; the job takes all its steps and exits 0.

    Its logs are followed through it.
    """
    tmp_path.chmod(0o755)
    name = f"kill-{mode}"  # directories on the volume are kept by name
    steps = 1200 if mode == "async" else 200  # the others must not be through before it is back
    flags = f"--mode={mode}", f"--max_steps={steps}", "--steps_to_validate=10", "--save_checkpoint_secs=1"
    with processes() as started:
        submitted(name, model(tmp_path, SLOW), *flags)
        follow = Process(tmp_path / "followed", "logs", f"compose:{name}", "--task=worker:1", "--follow")
        started.append(follow)
        wait_until_said(name, "worker/1", "step=")
        first = inspect(container(name, "worker/1"))[0]["State"]["Pid"]
        [task] = session_leaders(children_of(first))  # the one that is started again
        os.kill(task, signal.SIGKILL)
        assert follow.wait(SECS) == 0
        assert follow.output().count("training: mode") >= 2
        assert "done: " in follow.output()
        _wait_until_ended(name)
    result = run_tfps("status", f"compose:{name}").stdout.splitlines()
    assert result[0] == f"compose:{name}  SUCCEEDED"
    assert "restarted after SIGKILL (1 of 10)" in _said(name, "worker/1")
    assert inspect(container(name, "worker/1"))[0]["RestartCount"] == 0
    assert summary(engine.volume("tfps") / name)["global_step"] == steps


def _wait_until_ended(name: str) -> None:
    deadline = time.monotonic() + SECS
    mine = f"--filter=label=com.docker.compose.project={name}"
    while states := set(docker("ps", "--all", mine, "--format={{.State}}").split()) - {"exited"}:
        assert time.monotonic() < deadline, f"still {states}"
        time.sleep(0.5)


def test_docker_kill_is_a_manual_stop_and_the_others_end(build: Build, tmp_path: Path) -> None:
    """Docker never restarts what docker kill has ended; an async job is ended by the others, and status says so."""
    tmp_path.chmod(0o755)
    source = slow(0.05, until="/tfps/manual-go", batch=50)
    submitted("manual", model(tmp_path, source), "--max_steps=200", "--steps_to_validate=10")
    wait_until_said("manual", "worker/1", "step=")
    docker("kill", container("manual", "worker/1"))
    (engine.volume("tfps") / "manual-go").touch()
    _wait_until_ended("manual")
    codes = [inspect(container("manual", task))[0]["State"]["ExitCode"] for task in ("ps/0", "worker/0", "worker/1")]
    assert codes == [0, 0, 137]
    result = run_tfps("status", "compose:manual").stdout.splitlines()
    assert result[0] == "compose:manual  FAILED: worker/1 ended with exit code 137"
    assert summary(engine.volume("tfps") / "manual")["global_step"] == 200


def test_what_fails_for_good_is_not_tried_again(build: Build, tmp_path: Path) -> None:
    """A model that ends with 77 as it is loaded: no container starts again, --wait exits with 77, and all PS end."""
    tmp_path.chmod(0o755)
    result = submit("bad", model(tmp_path, f"import os\nos._exit(77)\n{SLOW}"), "--wait")
    assert result.returncode == 77, result.stdout + result.stderr
    _wait_until_ended("bad")
    known = inspect(*docker("ps", "--all", "--quiet").split())
    assert {each["RestartCount"] for each in known} == {0}
    assert all(0 < each["State"]["ExitCode"] < 128 for each in known)


def test_a_task_that_has_used_up_its_restarts_fails_the_job(build: Build, tmp_path: Path) -> None:
    """A worker is killed again and again: the PS end because they are told, and the job ends as the worker."""
    tmp_path.chmod(0o755)
    source = f"import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n{SLOW}"
    result = submit("killed", model(tmp_path, source), "--max_restarts=1", "--num_ps=2", "--num_workers=1", "--wait")
    assert result.returncode == 137, result.stdout + result.stderr
    assert "error: worker/0" in result.stderr
    assert run_tfps("status", "compose:killed").stdout.startswith(
        "compose:killed  FAILED: worker/0 ended with exit code"
    )
    _wait_until_ended("killed")
    codes = [inspect(container("killed", task))[0]["State"]["ExitCode"] for task in ("ps/0", "ps/1", "worker/0")]
    assert codes == [67, 67, 137]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--worker_gpu=1"], "--worker_gpu=1: Docker has no nvidia runtime"),
        (["--worker_cpu=4096"], "--worker_cpu=4096 is more than Docker's machine has"),
        (["--image=nobody/nothing:1"], "the image nobody/nothing:1 is not on Docker's machine and cannot be pulled"),
        (["--volumes=tfps:/tfps,/not/there:/x"], "bind source path does not exist: /not/there"),
        (["--model=mnist", "--data_dir=not/there"], "not/there"),
    ],
)
def test_what_docker_cannot_do_is_reported_and_leaves_nothing(build: Build, flags: list[str], says: str) -> None:
    """No GPUs, too few processors, no image, no such directory: plain lines, and nothing is half-submitted."""
    before = docker("network", "ls", "--quiet")
    result = submit("refused", *flags)
    assert result.returncode in (2, 65, 69)
    assert says in result.stderr
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())
    assert (result.stdout, docker("ps", "--all", "--quiet"), docker("network", "ls", "--quiet")) == ("", "", before)


def test_a_project_of_somebody_else_is_never_touched(build: Build) -> None:
    """Containers of another project of that name, ended or not, are neither replaced nor known nor cancelled."""
    theirs = docker("create", "--label=com.docker.compose.project=web", SKELETON, "true").strip()
    result = submit("web", "--model=mnist")
    assert (result.returncode, "--name=web is taken" in result.stderr) == (2, True)
    for verb in ("status", "logs", "cancel"):
        assert run_tfps(verb, "compose:web").returncode == 69
    assert docker("ps", "--all", "--quiet", "--no-trunc").split() == [theirs]


def test_a_daemon_that_is_down_is_reported_in_its_words(build: Build, tmp_path: Path) -> None:
    """submit, status, logs and cancel exit 69 with what Docker's client says."""
    down = f"unix://{tmp_path}/sock"
    for verb in (["submit", "--to=compose"], *(([verb, "compose:x"]) for verb in ("status", "logs", "cancel"))):
        result = run_tfps(*verb, DOCKER_HOST=down)
        assert result.returncode == 69
        assert "Cannot connect to the Docker daemon" in result.stderr
        assert "Traceback" not in result.stderr


def test_without_compose_it_says_what_to_install(build: Build, tmp_path: Path) -> None:
    """Docker's client alone is not enough: exit 69, on one line."""
    (tmp_path / "docker").symlink_to(shutil.which("docker") or "")
    result = run_tfps("submit", "--to=compose", PATH=str(tmp_path))
    assert (result.returncode, result.stderr.count("\n")) == (69, 1)
    assert "docker compose is not installed: apt-get install" in result.stderr


def test_the_shipped_image_trains_by_the_shipped_file(build: Build) -> None:
    """docker/Dockerfile builds; it runs without rights; docker/compose.yaml trains MNIST on it, onto its volume.

    With docker-compose 1.29, and with docker compose 2.
    """
    build.join(1800)
    assert build.error is None, build.error
    run = ("run", "--rm", "--network=none", IMAGE)
    assert docker(*run, "tfps", "--version") == docker(*run, "python", "-m", "tfps", "--version")
    assert docker(*run, "tfps", "--version") == f"tfps {tfps.__version__}\n"
    assert docker(*run, "id", "-u") == "1000\n"
    file = REPO / "docker" / "compose.yaml"
    for release in ("1.29", "2"):
        docker("volume", "create", "tfps")  # as the head of the file says
        up = [compose_of(release), "--project-name=tfps", f"--file={file}", "up", "--no-color"]
        result = subprocess.run(up, capture_output=True, text=True, timeout=SECS, check=False)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr
        known = inspect(*docker("ps", "--all", "--quiet").split())
        assert [each["State"]["ExitCode"] for each in known] == [0, 0, 0]
        directory = engine.volume("tfps") / "tfps"
        assert (directory / "model.ckpt-1000.index").is_file()
        assert summary(directory)["eval"]["accuracy"] > 0.9
        assert run_tfps("status", "compose:tfps").stdout.startswith("compose:tfps  SUCCEEDED")
        engine.remove_containers()
        docker("volume", "rm", "tfps")
