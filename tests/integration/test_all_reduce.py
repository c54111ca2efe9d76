"""``--mode=allreduce``: the bits of sync without its PS, on real servers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support import cluster
from support.processes import Process, children_of, load_variable, open_files, processes, run_tfps, slow, summary

import tfps
from tfps.cli.tables import print_plan
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError, StoppedError
from tfps.runtime.graph import builder, plan

pytestmark = pytest.mark.slow

STEPS, WORKERS, ROWS = 12, 3, 5
X = np.random.default_rng(3).integers(-80, 80, [WORKERS, STEPS, 4]).astype(np.float32) / 64
PICKS = np.random.default_rng(4).integers(0, ROWS, [WORKERS, STEPS, 3])
FLAGS: dict[str, Any] = {"max_steps": STEPS, "save_checkpoint_secs": 1000.0}


def input_fn(mode: str, params: Any, context: Any) -> Any:
    """Give worker i the rows of ``X[i]``, one a step, and 1 to 3 rows of a table."""
    if mode == "eval":
        return None
    worker = context.input_pipeline_id
    rows = lambda step: tf.gather(PICKS[worker], step)[: 1 + (step + worker) % 3]  # noqa: E731
    return tf.data.Dataset.range(STEPS).map(lambda step: ({"x": tf.gather(X[worker], step), "rows": rows(step)}, 0.0))


def model_of(make: Any) -> Any:
    """Return a model whose gradients depend on its weights, with a table and state of its own."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
        table = tf.get_variable("table", [ROWS, 2], initializer=tf.ones_initializer())
        average = tf.get_variable("average", [], initializer=tf.zeros_initializer(), trainable=False)
        seen = tf.get_variable("seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
        change = average.assign(0.5 * average + 0.5 * tf.reduce_sum(features["x"]))
        for update in (change, seen.assign_add(1)):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        looked_up = tf.nn.embedding_lookup(table, features["rows"])
        loss = 0.5 * tf.reduce_sum((weight - features["x"]) ** 2) + tf.reduce_sum(looked_up**2 * features["x"][:2])
        return tfps.ModelSpec(loss=loss, optimizer=make())

    return cluster.model_of(input_fn, model_fn)


MOMENTUM = model_of(lambda: tf.train.MomentumOptimizer(0.25, 0.5))
ADAM = model_of(lambda: tf.train.AdamOptimizer(0.1))


@pytest.mark.parametrize(("model", "workers"), [(MOMENTUM, 1), (MOMENTUM, 2), (MOMENTUM, 3), (ADAM, 2), (ADAM, 3)])
def test_the_variables_are_those_of_sync(model: Any, workers: int, tmp_path: Path) -> None:
    """Also the slots, the rows of a table of which each worker has another number, and the model's own state."""
    cluster.train(model, 1, workers, mode="sync", model_dir=str(tmp_path / "sync"), **FLAGS)
    cluster.train(model, 0, workers, mode="allreduce", model_dir=str(tmp_path / "ring"), **FLAGS)
    expected, found = (cluster.variables_of(tmp_path / name) for name in ("sync", "ring"))
    assert found.keys() == expected.keys()
    assert found["global_step"] == found["seen"] == STEPS
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_the_input_of_one_worker_ends_the_job_for_all(ends: int, tmp_path: Path) -> None:
    """It ends after the last step that all have taken, and that step is whole."""
    rows = lambda mode, params, context: data_of(5 if context.input_pipeline_id == ends else 9, mode)  # noqa: ARG005, E731
    model = cluster.model_of(rows, cluster.linear)
    cluster.train(model, 0, 3, mode="allreduce", model_dir=str(tmp_path), **{**FLAGS, "max_steps": 100})
    saved = cluster.variables_of(tmp_path)
    assert (saved["global_step"], saved["weight"]) == (5, -5.0)


def data_of(size: int, mode: str) -> Any:
    """Return a dataset of so many ones."""
    return None if mode == "eval" else cluster.dataset_of(np.ones(size, np.float32))


def test_runs_of_several_steps_take_each_once(tmp_path: Path) -> None:
    """They are those of the flag, and the last one is shorter."""
    flags = {**FLAGS, "max_steps": 50, "steps_per_run": 4}
    cluster.train(cluster.LINEAR, 0, 3, mode="allreduce", model_dir=str(tmp_path), **flags)
    saved = cluster.variables_of(tmp_path)
    assert (saved["global_step"], saved["weight"]) == (50, -50.0)
    assert {task["steps"] for task in summary(tmp_path)["tasks"].values()} == {50}


def test_a_batch_that_is_skipped_leaves_the_others_parts(tmp_path: Path) -> None:
    """A worker whose gradient is NaN takes its next batch for the same step, with what has arrived meanwhile."""

    def rows(mode: str, params: Any, context: Any) -> Any:
        bad = [1.0, 1.0, np.nan, 1.0, np.nan, np.nan, 1.0, 1.0] if context and context.input_pipeline_id == 1 else [1.0]
        return None if mode == "eval" else cluster.dataset_of(np.float32(bad)).repeat()

    flags = {**FLAGS, "max_steps": 30, "on_nan": "skip"}
    cluster.train(cluster.model_of(rows, cluster.linear), 0, 3, mode="allreduce", model_dir=str(tmp_path), **flags)
    saved = cluster.variables_of(tmp_path)
    assert (saved["global_step"], saved["weight"]) == (30, -30.0)


def test_a_job_goes_on_in_another_mode(tmp_path: Path) -> None:
    """The checkpoints of both have the same variables."""
    for mode, num_ps, steps in (("allreduce", 0, 10), ("sync", 1, 20), ("allreduce", 0, 30)):
        flags = {**FLAGS, "max_steps": steps, "model_dir": str(tmp_path)}
        cluster.train(cluster.LINEAR, num_ps, 2, mode=mode, **flags)
        saved = cluster.variables_of(tmp_path)
        assert (saved["global_step"], saved["weight"]) == (steps, -float(steps))


def test_a_rate_that_the_model_changes_is_the_same_on_all(tmp_path: Path) -> None:
    """Each worker changes its own copy, once a step, before the update uses it."""

    def halving(features: Any, labels: Any, mode: str, params: Any) -> Any:
        rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign(0.5 * rate))
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = (weight - 4.0) * features["x"]
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))

    model = cluster.model_of(cluster.ones, halving)
    cluster.train(model, 1, 2, mode="sync", model_dir=str(tmp_path / "sync"), **FLAGS)
    cluster.train(model, 0, 2, mode="allreduce", model_dir=str(tmp_path / "ring"), **FLAGS)
    expected, found = (cluster.variables_of(tmp_path / name) for name in ("sync", "ring"))
    assert found == expected


