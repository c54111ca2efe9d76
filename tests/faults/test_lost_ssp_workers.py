"""In ``ssp``, workers wait for the slowest one, and never for long for one that is lost."""

import signal
import time
from pathlib import Path

import pytest
from support.processes import PATIENCE, load_variable, slow, summary
from support.restarting_platform import Platform, platform

KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
STEPS = 300


def _flags(*flags: str) -> list[str]:
    return ["--mode=ssp", "--staleness=1", f"--max_steps={STEPS}", "--steps_to_validate=1", *flags]


def _wait_for_text(job: Platform, text: str, secs: float) -> None:
    """Wait until some task has said so."""
    deadline = time.monotonic() + secs * PATIENCE
    while text not in job.said():
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.1)


def _check_sum(model_dir: Path, num_workers: int) -> dict[str, int]:
    """Check that each step is applied once, but for one that broke off as its worker was killed, which is reported.

    Return how many each worker has taken.
    """
    reported = summary(model_dir)
    assert (reported["status"], reported["global_step"]) == ("done", STEPS)
    steps = {name: task["steps"] for name, task in reported["tasks"].items() if "steps" in task}
    assert sum(steps.values()) == STEPS
    weight = load_variable(model_dir, "weight")
    assert reported["partial_updates"] or weight == -sum(2**i * steps[f"worker/{i}"] for i in range(num_workers))
    return steps


def test_a_killed_worker_that_is_not_replaced_holds_nobody(tmp_path: Path) -> None:
    """The others find it lost while they wait for it, say so, and take all steps."""
    with platform(tmp_path, 2, 3, *_flags(), model=slow(0.005)) as job:
        job.abandoned.add("worker/1")
        job.tasks["worker/1"].wait_for_step(20, 60)
        job.tasks["worker/1"].signal(KILL)
        began = time.monotonic()
        codes = job.wait(120)
        assert time.monotonic() - began > 10, "they waited for it at first"
        assert codes.pop("worker/1") == -KILL
        assert set(codes.values()) == {0}, job.said()
        assert "lost worker/1: no heartbeat" in job.said()
    steps = _check_sum(tmp_path / "m", 3)
    assert steps["worker/1"] < 100 < min(steps["worker/0"], steps["worker/2"])


@pytest.mark.parametrize("lost", ["worker/1", "worker/0"])
def test_a_killed_worker_that_is_replaced_goes_on_with_the_others(tmp_path: Path, lost: str) -> None:
    """It joins at the others' clock: it takes as many steps from then on, and the chief, too."""
    with platform(tmp_path, 1, 3, *_flags(), model=slow(0.005)) as job:
        job.tasks["worker/2"].wait_for_step(60, 60)
        job.tasks[lost].signal(KILL)
        assert set(job.wait(120).values()) == {0}, job.said()
        assert job.starts[lost] == 2
    steps = _check_sum(tmp_path / "m", 3)
    assert max(steps.values()) - min(steps.values()) < 20, steps


def test_after_a_lost_ps_the_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """All tasks are started again, and the clocks with them."""
    with platform(tmp_path, 2, 3, *_flags(), model=slow(0.02)) as job:
        job.tasks["worker/2"].wait_for_step(90, 60)
        job.tasks["ps/1"].signal(KILL)
        assert set(job.wait(180).values()) == {0}, job.said()
        assert min(job.starts.values()) >= 1
        assert job.starts["ps/1"] >= 2
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"]) == ("done", STEPS)


def test_a_frozen_worker_holds_the_others_for_a_while_and_joins_again(tmp_path: Path) -> None:
    """They evict it. When it is thawed, its update is refused; it ends, is started again, and takes steps."""
    with platform(tmp_path, 1, 3, *_flags(), model=slow(0.005, until=tmp_path / "go", batch=60)) as job:
        frozen = job.tasks["worker/1"]
        frozen.wait_for_step(20, 60)
        frozen.signal(STOP)
        try:
            _wait_for_text(job, "lost worker/1: no heartbeat", 60)
            held = max(int(line.split("step=")[1].split()[0]) for line in job.said().splitlines() if "step=" in line)
            job.tasks["worker/0"].wait_for_step(held + 20, 60)  # the others go on
        finally:
            frozen.signal(CONT)
        job.wait_for_start("worker/1", 2)
        assert frozen.wait(60) == 170
        assert "presumed lost" in frozen.output()
        job.tasks["worker/1"].wait_for("training: mode ssp", 60)
        (tmp_path / "go").touch()
        assert set(job.wait(120).values()) == {0}, job.said()
    assert _check_sum(tmp_path / "m", 3)["worker/1"] > 20
