"""``tfps launch`` whose processes are killed or told to stop: nothing is left running, and nothing saved is lost."""

import os
import signal
from pathlib import Path

import pytest
from helpers import POWERS, Process, alive, children_of, processes, run_tfps, summary, wait_gone

LONG = ("launch", "--model=linear", "--num_ps=1", "--num_workers=2", "--max_steps=1000000", "--steps_to_validate=20")


def test_killed_half_way_it_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """The launcher and all tasks killed, the same command goes on from the last checkpoint, and the summary says so."""
    model = tmp_path / "powers.py"
    model.write_text(POWERS)
    model_dir = tmp_path / "m"
    command = ("launch", f"--model={model}", f"--model_dir={model_dir}", "--save_checkpoint_secs=0.3")
    with processes() as started:
        started.append(Process(tmp_path / "out", *command, "--max_steps=1000000"))
        started[0].wait_for("saved ", 60)
        below = children_of(started[0].pid)
        started[0].signal(signal.SIGKILL)
        for pid in alive(below):
            os.kill(pid, signal.SIGKILL)
        wait_gone(below, 10)
    saved = max(int(path.stem.rpartition("-")[2]) for path in model_dir.glob("model.ckpt-*.index"))
    ended = run_tfps(*command, f"--max_steps={saved + 100}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = summary(model_dir)
    assert told["resumed_from"] == str(model_dir / f"model.ckpt-{saved}")
    assert told["resumed_from_step"] >= saved  # async workers go on while a checkpoint is written
    assert told["global_step"] == saved + 100
    assert f"resumed from step {told['resumed_from_step']:,}" in ended.stdout


@pytest.mark.parametrize("told", ["Ctrl-C", "SIGTERM to the process group"])
def test_told_to_stop_it_stops_all_of_it_with_its_state_saved(tmp_path: Path, told: str) -> None:
    """Every task ends with 143, the chief's state is saved, no process is left, and how to go on is said."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, "--issync=1", f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("step=100 ", 60)
        below = children_of(started[0].pid)
        assert len(below) >= 4
        if told == "Ctrl-C":
            started[0].signal(signal.SIGINT)
        else:
            os.killpg(started[0].pid, signal.SIGTERM)
        assert started[0].wait(15) == 143
        wait_gone(below, 15)
        left = summary(tmp_path / "m")
        assert f"stopped at step {left['global_step']}" in started[0].output()
    assert left["status"] == "stopped"
    assert left["checkpoint"].endswith(f"-{left['global_step']}")
    assert {of["exit_code"] for of in left["tasks"].values()} == {143}
    assert "Traceback" not in "".join(path.read_text() for path in (tmp_path / "m" / "logs").iterdir())


def test_if_the_launcher_dies_its_tasks_do_too(tmp_path: Path) -> None:
    """SIGKILL to the launcher leaves no process behind after 10 s."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("examples/s=", 60)
        below = children_of(started[0].pid)
        assert len(below) >= 4
        started[0].signal(signal.SIGKILL)
        wait_gone(below, 10)


def test_a_killed_worker_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """A task that is killed ends the job with 170, its name and the signal; the others save and leave."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("worker/1 | step=", 60)
        below = children_of(started[0].pid)
        victim = next(pid for pid in below if b"--task_index=1" in _command(pid, tmp_path))
        os.kill(victim, signal.SIGKILL)
        assert started[0].wait(20) == 170
        assert "error: worker/1 was killed by SIGKILL" in started[0].output()
        wait_gone(below, 15)
    told = summary(tmp_path / "m")
    assert (told["status"], told["exit_code"], told["tasks"]["worker/1"]["exit_code"]) == ("failed", 170, -9)


def _command(pid: int, directory: Path) -> bytes:
    """Return which task a forked process is, by the log that it holds open."""
    del directory
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return b"--task_index=1" if any(link.endswith("worker-1.log") for link in links) else b""
