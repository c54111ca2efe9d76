"""The position in the data survives kills: no example is lost or doubled where a lost task has left a whole step."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.processes import PATIENCE, load_variable
from support.restarting_platform import platform

# Each example adds 1 / (batch of 4 * gradients in an update) to its own weight. A step takes some milliseconds.
COUNTED = """
import time
import tensorflow.compat.v1 as tf
import tfps

def waited(x):
    time.sleep(0.02)
    return x

def input_fn(mode, params, input_context):
    if mode == "eval":
        return None
    slowly = lambda ids: tf.ensure_shape(tf.numpy_function(waited, [ids], tf.int64), ids.shape)
    return tfps.Examples(96, lambda ids: ({"id": slowly(ids)}, tf.zeros_like(ids)))

def model_fn(features, labels, mode, params):
    table = tf.get_variable("table", [96], initializer=tf.zeros_initializer())
    loss = -tf.reduce_mean(tf.gather(table, features["id"]))
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))
"""
KILL = signal.SIGKILL


def _flags(mode: str, steps: int) -> list[str]:
    return [f"--mode={mode}", "--data_policy=shard", "--batch_size=4", f"--max_steps={steps}", "--steps_to_validate=1"]


@pytest.mark.parametrize("lost", ["worker/1", "worker/0"])
def test_sync_restarts_from_its_checkpoint_when_a_worker_is_killed(tmp_path: Path, lost: str) -> None:
    """The position is that of the checkpoint: 10 epochs have each example 10 times, exactly."""
    with platform(tmp_path, 1, 2, *_flags("sync", 120), model=COUNTED) as job:
        job.tasks[lost if lost == "worker/0" else "worker/0"].wait_for_step(20, 60)
        job.tasks[lost].signal(KILL)
        assert set(job.wait(120).values()) == {0}, job.said()
        assert job.starts[lost] > 1
    np.testing.assert_array_equal(load_variable(tmp_path / "m", "table") * 8, np.full(96, 10))


@pytest.mark.parametrize("lost", ["worker/1", "worker/0"])
@pytest.mark.parametrize("mode", ["allreduce", "gossip"])
def test_a_mode_without_ps_restarts_from_its_checkpoint(tmp_path: Path, mode: str, lost: str) -> None:
    """An input cannot go back: all workers start again, and 10 epochs have each example 10 times."""
    flags = ["--collect_every=5"] if mode == "gossip" else []
    with platform(tmp_path, 0, 2, *_flags(mode, 120), *flags, model=COUNTED) as job:
        job.tasks[lost if lost == "worker/0" else "worker/0"].wait_for_step(20, 60)
        job.tasks[lost].signal(KILL)
        assert set(job.wait(120).values()) == {0}, job.said()
        assert min(job.starts.values()) > 1, job.starts
    np.testing.assert_allclose(load_variable(tmp_path / "m", "table") * 8, np.full(96, 10), rtol=1e-5)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_job_goes_on_at_its_checkpoint(tmp_path: Path, mode: str) -> None:
    """All tasks are killed, some steps after a checkpoint: what the checkpoint has not seen is read again."""
    model_dir = tmp_path / "m"
    with platform(tmp_path, 1, 2, *_flags(mode, 10**6), model=COUNTED) as job:
        deadline = time.monotonic() + 60 * PATIENCE
        while not list(model_dir.glob("model.ckpt-*.index")):
            assert time.monotonic() < deadline, job.said()
            time.sleep(0.05)
        job.abandoned.update(job.tasks)
        for task in list(job.tasks.values()):
            task.signal(KILL)
        job.wait(60)
    saved = int(load_variable(model_dir, "global_step"))
    gradients = 2 if mode == "sync" else 1
    steps = (saved * gradients * 4 // 96 + 3) * 96 // 4 // gradients  # whole epochs
    with platform(tmp_path, 1, 2, *_flags(mode, steps), model=COUNTED) as job:
        assert set(job.wait(120).values()) == {0}, job.said()
    counts = load_variable(model_dir, "table") * 4 * gradients
    assert counts.sum() == steps * 4 * gradients
    np.testing.assert_array_equal(
        counts, load_variable(model_dir, "tfps/examples")[6:] if mode == "async" else counts[0]
    )