def _early(features: Any, seen: Any) -> Any:
    with tf.control_dependencies([seen.assign_add(1.0)]):
        return tf.identity(features["x"])


def _of_batch(features: Any, seen: Any) -> Any:
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, seen.assign(features["x"]))
    return features["x"] * seen


@pytest.mark.parametrize(
    ("change", "problem"), [(_early, "before the gradient is complete"), (_of_batch, "by its batch")]
)
def test_a_model_is_refused_whose_copies_would_differ(change: Any, problem: str) -> None:
    """It is an error of the model, before training."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * change(features, seen), optimizer=tf.train.GradientDescentOptimizer(1.0))

    config = JobConfig(mode="allreduce", max_steps=5, batch_size=1)
    workers, model = Cluster((), ("127.0.0.1:1", "127.0.0.1:2")), cluster.model_of(cluster.ones, model_fn)
    with pytest.raises(ModelError, match=problem):
        builder.training(config, workers, Task("worker", 0), model)


class _Noisy(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Adds noise to the mean."""

    def apply_gradients(self, grads_and_vars: Any, *_rest: Any) -> Any:
        """Apply the mean, and noise."""
        return super().apply_gradients([(one + tf.random.normal([], seed=1), of) for one, of in grads_and_vars])


def _own_rate() -> Any:
    return tf.get_variable("rate", [], initializer=tf.ones_initializer(), collections=[tf.GraphKeys.LOCAL_VARIABLES])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (tf.train.GradientDescentOptimizer, "uses the batch"),
        (lambda _x: _Noisy(1.0), "random numbers"),
        (lambda _x: tf.train.GradientDescentOptimizer(tf.numpy_function(lambda: 1.0, [], tf.float32)), "Python"),
        (lambda _x: tf.train.GradientDescentOptimizer(_own_rate()), "uses rate, of which each worker has its own"),
    ],
)
def test_an_optimizer_is_refused_that_would_make_another_update_on_each_worker(make: Any, problem: str) -> None:
    """Its copies would drift apart, and nobody would see it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=make(features["x"]))

    config = JobConfig(mode="allreduce", max_steps=5, batch_size=1)
    workers, model = Cluster((), ("127.0.0.1:1", "127.0.0.1:2")), cluster.model_of(cluster.ones, model_fn)
    with pytest.raises(ModelError, match=problem):
        builder.training(config, workers, Task("worker", 0), model)


def test_a_rate_that_depends_on_the_step_and_noise_of_the_step_are_not_refused() -> None:
    """All workers compute the same."""

    class Same(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, *_rest: Any) -> Any:
            noise = tf.random.stateless_normal([], [1, global_step.read_value()])
            return super().apply_gradients([(one + noise, of) for one, of in grads_and_vars])

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        rate = tf.train.exponential_decay(1.0, tf.train.get_global_step(), 10, 0.5)
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=Same(rate))

    config = JobConfig(mode="allreduce", max_steps=5, batch_size=1)
    workers, model = Cluster((), ("127.0.0.1:1", "127.0.0.1:2")), cluster.model_of(cluster.ones, model_fn)
    assert builder.training(config, workers, Task("worker", 0), model).step.calls_workers


@pytest.mark.parametrize(("devices", "batch_size"), [("cpu:1", 8), ("cpu:2", 4)])
def test_several_devices_in_a_worker_are_one_with_all_their_examples(
    devices: str, batch_size: int, tmp_path: Path
) -> None:
    """Each worker computes the mean over its devices, and sends it once."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        values = np.arange(80, dtype=np.float32) if context and context.input_pipeline_id else np.ones(80, np.float32)
        return None if mode == "eval" else cluster.dataset_of(values).batch(batch_size)

    flags = {**FLAGS, "mode": "allreduce", "batch_size": batch_size, "devices_per_worker": devices}
    cluster.train(cluster.model_of(input_fn, cluster.linear), 0, 2, model_dir=str(tmp_path), **flags)
    saved = cluster.variables_of(tmp_path)
    assert saved["global_step"] == 10
    assert saved["weight"] == -(10 + sum(np.arange(80).reshape(10, 8).mean(axis=1))) / 2


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_the_plan_tells_what_a_worker_sends_to_the_next(num_workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It is 2 (n - 1) / n of the dense gradients and the number of its step; rows of a table go to all as they are."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [1200], initializer=tf.zeros_initializer())
        table = tf.get_variable("table", [ROWS, 2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, features["rows"] if params["batch_size"] > 1 else tf.constant([0]))
        loss = tf.reduce_sum(weight) * features["x"][0] + tf.reduce_sum(rows)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    model, cluster_of = cluster.model_of(input_fn, model_fn), lambda n: Cluster((), tuple(f"w:{i}" for i in range(n)))
    found = plan.make(JobConfig(mode="allreduce", batch_size=2), cluster_of(num_workers), model)
    sizes = [transfer.num_bytes for transfer in found.to_next if transfer.tensor[0] != "^"]
    assert sum(size for size in sizes if size) == 2 * (num_workers - 1) * 4 * 1200 // num_workers + 16
    assert sizes.count(None) == 2 * (num_workers - 1)  # values and row numbers
    assert sum(transfer.num_bytes or 0 for transfer in found.pulled) == 0
    assert sum(transfer.num_bytes or 0 for transfer in found.pushed) == 8
    print_plan(JobConfig(mode="allreduce"), cluster_of(num_workers), found)
    reported = capsys.readouterr().out
    assert "send, worker to next" in reported
    assert " ps to" not in reported


_WITHOUT, _HOSTS = "--num_ps=2, but --mode=allreduce has no PS", "--worker_hosts=b:1,c:1"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["launch", "--num_ps=2"], _WITHOUT),
        (["plan", "--num_ps=2"], _WITHOUT),
        (["submit", "--to=compose", "--dry_run", "--num_ps=2"], _WITHOUT),
        (["submit", "--to=slurm", "--dry_run", "--num_ps=2"], _WITHOUT),
        (["submit", "--to=kubernetes", "--dry_run", "--num_ps=2"], _WITHOUT),
        (["submit", "--to=ray", "--dry_run", "--num_ps=2"], _WITHOUT),
        (["run", "--job_name=worker", "--task_index=0", "--ps_hosts=a:1", _HOSTS], "--ps_hosts has 1 ps, but"),
        (["run", "--job_name=ps", "--task_index=0", _HOSTS], "is a ps, but"),
        (["doctor", "--ps_hosts=a:1", _HOSTS], "--ps_hosts has 1 ps, but"),
        (["launch", "--wire=bfloat16"], "--wire=bfloat16 is for modes with PS"),
        (["launch", "--backup_workers=1"], "--backup_workers=1 is for --mode=sync"),
        (["launch", "--data_policy=shard"], "--data_policy=shard is for --mode=async, sync, ssp or local, and"),
        (["launch", "--staleness=1"], "--staleness=1 is for --mode=ssp"),
        (["launch", "--runs_in_flight=2"], "--runs_in_flight=2 is for --mode=async"),
    ],
)
def test_what_does_not_fit_is_refused(flags: list[str], problem: str) -> None:
    """It is exit 2, naming flag, value and mode, on every command, before anything starts."""
    ended = run_tfps(*flags, "--mode=allreduce")
    assert ended.returncode == 2, ended.stderr
    assert problem in ended.stderr


