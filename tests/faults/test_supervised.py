"""Every task under a supervisor of its own, as on platforms that see each task alone: processes that are killed."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from support.listeners import Speaker
from support.processes import (
    PATIENCE,
    PATIENT,
    POWERS,
    Process,
    alive,
    by_hand,
    children_of,
    processes,
    session_leaders,
    slow,
    summary,
    wait_gone,
)

from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Task

FLAGS = ("--max_restarts=10", "--save_checkpoint_secs=1", "--steps_to_validate=1", "--start_timeout_secs=60")


@contextlib.contextmanager
def job(
    directory: Path,
    num_ps: int,
    num_workers: int,
    *flags: str,
    model: str,
    under: Mapping[str, Sequence[str]] = MappingProxyType({}),
    **env: str,
) -> Iterator[dict[str, Process]]:
    """Run a cluster, each task under its own supervisor."""
    file = directory / "model.py"
    file.write_text(model)
    own = {flag.partition("=")[0] for flag in flags}
    usual = [flag for flag in FLAGS if flag.partition("=")[0] not in own]
    given = (f"--model={file}", f"--model_dir={directory / 'm'}", *usual, *flags)
    with by_hand(directory, num_ps, num_workers, *given, under=under, **env) as tasks:
        below = {name: task.pid for name, task in tasks.items()}
        try:
            yield tasks
        finally:
            pids = [pid for top in below.values() for pid in children_of(top)]
            for task in tasks.values():
                task.end()
            wait_gone(pids, 30)


def process_of(supervisor: Process, name: str) -> int:
    """Return the process that is the task below a supervisor: the child of its fork server that leads a session."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        found = session_leaders(children_of(supervisor.pid))
        if len(found) == 1:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"{name} has no process: {supervisor.output()}")


def steps_said(task: Process) -> int:
    """Return how many reports of a step a worker has made."""
    return len(re.findall(r"^step=", task.output(), re.MULTILINE))


def wait_for_steps(tasks: dict[str, Process], secs: float) -> None:
    """Wait until every worker has reported another step than those so far."""
    workers = {name: task for name, task in tasks.items() if name.startswith("worker")}
    before = {name: steps_said(task) for name, task in workers.items()}
    deadline = time.monotonic() + secs * PATIENCE
    while late := [name for name, task in workers.items() if steps_said(task) <= before[name]]:
        assert time.monotonic() < deadline, "\n".join(
            f"{name}:\n{tasks[name].output()[-1500:]}" for name in tasks if name in late or "ps" in name
        )
        time.sleep(0.1)


def test_a_ps_is_lost_again_and_again(tmp_path: Path) -> None:
    """A PS of two is killed in a job of several workers: all step again within 30 s, at the tenth loss too."""
    with job(tmp_path, 2, 3, "--max_steps=100000000", model=slow(0.1)) as tasks:
        tasks["worker/0"].wait_for("saved ", 120)
        for turn in range(10):
            lost = f"ps/{turn % 2}"
            os.kill(process_of(tasks[lost], lost), signal.SIGKILL)
            wait_for_steps(tasks, 30)
            assert all(task.poll() is None for task in tasks.values())
        for task in tasks.values():
            task.signal(signal.SIGTERM)
        assert {name: task.wait(100) for name, task in tasks.items()} == dict.fromkeys(tasks, 143)
        said = tasks["worker/1"].output()
        assert "restarted after exit code 170, as others were lost" in said
        assert " of 10)" not in said, "what others lose costs a worker nothing"


