"""Jobs without PS: the chief holds the variables and the job's state, and the other workers lose all with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support import cluster
from support.modes_without_ps import AsyncWithoutPs, SyncWithoutPs
from support.processes import summary

import tfps
from tfps.errors import StoppedError
from tfps.modes import registry

pytestmark = pytest.mark.slow

_MODES = {"sync_without_ps": SyncWithoutPs(), "async_without_ps": AsyncWithoutPs()}


@pytest.fixture(autouse=True)
def known_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modes of ``support.modes_without_ps`` be among the known ones."""
    load = registry._load
    monkeypatch.setattr(registry, "_load", lambda name: _MODES.get(name) or load(name))


def regression(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` with momentum, whose bits depend on the order of all that is added up."""
    weights = tf.get_variable("weights", [3], initializer=tf.ones_initializer())
    bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
    error = tf.reduce_sum(weights * features["x"]) + bias - labels
    loss = tf.square(error)
    metrics = {"error": tf.metrics.mean(error)} if mode == "eval" else None
    optimizer = tf.train.MomentumOptimizer(0.01, 0.9)
    return tfps.ModelSpec(loss=loss, predictions={"y": error}, optimizer=optimizer, eval_metric_ops=metrics)


def numbers(mode: str, params: Any, input_context: Any) -> Any:
    """Be an ``input_fn`` whose batches differ between workers, but not between runs."""
    shift = input_context.input_pipeline_id if input_context else 0
    rows = np.float32([[1, 2, 3], [0, 1, 0.5], [3, 0, 1]]) + np.float32(shift) / 4
    data = tf.data.Dataset.from_tensor_slices(rows).map(lambda row: ({"x": row}, 1.0))
    return data if mode == "eval" else data.repeat()


REGRESSION = cluster.model_of(numbers, regression)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sync_has_the_bits_of_a_job_with_a_ps(workers: int, tmp_path: Path) -> None:
    """The same updates make the same variables, wherever these are."""
    flags = {"max_steps": 30, "save_checkpoint_secs": 1000.0}
    cluster.train(REGRESSION, 1, workers, mode="sync", model_dir=str(tmp_path / "with"), **flags)
    cluster.train(REGRESSION, 0, workers, mode="sync_without_ps", model_dir=str(tmp_path / "without"), **flags)
    there, here = (cluster.variables_of(tmp_path / name) for name in ("with", "without"))
    assert there.keys() == here.keys()
    for name, value in there.items():  # three floats have different sums in different orders
        np.testing.assert_allclose(here[name], value, rtol=0 if workers < 3 else 1e-5)
    assert here["global_step"] == 30
    reports = [summary(tmp_path / name)["eval"] for name in ("with", "without")]
    assert reports[0] == pytest.approx(reports[1], rel=0 if workers < 3 else 1e-4, abs=0 if workers < 3 else 1e-4)


def test_async_applies_each_gradient_once(tmp_path: Path) -> None:
    """Each of the steps of three workers changes the weight by the same amount, and none is lost or doubled."""
    cluster.train(cluster.LINEAR, 0, 3, mode="async_without_ps", max_steps=300, model_dir=str(tmp_path))
    found = cluster.variables_of(tmp_path)
    assert (found["weight"], found["global_step"]) == (-300.0, 300)
    assert sum(task["steps"] for task in summary(tmp_path)["tasks"].values()) == 300


def test_a_stopped_job_resumes(tmp_path: Path) -> None:
    """All stop with the signal's code; the state is saved, and the same job goes on from there."""
    flags = {"mode": "sync_without_ps", "model_dir": str(tmp_path), "max_steps": 10**6}
    with cluster.job(cluster.LINEAR, 0, 2, **flags) as running:
        cluster.wait_until((tmp_path / "job.json").exists)
        running.stop()
        assert all(isinstance(error, StoppedError) for error in running.wait().values())
    step = cluster.variables_of(tmp_path)["global_step"]
    cluster.train(cluster.LINEAR, 0, 2, **{**flags, "max_steps": int(step) + 20})
    found = cluster.variables_of(tmp_path)
    assert (found["global_step"], found["weight"]) == (step + 20, -float(step) - 20)
