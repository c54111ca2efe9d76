"""``tfps launch`` and supervised tasks whose fork server, the process that imports TensorFlow, is killed or stopped."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from support.processes import Process, alive, children_of, processes, run_tfps, session_leaders, slow, wait_gone

from tfps.cluster.ports import held_ports

LONG = ("launch", "--model=linear", "--num_ps=1", "--num_workers=1", "--max_steps=1000000", "--steps_to_validate=20")


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_import_of_tensorflow_that_is_killed_is_reported_and_begun_again(tmp_path: Path, restarts: int) -> None:
    """A SIGKILL, as for lack of memory, is named, with code 137; within the budget the import begins again."""
    flags = (f"--max_restarts={restarts}", f"--model_dir={tmp_path / 'm'}")
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, *flags))
        for turn in range(restarts + 1):
            os.kill(before := _importing(started[0].pid), signal.SIGKILL)
            wait_gone([before], 5)
            if turn < restarts:
                started[0].wait_for("restarted after SIGKILL during the import of TensorFlow (1 of 1)", 10)
        assert started[0].wait(100) == 137, started[0].output()
        said = started[0].output()
    assert "error: the process that imports TensorFlow was killed by SIGKILL: is memory short?" in said
    assert "Traceback" not in said


def test_a_supervised_task_whose_import_is_killed_once_runs(tmp_path: Path) -> None:
    """``tfps run --max_restarts`` imports TensorFlow again, and says so."""
    with held_ports(2) as (ps, worker), processes() as started:
        hosts = (f"--ps_hosts=127.0.0.1:{ps}", f"--worker_hosts=127.0.0.1:{worker}", "--job_name=ps", "--task_index=0")
        started.append(Process(tmp_path / "out", *hosts, "--model=linear", "--max_restarts=1"))
        os.kill(_importing(started[0].pid), signal.SIGKILL)
        started[0].wait_for("restarted after SIGKILL during the import of TensorFlow (1 of 1)", 10)
        _wait_for_task(started[0])
        started[0].signal(signal.SIGTERM)
        assert started[0].wait(100) == 143, started[0].output()


def _importing(launcher: int) -> int:
    """Return the fork server of a launcher, as soon as it imports TensorFlow.

    Before, nothing may be connected to it yet, and ``multiprocessing`` starts another one without a word.
    """
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for pid in alive(children_of(launcher)):
            with contextlib.suppress(OSError):
                is_fork_server = b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
                if is_fork_server and b"/libtensorflow" in Path(f"/proc/{pid}/maps").read_bytes():
                    return pid
        time.sleep(0.02)
    raise AssertionError(f"{launcher} has no fork server")


@pytest.mark.parametrize("name", ["launch.log", "worker-0.log"])
def test_a_fifo_in_place_of_a_log_is_refused(tmp_path: Path, name: str) -> None:
    """Nobody reads it: the job ends with 74, and the file's name, rather than to wait without end."""
    logs = tmp_path / "m" / "logs"
    logs.mkdir(parents=True)
    os.mkfifo(logs / name)
    ended = run_tfps(*LONG, f"--model_dir={tmp_path / 'm'}")
    assert ended.returncode == 74, ended.stdout + ended.stderr
    assert f"--model_dir: {logs / name} cannot be written: it is not a regular file." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_stopped_fork_server_does_not_outlive_a_stop(tmp_path: Path) -> None:
    """It cannot report the ends of tasks: the job is stopped nevertheless, and no process is left."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("examples/s=", 60)
        below = children_of(started[0].pid)
        os.kill(_importing(started[0].pid), signal.SIGSTOP)
        started[0].signal(signal.SIGTERM)
        assert started[0].wait(100) == 143, started[0].output()
        wait_gone(below, 5)


def test_a_fork_server_that_stays_stopped_is_killed(tmp_path: Path) -> None:
    """Stopped again and again, as by a frozen container, it is killed some time after the tasks."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("examples/s=", 60)
        below = children_of(started[0].pid)
        server = _importing(started[0].pid)
        os.kill(server, signal.SIGSTOP)
        started[0].signal(signal.SIGTERM)
        deadline = time.monotonic() + 100
        while started[0].poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGSTOP)
        assert started[0].wait(1) == 143, started[0].output()
        wait_gone(below, 5)


def test_a_job_that_is_done_ends_though_its_fork_server_is_stopped(tmp_path: Path) -> None:
    """All tasks say that they are done, and end: so does the job, with 0."""
    model = tmp_path / "slow.py"
    model.write_text(slow(0.1, until=tmp_path / "go", batch=20))
    flags = (f"--model={model}", "--num_workers=1", "--max_steps=50", f"--model_dir={tmp_path / 'm'}")
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", *flags))
        started[0].wait_for("worker/0 | training", 60)
        os.kill(_importing(started[0].pid), signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert started[0].wait(100) == 0, started[0].output()


def test_the_fork_server_does_not_outlive_a_supervised_task(tmp_path: Path) -> None:
    """When ``tfps run --max_restarts`` has ended, so has the process that imported TensorFlow for it."""
    with held_ports(2) as (ps, worker), processes() as started:
        hosts = (f"--ps_hosts=127.0.0.1:{ps}", f"--worker_hosts=127.0.0.1:{worker}", "--job_name=ps", "--task_index=0")
        started.append(Process(tmp_path / "out", *hosts, "--model=linear", "--max_restarts=1"))
        server = _importing(started[0].pid)
        _wait_for_task(started[0])
        started[0].signal(signal.SIGTERM)
        assert started[0].wait(100) == 143, started[0].output()
        assert not alive([server])


def _wait_for_task(supervisor: Process) -> None:
    deadline = time.monotonic() + 100
    while not session_leaders(children_of(supervisor.pid)):
        assert time.monotonic() < deadline, supervisor.output()
        time.sleep(0.1)