@pytest.mark.parametrize(
    ("source", "restarts", "code", "starts"),
    [
        ("raise RuntimeError('no such feature')\n", 10, 2, 1),
        ("import os\nos._exit(77)\n", 10, 77, 1),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", 1, 137, 2),
    ],
)
def test_nothing_of_a_job_that_failed_for_good_runs_on(
    tmp_path: Path, source: str, restarts: int, code: int, starts: int
) -> None:
    """A worker that fails for good is not started again, whatever its code below 128; every PS ends with it, soon.

    A PS ends with 67 if the code is none of tfps's own, or the worker is killed more often than --max_restarts.
    """
    model = f"print('loaded', flush=True)\n{source}\n{POWERS}"
    with job(tmp_path, 2, 1, "--start_timeout_secs=600", f"--max_restarts={restarts}", model=model) as tasks:
        assert tasks["worker/0"].wait(120) == code
        assert tasks["worker/0"].output().count("loaded") == starts
        for ps in ("ps/0", "ps/1"):
            assert tasks[ps].wait(100) == (code if code == 2 else 67)
            assert f"worker/0 has failed with exit code {code}" in tasks[ps].output()


def test_a_worker_that_is_killed_for_good_ends_the_job_that_the_chief_has_begun(tmp_path: Path) -> None:
    """A worker other than the chief is killed once more than --max_restarts: the PS and the chief end soon."""
    flags = ("--max_steps=100000000", "--start_timeout_secs=600", "--max_restarts=1")
    with job(tmp_path, 1, 2, *flags, model=slow(0.05)) as tasks:
        tasks["worker/0"].wait_for("saved ", 120)
        killed, deadline = set[int](), time.monotonic() + 100 * PATIENCE
        while tasks["worker/1"].poll() is None:
            assert time.monotonic() < deadline, tasks["worker/1"].output()
            for pid in set(session_leaders(children_of(tasks["worker/1"].pid))) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.1)
        assert (tasks["worker/1"].wait(1), len(killed)) == (137, 2)
        assert tasks["ps/0"].wait(100) == 67
        assert "worker/1 has failed with exit code 137" in tasks["ps/0"].output()


def test_a_chief_that_its_directory_refuses_ends_its_ps(tmp_path: Path) -> None:
    """It is lost as another directory takes the place of its own: the PS of its run end with it, and do not wait."""
    flags = ("--max_steps=100000000", "--start_timeout_secs=600")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "job.json").write_text('{"launch": "another", "run": "another"}')
    with job(tmp_path, 1, 1, *flags, model=slow(0.05)) as tasks:
        tasks["worker/0"].wait_for("saved ", 120)
        chief = process_of(tasks["worker/0"], "worker/0")
        os.kill(chief, signal.SIGSTOP)
        (tmp_path / "m").rename(tmp_path / "own")
        (tmp_path / "other").rename(tmp_path / "m")
        os.kill(chief, signal.SIGKILL)
        assert tasks["worker/0"].wait(120) == 74
        assert "holds another run than the one that this job began there" in tasks["worker/0"].output()
        assert tasks["ps/0"].wait(100) == 74
        assert "worker/0 has failed with exit code 74" in tasks["ps/0"].output()
    assert "another" in (tmp_path / "m" / "job.json").read_text()


def test_a_worker_started_twice_ends_nobodys_job(tmp_path: Path) -> None:
    """A second process of a worker that runs is refused, and its supervisor tells the PS nothing."""
    with job(tmp_path, 1, 1, "--max_steps=100000000", model=slow(0.05)) as tasks, processes() as started:
        tasks["worker/0"].wait_for("step=", 120)
        argv = Path(f"/proc/{tasks['worker/0'].pid}/cmdline").read_text().split("\0")[3:-1]
        second = Process(tmp_path / "second", *argv)
        started.append(second)
        assert second.wait(120) == 2
        assert "is taken by another process" in second.output()
        until = time.monotonic() + 12  # a PS that was asked to end would have ended by then
        while time.monotonic() < until:
            wait_for_steps(tasks, 30)
            assert tasks["ps/0"].poll() is None


def wait_until(holds: Callable[[], object], secs: float) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + secs * PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fork_servers(supervisor: Process) -> list[int]:
    """Return the fork server below a supervisor, and what is forked from it."""
    found = []
    for pid in alive(children_of(supervisor.pid)):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@contextlib.contextmanager
