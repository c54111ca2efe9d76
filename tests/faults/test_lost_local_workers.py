"""In ``local``, all workers take a round again in which a task was lost: no step is lost, and none counts twice."""

import re
import signal
import time
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf
from support.processes import PATIENCE, load_variable, slow, summary
from support.restarting_platform import platform

KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
STEPS, WORKERS = 200, 3
MEAN = sum(2**worker for worker in range(WORKERS)) / WORKERS  # of the workers' gradients


def _flags(*flags: str, steps: int = STEPS) -> list[str]:
    return ["--mode=local", "--sync_every=7", f"--max_steps={steps}", "--steps_to_validate=1", *flags]


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


def _drawn(rounds: int) -> list[set[int]]:
    """Return the two workers of three that train in each round, as ``--seed=5`` draws them."""
    with tf.Graph().as_default(), tf.Session() as session:
        each = [tf.math.top_k(tf.random.stateless_uniform([WORKERS], [5, 7 * one]), 2).indices for one in range(rounds)]
        return [set(map(int, one)) for one in session.run(each)]


@pytest.mark.parametrize(("lost", "trains"), [(1, True), (1, False), (0, True), (0, False)])
def test_a_round_of_a_sample_is_taken_again(tmp_path: Path, lost: int, trains: bool) -> None:
    """If a worker is killed that trains in it, and if one is that waits: each drawn change counts once."""
    rounds = 12
    drawn = _drawn(rounds)
    number = next(one for one in range(3, rounds) if (lost in drawn[one]) == trains)
    other = min(drawn[number] - {lost})
    flags = ["--worker_fraction=0.5", "--seed=5"]
    with platform(tmp_path, 2, WORKERS, *_flags(*flags, steps=7 * rounds), model=_model(0.4)) as job:
        job.tasks[f"worker/{other}"].wait_for_step(7 * number + 1, 90)
        job.tasks[f"worker/{lost}"].signal(KILL)
        said = job.tasks[f"worker/{other}"].output()
        assert set(job.wait(180).values()) == {0}, job.said()
        assert job.starts[f"worker/{lost}"] == 2
    assert max(map(int, re.findall(r"\bstep=(\d+)", said))) < 7 * (number + 1)  # the round had not ended
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"]) == ("done", 7 * rounds)
    mean = sum(sum(2**worker for worker in each) / 2 for each in drawn)
    assert abs(load_variable(tmp_path / "m", "weight") + 7 * mean) < 1e-2
    steps = [reported["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)]
    assert steps == [7 * sum(worker in each for each in drawn) for worker in range(WORKERS)]


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
