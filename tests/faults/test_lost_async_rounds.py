"""With ``--async_rounds``, a lost or frozen worker holds nobody, and the steps of a round count once or never."""

import signal
from pathlib import Path

import pytest
from support.processes import PATIENT, load_variable, slow, summary
from support.restarting_platform import platform

KILL, STOP, CONT, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM
STEPS, WORKERS, EVERY = 120, 3, 7


def _flags(*flags: str) -> list[str]:
    rounds = ["--mode=local", "--async_rounds=1", f"--sync_every={EVERY}"]
    return [*rounds, f"--max_steps={STEPS}", "--steps_to_validate=1", *flags]


def _check(model_dir: Path) -> list[int]:
    """Check that the steps which the PS have counted are those in the weight; return them by worker."""
    reported = summary(model_dir)
    steps = [reported["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)]
    assert (reported["status"], reported["global_step"]) == ("done", STEPS)
    assert not reported.get("partial_updates")
    assert sum(steps) == WORKERS * STEPS
    changed = sum(taken * 2**worker for worker, taken in enumerate(steps)) / WORKERS
    assert abs(load_variable(model_dir, "weight") + changed) < 1e-2
    return steps


@pytest.mark.parametrize("lost", ["worker/1", "worker/0"])
def test_a_killed_worker_holds_nobody(tmp_path: Path, lost: str) -> None:
    """Its round is lost; it or others take these steps again."""
    with platform(tmp_path, 2, WORKERS, *_flags(), model=slow(0.02)) as job:
        job.tasks["worker/2"].wait_for_step(30, 60)
        job.tasks[lost].signal(KILL)
        assert set(job.wait(180).values()) == {0}, job.said()
        assert job.starts[lost] >= 2
        assert job.starts["worker/2"] == 1
    _check(tmp_path / "m")


def test_a_worker_that_does_not_come_back_is_replaced_by_the_others(tmp_path: Path) -> None:
    """They take the steps of its round, too."""
    with platform(tmp_path, 1, WORKERS, *_flags(), model=slow(0.02), **PATIENT) as job:
        job.tasks["worker/2"].wait_for_step(30, 60)
        job.abandoned.add("worker/1")
        job.tasks["worker/1"].signal(KILL)
        codes = job.wait(180)
        assert {name for name, code in codes.items() if code} == {"worker/1"}, job.said()
    assert _check(tmp_path / "m")[1] < STEPS


def test_a_frozen_worker_holds_nobody(tmp_path: Path) -> None:
    """The others take its steps, also those of its round, and end the job; when it comes back, that is over."""
    with platform(tmp_path, 2, WORKERS, *_flags(), model=slow(0.02), **PATIENT) as job:
        frozen = job.tasks["worker/1"]
        frozen.wait_for_step(20, 60)
        job.abandoned.add("worker/1")
        frozen.signal(STOP)
        try:
            assert [job.tasks[f"worker/{worker}"].wait(120) for worker in (0, 2)] == [0, 0], job.said()
        finally:
            frozen.signal(CONT)
        codes = job.wait(60)
        assert {name for name, code in codes.items() if code} <= {"worker/1"}, job.said()
    assert _check(tmp_path / "m")[1] < STEPS


def test_a_job_whose_ps_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Each step after that of the checkpoint is taken once."""
    with platform(tmp_path, 2, WORKERS, *_flags(), model=slow(0.03)) as job:
        job.tasks["worker/2"].wait_for_step(70, 60)
        job.tasks["ps/0"].signal(KILL)
        assert set(job.wait(180).values()) == {0}, job.said()
        assert job.starts["ps/0"] >= 2
    reported = summary(tmp_path / "m")
    steps = [reported["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)]
    assert (reported["status"], reported["global_step"]) == ("done", STEPS)
    assert sum(steps) == WORKERS * (STEPS - reported["resumed_from_step"])


def test_a_job_that_is_stopped_goes_on_from_its_complete_rounds(tmp_path: Path) -> None:
    """The summary of each of its parts has the steps that count."""
    with platform(tmp_path, 1, WORKERS, *_flags(), model=slow(0.02)) as job:
        job.tasks["worker/2"].wait_for_step(40, 60)
        job.abandoned.update(job.tasks)
        for task in job.tasks.values():
            task.signal(TERM)
        job.wait(60)
    stopped, before = summary(tmp_path / "m"), load_variable(tmp_path / "m", "weight")
    assert stopped["status"] == "stopped"
    steps = [stopped["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)]
    assert stopped["global_step"] == sum(steps) // WORKERS
    assert abs(before + sum(taken * 2**worker for worker, taken in enumerate(steps)) / WORKERS) < 1e-3
    with platform(tmp_path, 1, WORKERS, *_flags(), model=slow(0.001)) as job:
        assert set(job.wait(180).values()) == {0}, job.said()
    reported = summary(tmp_path / "m")
    steps = [reported["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)]
    assert sum(steps) == WORKERS * (STEPS - stopped["global_step"])
    after = load_variable(tmp_path / "m", "weight")
    assert abs(after - before + sum(taken * 2**worker for worker, taken in enumerate(steps)) / WORKERS) < 1e-2