def cluster_of_three(directory: Path) -> Iterator[tuple[Callable[[str, int], Process], int]]:
    """Yield what starts a task under its own supervisor, and the port of worker 1.

    The model loads only where the file ``data`` is beside it.
    """
    model = directory / "model.py"
    model.write_text(f"open({str(directory / 'data')!r})\n{POWERS}")
    with held_ports(3) as ports, processes() as started:
        ps, *workers = [f"127.0.0.1:{port}" for port in ports]
        flags = [f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}", f"--model={model}", "--max_steps=50"]
        flags += [f"--model_dir={directory / 'm'}", "--start_timeout_secs=600", "--max_restarts=3"]

        def start(name: str, index: int) -> Process:
            me = [f"--job_name={name}", f"--task_index={index}"]
            started.append(Process(directory / f"{len(started)}.out", *flags, *me))
            return started[-1]

        yield start, ports[2]


def wait_until_reporting(failing: Process) -> None:
    """Wait until the supervisor of a worker that fails has started another fork server, to report it to the PS."""
    wait_until(lambda: fork_servers(failing), 120)
    [first, *_] = fork_servers(failing)
    wait_until(lambda: (now := fork_servers(failing)) and first not in now, 120)


def test_a_worker_that_failed_ends_no_job_that_is_started_after_it(tmp_path: Path) -> None:
    """The job is mended and started again at the same addresses, while the old supervisor looks for a PS: it trains."""
    with cluster_of_three(tmp_path) as (start, _):
        failing = start("worker", 1)
        wait_until_reporting(failing)
        (tmp_path / "data").touch()
        tasks = [start(*task) for task in (("ps", 0), ("worker", 0), ("worker", 1))]
        assert [task.wait(200) for task in tasks] == [0, 0, 0], "\n".join(task.output() for task in tasks)
        assert failing.wait(100) == 2
        assert failing.output().endswith(f"    open('{tmp_path}/data')\n"), "nobody needs TensorFlow's own lines"


def test_a_worker_that_is_started_again_is_not_reported(tmp_path: Path) -> None:
    """A PS that waits for it goes on waiting: another process answers as that worker when the report is due."""
    with cluster_of_three(tmp_path) as (start, port):
        ps = start("ps", 0)
        ps.wait_for("waiting for", 120)
        failing = start("worker", 1)
        wait_until_reporting(failing)
        with contextlib.closing(Speaker(Task("worker", 1), port)):
            assert failing.wait(120) == 2
            ps.signal(signal.SIGTERM)
            assert ps.wait(100) == 143, ps.output()


def test_a_task_that_is_asked_to_stop_saves_and_is_not_started_again(tmp_path: Path) -> None:
    """SIGTERM to the supervisors is the tasks': all end with 143 in time, the state saved, no process left."""
    flags = ("--max_steps=100000000", "--save_checkpoint_secs=3600")
    with job(tmp_path, 1, 2, *flags, model=slow(0.05), **PATIENT) as tasks:
        tasks["worker/1"].wait_for("step=", 120)
        below = [pid for task in tasks.values() for pid in children_of(task.pid)]
        assert len(below) >= 3
        for task in tasks.values():
            task.signal(signal.SIGTERM)
        assert {name: task.wait(100) for name, task in tasks.items()} == dict.fromkeys(tasks, 143)
        wait_gone(below, 5)
        assert list((tmp_path / "m").glob("model.ckpt-*.index"))
        assert all("restarted" not in task.output() for task in tasks.values())