def test_a_stopped_job_resumes(tmp_path: Path) -> None:
    """All stop with the signal's code, between two steps of the chief, and the same job goes on from there."""
    flags = {"mode": "allreduce", "model_dir": str(tmp_path), "max_steps": 10**6}
    with cluster.job(cluster.LINEAR, 0, 3, **flags) as running:
        cluster.wait_until((tmp_path / "job.json").exists)
        running.stop()
        assert all(isinstance(error, StoppedError) for error in running.wait().values())
    step = cluster.variables_of(tmp_path)["global_step"]
    cluster.train(cluster.LINEAR, 0, 3, **{**flags, "max_steps": int(step) + 20})
    found = cluster.variables_of(tmp_path)
    assert (found["global_step"], found["weight"]) == (step + 20, -float(step) - 20)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_killed_worker_is_replaced(lost: int, tmp_path: Path) -> None:
    """No step is lost or doubled. The other workers keep their processes, unless it was the chief, who had all."""
    go, model_dir = tmp_path / "go", tmp_path / "m"
    (tmp_path / "mine.py").write_text(slow(0.01, until=go))
    flags = [f"--model={tmp_path / 'mine.py'}", f"--model_dir={model_dir}", "--max_steps=300", "--mode=allreduce"]
    flags += ["--num_workers=3", "--save_checkpoint_secs=1", "--steps_per_run=1"]
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags)
        started.append(job)
        job.wait_for("saved ", 60)
        before = [_pid_of(f"worker-{index}", job.pid) for index in range(3)]
        os.kill(before[lost], signal.SIGKILL)
        job.wait_for("restarted after SIGKILL", 30)
        go.touch()
        assert job.wait(120) == 0, job.output()
    reported = summary(model_dir)
    assert (reported["status"], reported["global_step"]) == ("done", 300)
    assert reported["tasks"]["worker/2"]["steps"] == 300 or lost in (0, 2)
    assert ("resumed from" in job.output()) == (lost == 0), job.output()
    assert job.output().count("restarted after") == 1 or lost == 0, job.output()
    assert load_variable(model_dir, "weight") == pytest.approx(-7 / 3 * 300, rel=1e-5)


