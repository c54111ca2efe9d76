"""``--data_policy=dynamic`` and a worker that is killed: what was dealt to it goes back, and nothing is lost."""

import signal
import time
from pathlib import Path

import pytest
from support.processes import PATIENCE, by_hand, load_variable
from support.restarting_platform import platform

SIZE, EPOCHS = 400, 2
MODEL = f"""
import time
import tensorflow.compat.v1 as tf
import tfps

def late(ids):
    time.sleep(0.1)
    return ids

def input_fn(mode, params, input_context):
    if mode == "eval":
        return None

    def read(ids):
        slow = tf.reshape(tf.numpy_function(late, [ids], tf.int64), tf.shape(ids))
        return {{"id": slow}}, tf.zeros_like(ids)

    return tfps.Examples({SIZE}, read)

def model_fn(features, labels, mode, params):
    table = tf.get_variable("table", [{SIZE}], initializer=tf.zeros_initializer())
    loss = -tf.reduce_sum(tf.gather(table, features["id"]))
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))
"""


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_the_shards_of_a_killed_worker_go_to_others(tmp_path: Path, mode: str) -> None:
    """Worker 2 is killed in the first epoch and is not replaced: the others read what it had, and the job ends well."""
    model, model_dir = tmp_path / "counting.py", tmp_path / "job"
    model.write_text(MODEL)
    flags = [f"--model={model}", f"--model_dir={model_dir}", f"--mode={mode}", "--data_policy=dynamic"]
    flags += [f"--epochs={EPOCHS}", "--batch_size=4", "--steps_to_validate=1", "--max_restarts=0"]
    with by_hand(tmp_path, 1, 3, *flags) as tasks:
        tasks["worker/0"].wait_for_step(20, 60)
        tasks["worker/2"].signal(signal.SIGKILL)
        for name in ("worker/0", "worker/1", "ps/0"):
            assert tasks[name].wait(90) == 0, tasks[name].output()
        assert "lost worker/2" in tasks["worker/0"].output() + tasks["worker/1"].output()
    used = load_variable(model_dir, "table")
    assert used.min() == EPOCHS, used
    assert used.sum() <= SIZE * EPOCHS + 64, used  # what two epochs had in hand at the same time


def _flags(mode: str) -> list[str]:
    return [f"--mode={mode}", "--data_policy=dynamic", f"--epochs={EPOCHS}", "--batch_size=4", "--steps_to_validate=1"]


@pytest.mark.parametrize(("mode", "lost"), [("async", "worker/1"), ("async", "worker/0"), ("sync", "worker/1")])
def test_a_worker_that_starts_again_reads_what_it_had(tmp_path: Path, mode: str, lost: str) -> None:
    """A killed worker is replaced; in sync, the job restarts from its checkpoint, and each example is used exactly."""
    with platform(tmp_path, 1, 2, *_flags(mode), model=MODEL) as job:
        job.tasks["worker/0"].wait_for_step(20, 60)
        job.tasks[lost].signal(signal.SIGKILL)
        assert set(job.wait(120).values()) == {0}, job.said()
        assert job.starts[lost] > 1
    used = load_variable(tmp_path / "m", "table") * (2 if mode == "sync" else 1)
    assert used.min() == EPOCHS, used
    assert used.sum() <= SIZE * EPOCHS + (0 if mode == "sync" else 64), used


def test_a_killed_job_goes_on_in_its_epoch(tmp_path: Path) -> None:
    """All tasks are killed after a checkpoint in an epoch: the parameters see each example so often, and no more."""
    model_dir = tmp_path / "m"
    with platform(tmp_path, 1, 2, *_flags("async"), model=MODEL) as job:
        deadline = time.monotonic() + 60 * PATIENCE
        while not list(model_dir.glob("model.ckpt-*.index")):
            assert time.monotonic() < deadline, job.said()
            time.sleep(0.05)
        job.abandoned.update(job.tasks)
        for task in list(job.tasks.values()):
            task.signal(signal.SIGKILL)
        job.wait(60)
    assert 0 < load_variable(model_dir, "table").sum() < SIZE * EPOCHS
    with platform(tmp_path, 1, 2, *_flags("async"), model=MODEL) as job:
        assert set(job.wait(120).values()) == {0}, job.said()
    assert (load_variable(model_dir, "table") == EPOCHS).all()