def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its task ends in order, with its state saved, within the time that tasks have."""
    flags = ("--max_steps=100000000", "--save_checkpoint_secs=3600")
    with job(tmp_path, 1, 1, *flags, model=slow(0.05), **PATIENT) as tasks:
        tasks["worker/0"].wait_for("step=", 120)
        below = children_of(tasks["worker/0"].pid)
        assert below
        tasks["worker/0"].signal(signal.SIGKILL)
        wait_gone(below, 15)
        assert list((tmp_path / "m").glob("model.ckpt-*.index"))


def test_a_supervised_job_ends_as_any_other(tmp_path: Path) -> None:
    """Every task ends with 0, and what it said is passed on line by line."""
    with job(tmp_path, 1, 2, "--max_steps=50", model=POWERS) as tasks:
        assert {name: task.wait(120) for name, task in tasks.items()} == dict.fromkeys(tasks, 0)
        assert summary(tmp_path / "m")["global_step"] == 50
        assert "training: mode async, 2 workers, 1 ps" in tasks["worker/1"].output()


def test_a_ps_that_is_done_stays_done(tmp_path: Path) -> None:
    """SIGTERM may come at any moment while its processes end, as from a TFJob's controller: it ends with 0."""
    turns = (_signals_while_a_ps_ends(tmp_path / str(turn)) for turn in range(5))
    assert any(signals > 1 for signals in turns), "it had always ended before it was sent two"


def _signals_while_a_ps_ends(directory: Path) -> int:
    """Run a job whose PS gets SIGTERM from when it is done to its end; return how often it was sent."""
    directory.mkdir()
    with job(directory, 1, 1, "--max_steps=50", model=POWERS) as tasks:
        ps, signals = tasks["ps/0"], 0
        ps.wait_for("training: serving", 120)
        while "\ndone\n" not in ps.output():
            assert ps.poll() is None, ps.output()
            time.sleep(0.002)
        while ps.poll() is None:
            ps.signal(signal.SIGTERM)
            signals += 1
            time.sleep(0.002)
        assert {name: task.wait(100) for name, task in tasks.items()} == dict.fromkeys(tasks, 0)
    return signals


@pytest.mark.parametrize("reader", ["is stuck", "continues", "is gone"])
def test_who_reads_what_a_supervisor_passes_on_stops_no_task(tmp_path: Path, reader: str) -> None:
    """What a full pipe does not take is left out: the task goes on, its log has it all, and it ends when asked to."""
    os.mkfifo(tmp_path / "pipe")
    under = {"worker/0": ("sh", "-c", f'exec "$@" > {tmp_path}/pipe 2>&1', "sh")}
    model = slow(0.01).replace("        return x", "        print(len(batches), 'x' * 4000)\n        return x")
    log, taken = tmp_path / "m" / "logs" / "worker-0.log", tmp_path / "taken"
    with contextlib.ExitStack() as stack:
        pipe = stack.enter_context(open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), "rb"))
        os.set_blocking(pipe.fileno(), True)
        tasks = stack.enter_context(job(tmp_path, 1, 1, "--max_steps=100000", model=model, under=under, **PATIENT))
        wait_until(log.exists, 120)
        if reader == "is gone":
            pipe.close()
        wait_until(lambda: len(printed(log)) > 500, 120)  # 2 MB
        if reader == "continues":
            copy = stack.enter_context(subprocess.Popen(["cat"], stdin=pipe, stdout=taken.open("wb")))
            wait_until(lambda: "left out: standard output was not read)\n" in taken.read_text(), 60)
            known = len(printed(taken))
            wait_until(lambda: len(printed(taken)) > known, 60)
        tasks["worker/0"].signal(signal.SIGTERM)
        assert tasks["worker/0"].wait(60) == 143
        if reader == "continues":
            assert copy.wait(60) == 0
            assert printed(taken) == sorted(set(printed(taken)))
    assert printed(log) == list(range(1, len(printed(log)) + 1))


def printed(file: Path) -> list[int]:
    """Return the numbers before the long lines of a model in a file."""
    return list(map(int, re.findall(r"^(\d+) x{4000}$", file.read_text(), re.MULTILINE)))
