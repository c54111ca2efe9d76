"""In ``local``, all workers take a round again in which a task was lost: no step is lost, and none counts twice."""

import signal
import time
from pathlib import Path

import pytest
from support.processes import PATIENCE, load_variable, slow, summary
from support.restarting_platform import platform

KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
STEPS, WORKERS = 200, 3
MEAN = sum(2**worker for worker in range(WORKERS)) / WORKERS  # of the workers' gradients


def _flags(*flags: str) -> list[str]:
    return ["--mode=local", "--sync_every=7", f"--max_steps={STEPS}", "--steps_to_validate=1", *flags]


def _model(step_secs: float) -> str:
    """Return a model that counts its steps."""
    counter = "tf.get_variable('seen', [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)"
    count = f"    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, {counter}.assign_add(1))\n"
    return slow(step_secs).replace("    loss = weight", f"{count}    loss = weight")


def _check(model_dir: Path, may_miss: int = 0) -> None:
    """Check that each worker's change is in the weight once for each step, and that the chief has counted each once.

    A chief that is lost just when it has ended a round may not have written how far it has counted.
    """
    reported = summary(model_dir)
    assert (reported["status"], reported["global_step"]) == ("done", STEPS)
    assert abs(load_variable(model_dir, "weight") + STEPS * MEAN) < 1e-2
    steps = {reported["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)}
    assert steps == {STEPS - reported["resumed_from_step"]}
    assert STEPS - may_miss <= load_variable(model_dir, "seen") <= STEPS


@pytest.mark.parametrize("lost", ["worker/1", "worker/0", "ps/0"])
def test_a_killed_task_costs_no_step(tmp_path: Path, lost: str) -> None:
    """Whichever it is: a worker, the chief, or a PS, after which the job goes on from its checkpoint."""
    with platform(tmp_path, 1, WORKERS, *_flags(), model=_model(0.02)) as job:
        job.tasks["worker/2"].wait_for_step(60, 60)
        job.tasks[lost].signal(KILL)
        assert set(job.wait(180).values()) == {0}, job.said()
        assert job.starts[lost] >= 2
    _check(tmp_path / "m", may_miss=7 if lost == "worker/0" else 0)


def test_a_frozen_worker_holds_the_others_and_goes_on(tmp_path: Path) -> None:
    """Nobody takes a step meanwhile but those of the present round."""
    with platform(tmp_path, 2, WORKERS, *_flags(), model=_model(0.01)) as job:
        frozen = job.tasks["worker/1"]
        frozen.wait_for_step(20, 60)
        frozen.signal(STOP)
        time.sleep(3 * PATIENCE)
        frozen.signal(CONT)
        assert set(job.wait(180).values()) == {0}, job.said()
    _check(tmp_path / "m")


def test_a_job_that_is_stopped_goes_on_from_its_last_round(tmp_path: Path) -> None:
    """The steps of the round in which it is stopped are taken again."""
    with platform(tmp_path, 1, WORKERS, *_flags(), model=_model(0.02)) as job:
        job.tasks["worker/2"].wait_for_step(40, 60)
        job.abandoned.update(job.tasks)
        for task in job.tasks.values():
            task.signal(signal.SIGTERM)
        job.wait(60)
    stopped = summary(tmp_path / "m")
    assert stopped["status"] == "stopped"
    assert stopped["global_step"] % 7 == 0
    steps = {stopped["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)}
    assert steps == {stopped["global_step"]}  # without those of the round that is lost
    with platform(tmp_path, 1, WORKERS, *_flags(), model=_model(0.001)) as job:
        assert set(job.wait(180).values()) == {0}, job.said()
    _check(tmp_path / "m")
