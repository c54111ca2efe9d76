"""Jobs without PS: the chief holds the variables and the job's state, and the other workers lose all with it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support import cluster, distributions
from support.modes_without_ps import AsyncWithoutPs, SyncWithoutPs
from support.processes import (
    PATIENT,
    POWERS,
    REPO,
    Process,
    by_hand,
    children_of,
    load_variable,
    open_files,
    processes,
    run_tfps,
    slow,
    summary,
)

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


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Install the modes as another package does; returns the ``PYTHONPATH`` to use."""
    entries = [f"{mode.name} = support.modes_without_ps:{type(mode).__name__}" for mode in _MODES.values()]
    distributions.install(tmp_path / "site", "extra", *entries, group="tfps.modes")
    return f"{PATIENT['PYTHONPATH']}:{REPO / 'tests'}:{tmp_path / 'site'}"


@pytest.mark.parametrize("mode", ["sync_without_ps", "async_without_ps"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_task_is_replaced(mode: str, lost: int, tmp_path: Path, path: str) -> None:
    """The job ends well: without its chief it restarts from its checkpoint, and another worker comes back alone."""
    go, model_dir = tmp_path / "go", tmp_path / "m"
    (tmp_path / "mine.py").write_text(slow(0.01, until=go))
    flags = [f"--model={tmp_path / 'mine.py'}", f"--model_dir={model_dir}", "--max_steps=300", f"--mode={mode}"]
    flags += ["--num_workers=2", "--save_checkpoint_secs=1", "--steps_per_run=1"]
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags, PYTHONPATH=path)
        started.append(job)
        job.wait_for("saved ", 60)
        os.kill(_pid_of(f"worker-{lost}", job.pid), signal.SIGKILL)
        job.wait_for("restarted after SIGKILL", 30)
        go.touch()
        assert job.wait(90) == 0, job.output()
    reported = summary(model_dir)
    assert (reported["status"], reported["global_step"]) == ("done", 300)
    assert ("resumed from" in job.output()) == (lost == 0), job.output()
    if mode == "sync_without_ps":
        assert load_variable(model_dir, "weight") == -1.5 * 300


def test_a_failed_worker_ends_the_job_with_its_code(tmp_path: Path, path: str) -> None:
    """The chief learns from its own variables that another worker has failed for good, and names it."""
    source = POWERS.replace("power = 2.0 **", "power = float('nan') if input_context.input_pipeline_id else 2.0 **")
    (tmp_path / "mine.py").write_text(source)
    flags = ["--mode=async_without_ps", f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / 'm'}"]
    with by_hand(tmp_path, 0, 2, *flags, "--max_steps=1000000000", PYTHONPATH=path) as tasks:
        assert tasks["worker/1"].wait(60) == 66, tasks["worker/1"].output()
        assert tasks["worker/0"].wait(60) == 66, tasks["worker/0"].output()
    assert "worker/1 has failed with exit code 66" in tasks["worker/0"].output()


def test_all_tasks_of_a_job_by_hand_end_well(tmp_path: Path, path: str) -> None:
    """The chief outlives the other workers, so none of them ends with an error; five times, as this is a race."""
    (tmp_path / "mine.py").write_text(POWERS)
    for turn in range(5):
        flags = ["--mode=sync_without_ps", f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / str(turn)}"]
        with by_hand(tmp_path, 0, 3, *flags, "--max_steps=20", PYTHONPATH=path) as tasks:
            ended = {name: task.wait(60) for name, task in tasks.items()}
        assert set(ended.values()) == {0}, [task.output() for task in tasks.values()]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["launch", "--mode=sync_without_ps", "--num_ps=2"], "--num_ps=2, but --mode=sync_without_ps has no PS"),
        (["plan", "--mode=sync_without_ps", "--num_ps=1"], "--num_ps=1, but --mode=sync_without_ps has no PS"),
        (["launch", "--mode=sync", "--num_ps=0"], "a mode without PS: --mode=allreduce or --mode=gossip."),
        (["submit", "--to=slurm", "--dry_run", "--num_ps=0"], "--num_ps=0, but --mode=async needs a PS"),
        (["doctor", "--mode=sync_without_ps", "--ps_hosts=a:1", "--worker_hosts=b:1"], "--ps_hosts has 1 ps, but"),
        (["run", "--mode=sync_without_ps", "--job_name=ps", "--task_index=0", "--worker_hosts=b:1"], "is a ps, but"),
    ],
)
def test_ps_are_refused_where_the_mode_has_none_and_the_other_way_round(
    flags: list[str], problem: str, path: str
) -> None:
    """It is exit 2, on every command, before anything starts."""
    ended = run_tfps(*flags, PYTHONPATH=path)
    assert ended.returncode == 2
    assert problem in ended.stderr


def test_ps_of_tf_config_are_refused(path: str) -> None:
    """A platform that has started PS is told to start none."""
    place = {"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    ended = run_tfps("run", "--mode=sync_without_ps", PYTHONPATH=path, TF_CONFIG=json.dumps(place))
    assert ended.returncode == 2
    assert "TF_CONFIG cluster.ps has 1 ps, but --mode=sync_without_ps has no PS: " in ended.stderr


def _pid_of(task: str, launcher: int) -> int:
    """Return the process of a launcher's task, which has its log open."""
    found = [pid for pid in children_of(launcher) if any(f"{task}.log" in name for name in open_files(pid))]
    assert len(found) == 1, found
    return found[0]