def test_a_frozen_worker_is_waited_for(tmp_path: Path) -> None:
    """When it goes on, all go on with it."""
    (tmp_path / "mine.py").write_text(slow(0.01, until=tmp_path / "go"))
    flags = [f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / 'm'}", "--max_steps=300", "--mode=allreduce"]
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags, "--num_workers=3", "--save_checkpoint_secs=1")
        started.append(job)
        job.wait_for("saved ", 60)
        frozen = _pid_of("worker-1", job.pid)
        os.kill(frozen, signal.SIGSTOP)
        (tmp_path / "go").touch()
        time.sleep(3)  # longer than two heartbeats
        os.kill(frozen, signal.SIGCONT)
        assert job.wait(120) == 0, job.output()
    assert load_variable(tmp_path / "m", "weight") == pytest.approx(-7 / 3 * 300, rel=1e-5)


def _pid_of(task: str, launcher: int) -> int:
    """Return the process of a launcher's task, which has its log open."""
    found = [pid for pid in children_of(launcher) if any(f"{task}.log" in name for name in open_files(pid))]
    assert len(found) == 1, found
    return found[0]


def seeing(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` whose own changes read the weight and the step in a function and in a branch."""
    spec = cluster.linear(features, labels, mode, params)
    weight, step = tf.trainable_variables()[0], tf.train.get_global_step()
    names = ("in_function", "in_branch", "steps")
    own = [tf.get_variable(name, [], initializer=tf.zeros_initializer(), trainable=False) for name in names]
    for update in (
        tf.function(lambda: own[0].assign_add(weight))(),
        tf.cond(step >= 0, lambda: own[1].assign_add(weight.read_value()), lambda: own[1].assign_add(0.0)),
        tf.function(lambda: own[2].assign_add(tf.cast(step, tf.float32)))(),
    ):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return spec


def test_what_the_model_changes_sees_the_variables_before_the_update(tmp_path: Path) -> None:
    """As in sync, also where it reads them in a function or in a branch, which begin when the step is certain."""
    model = cluster.model_of(cluster.ones, seeing)
    cluster.train(model, 0, 2, mode="allreduce", model_dir=str(tmp_path), **{**FLAGS, "max_steps": 5})
    saved = cluster.variables_of(tmp_path)
    found = [saved[name] for name in ("weight", "in_function", "in_branch", "steps")]
    assert found == [-5.0, -10.0, -10.0, 10.0]
