"""``--mode=gossip`` on real servers: steps computed by hand from each worker's gradients and the mixing matrix."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support import cluster
from support.cluster import by_worker
from support.processes import Process, children_of, load_variable, open_files, processes, run_tfps, slow, summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError, StoppedError
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.graph import builder
from tfps.runtime.training import worker_parts
from tfps.runtime.training.worker_parts import WorkerParts

pytestmark = pytest.mark.slow

STEPS, WORKERS, ROWS = 12, 3, 5
X = np.random.default_rng(3).integers(-80, 80, [WORKERS, STEPS, 4]).astype(np.float32) / 64
PICKS = np.random.default_rng(4).integers(0, ROWS, [WORKERS, STEPS, 2])
PATH = [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]  # 0 - 1 - 2, by Metropolis and Hastings
FLAGS: dict[str, Any] = {"mode": "gossip", "max_steps": STEPS, "save_checkpoint_secs": 1000.0}


def model_of(rate: float, momentum: float) -> Any:
    """Return a model whose gradients depend on its weights, with a table, an average and a counter of its own."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
        table = tf.get_variable("table", [ROWS, 2], initializer=tf.ones_initializer(), dtype=tf.float64)
        average = tf.get_variable("average", [], initializer=tf.zeros_initializer(), trainable=False)
        seen = tf.get_variable("seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
        change = average.assign(0.5 * average + 0.5 * tf.reduce_sum(features["x"]))
        for update in (change, seen.assign_add(1)):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        looked_up = tf.cast(tf.nn.embedding_lookup(table, features["rows"]), tf.float32)
        loss = 0.5 * tf.reduce_sum((weight - features["x"]) ** 2) + tf.reduce_sum(looked_up**2 * features["x"][:2])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.MomentumOptimizer(rate, momentum))

    return cluster.model_of(by_worker(x=X, rows=PICKS), model_fn)


def by_hand(matrix: Any, rate: float, momentum: float) -> dict[str, Any]:
    """Return the mean of the workers' copies after all steps."""
    matrix = np.array(matrix)
    weight, table = np.zeros([WORKERS, 4]), np.ones([WORKERS, ROWS, 2])
    slots, rows_slots = np.zeros_like(weight), np.zeros_like(table)
    average = np.zeros(WORKERS)
    for step in range(STEPS):
        gradients, of_rows = weight - X[:, step], np.zeros_like(table)
        for worker in range(WORKERS):
            for row in PICKS[worker, step]:
                of_rows[worker, row] += 2 * table[worker, row] * X[worker, step, :2]
        weight, table = matrix @ weight, np.einsum("ij,jrc->irc", matrix, table)
        slots = momentum * slots + gradients
        weight = weight - rate * slots
        for worker in range(WORKERS):
            rows = np.unique(PICKS[worker, step])
            rows_slots[worker, rows] = momentum * rows_slots[worker, rows] + of_rows[worker, rows]
            table[worker, rows] -= rate * rows_slots[worker, rows]
        average = 0.5 * average + 0.5 * X[:, step].sum(axis=1)
    found = {"weight": weight, "table": table, "average": average, "weight/Momentum": slots}
    return {name: value.mean(axis=0) for name, value in found.items()}


@pytest.mark.parametrize(
    ("flags", "matrix"),
    [
        ({}, np.full([3, 3], 1 / 3)),
        ({"topology": "0-1,1-2", "collect_every": 5}, PATH),
        ({"topology": "0-1,1-2", "collect_every": 4, "steps_per_run": 4}, PATH),
    ],
)
def test_the_variables_are_the_mean_of_all_copies(flags: Any, matrix: Any, tmp_path: Path) -> None:
    """Sparse rows, slots, a model's own average and two types; a mean on the way changes nothing."""
    cluster.train(model_of(0.25, 0.5), 0, 3, model_dir=str(tmp_path), **FLAGS, **flags)
    found = cluster.variables_of(tmp_path)
    assert found["global_step"] == found["seen"] == STEPS
    every = flags.get("collect_every", 100)
    made = {"made": -(-STEPS // every), "fewest_steps": every, "most_steps": every}
    assert summary(tmp_path)["rounds"] == made
    for name, value in by_hand(matrix, 0.25, 0.5).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_complete_equals_sync(tmp_path: Path) -> None:
    """With gradients that are linear in the parameters, the mean of the copies takes the steps of sync."""
    model = cluster.model_of(by_worker(x=X), quadratic)
    flags = {"max_steps": STEPS, "save_checkpoint_secs": 1000.0}
    cluster.train(model, 1, 3, mode="sync", model_dir=str(tmp_path / "sync"), **flags)
    cluster.train(model, 0, 3, mode="gossip", topology="complete", model_dir=str(tmp_path / "gossip"), **flags)
    expected, found = (cluster.variables_of(tmp_path / name) for name in ("sync", "gossip"))
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(found["weight"], expected["weight"], rtol=1e-5, atol=1e-6)


def quadratic(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` whose gradient is ``weight - x``."""
    weight = tf.get_variable("weight", [4], initializer=tf.zeros_initializer())
    loss = 0.5 * tf.reduce_sum((weight - features["x"]) ** 2)
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.25))


@pytest.mark.parametrize(("sizes", "every"), [([3, 9, 7], 5), ([9, 5, 9], 100)])
def test_a_worker_without_input_keeps_its_copy(sizes: Any, every: int, tmp_path: Path) -> None:
    """Its neighbors go on without it to the end of the period, which is the last, and the rest of W stays right."""

    def rows(mode: str, params: Any, context: Any) -> Any:
        own = None if mode == "eval" else X[context.input_pipeline_id, : sizes[context.input_pipeline_id]]
        return None if own is None else cluster.dataset_of(own)

    model = cluster.model_of(rows, quadratic)
    flags = {**FLAGS, "max_steps": 100, "topology": "0-1,1-2", "collect_every": every}
    cluster.train(model, 0, 3, model_dir=str(tmp_path), **flags)
    weight, end = np.zeros([3, 4]), min(max(sizes), every)
    for step in range(end):
        graph = np.array(PATH)
        for gone in (one for one in range(3) if sizes[one] <= step):
            for other in range(3):
                graph[other, other] += graph[other, gone]
                graph[other, gone] = 0
            graph[gone] = np.eye(3)[gone]
        rate = np.array([[0.25 * (sizes[one] > step)] for one in range(3)])
        weight = graph @ weight - rate * (weight - X[:, step])
    found = cluster.variables_of(tmp_path)
    assert found["global_step"] == end
    np.testing.assert_allclose(found["weight"], weight.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_batch_that_is_skipped_is_no_step(tmp_path: Path) -> None:
    """A worker whose gradient is NaN has sent nothing, and takes its next batch for the same step."""

    def rows(mode: str, params: Any, context: Any) -> Any:
        bad = [1.0, 1.0, np.nan, 1.0, np.nan, np.nan, 1.0, 1.0] if context and context.input_pipeline_id == 1 else [1.0]
        return None if mode == "eval" else cluster.dataset_of(np.float32(bad)).repeat()

    flags = {**FLAGS, "max_steps": 30, "on_nan": "skip"}
    cluster.train(cluster.model_of(rows, cluster.linear), 0, 3, model_dir=str(tmp_path), **flags)
    saved = cluster.variables_of(tmp_path)
    assert saved["global_step"] == 30
    assert saved["weight"] == pytest.approx(-30.0, rel=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_goes_on_in_another_mode(workers: int, tmp_path: Path) -> None:
    """The checkpoints of both have the same variables."""
    for mode, num_ps, steps in (("gossip", 0, 10), ("sync", 1, 20), ("gossip", 0, 30)):
        flags = {**FLAGS, "mode": mode, "max_steps": steps, "model_dir": str(tmp_path)}
        cluster.train(cluster.LINEAR, num_ps, workers, **flags)
        saved = cluster.variables_of(tmp_path)
        assert (saved["global_step"], saved["weight"]) == (steps, -float(steps))


def test_a_stopped_job_resumes_from_the_mean(tmp_path: Path) -> None:
    """All stop; what is saved is the last mean, after a multiple of the period, and the job's state can be read."""
    flags = {**FLAGS, "model_dir": str(tmp_path), "max_steps": 10**6, "collect_every": 7}
    made: list[WorkerParts] = []
    build = worker_parts.build
    noted = mock.patch.object(worker_parts, "build", lambda *args: made.append(build(*args)) or made[-1])
    with noted, cluster.job(cluster.LINEAR, 0, 3, **flags) as running:
        cluster.wait_until((tmp_path / "job.json").exists)
        cluster.wait_until(lambda: all(len(parts.reader.ahead()) == 3 for parts in made))
        assert all(list(parts.reader.phases()) == [0, 0, 0] for parts in made)
        cluster.wait_until(lambda: max(beat.steps for beat in made[0].reader.beats() or [WorkerPace()]) > 20)
        running.stop()
        assert all(isinstance(error, StoppedError) for error in running.wait().values())
    step = int(cluster.variables_of(tmp_path)["global_step"])
    assert step % 7 == 0
    cluster.train(cluster.LINEAR, 0, 3, **{**flags, "max_steps": step + 20})
    found = cluster.variables_of(tmp_path)
    assert found["global_step"] == step + 20
    assert found["weight"] == pytest.approx(-step - 20, rel=1e-5)


def _no_shape(variables: Any) -> Any:
    return tf.Variable(np.zeros(3, np.float32), shape=tf.TensorShape([None]), name="open", use_resource=True)


def _not_in_collection(variables: Any) -> Any:
    hidden = tf.Variable(0.0, name="hidden", collections=[], trainable=False, use_resource=True)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, hidden.assign_add(1.0))
    return variables


@pytest.mark.parametrize(
    ("change", "problem"),
    [(_no_shape, "the shape of open is not known"), (_not_in_collection, "hidden, which is not in")],
)
def test_a_model_without_copies_is_refused(change: Any, problem: str) -> None:
    """It is an error of the model, before training."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = change(tf.get_variable("weight", [3], initializer=tf.zeros_initializer()))
        return tfps.ModelSpec(loss=tf.reduce_sum(weight), optimizer=tf.train.GradientDescentOptimizer(1.0))

    workers, model = Cluster((), ("127.0.0.1:1", "127.0.0.1:2")), cluster.model_of(cluster.ones, model_fn)
    with pytest.raises(ModelError, match=problem):
        builder.training(JobConfig(mode="gossip", max_steps=5, batch_size=1), workers, Task("worker", 0), model)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_killed_worker_is_replaced(lost: int, tmp_path: Path) -> None:
    """All go on from the last mean. The other workers keep their processes, unless it was the chief, who had all."""
    go, model_dir = tmp_path / "go", tmp_path / "m"
    job = start(tmp_path, go, "--collect_every=5")
    with processes() as started:
        started.append(job)
        job.wait_for("saved ", 60)
        os.kill(pid_of(f"worker-{lost}", job.pid), signal.SIGKILL)
        job.wait_for("restarted after SIGKILL", 60)
        go.touch()
        assert job.wait(200) == 0, job.output()
    reported = summary(model_dir)
    assert (reported["status"], reported["global_step"]) == ("done", 300)
    assert ("resumed from" in job.output()) == (lost == 0), job.output()
    assert job.output().count("restarted after") == 1 or lost == 0, job.output()
    steps = {task["steps"] for task in reported["tasks"].values()}
    assert steps == {300} or lost == 0, "a step that was taken again counts once"
    assert load_variable(model_dir, "weight") == pytest.approx(-7 / 3 * 300, rel=1e-5)


def test_a_frozen_worker_is_waited_for(tmp_path: Path) -> None:
    """When it goes on, all go on with it."""
    job = start(tmp_path, tmp_path / "go")
    with processes() as started:
        started.append(job)
        job.wait_for("saved ", 60)
        frozen = pid_of("worker-1", job.pid)
        os.kill(frozen, signal.SIGSTOP)
        (tmp_path / "go").touch()
        time.sleep(3)  # longer than two heartbeats
        os.kill(frozen, signal.SIGCONT)
        assert job.wait(200) == 0, job.output()
    assert load_variable(tmp_path / "m", "weight") == pytest.approx(-7 / 3 * 300, rel=1e-5)


def start(tmp_path: Path, go: Path, *flags: str) -> Process:
    """Start a job of three workers, which pauses at some step until a file is there."""
    (tmp_path / "mine.py").write_text(slow(0.01, until=go))
    given = [f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / 'm'}", "--max_steps=300", "--mode=gossip"]
    given += ["--num_workers=3", "--save_checkpoint_secs=1", "--steps_per_run=1", *flags]
    return Process(tmp_path / "out", "launch", *given)


def pid_of(task: str, launcher: int) -> int:
    """Return the process of a launcher's task, which has its log open."""
    found = [pid for pid in children_of(launcher) if any(f"{task}.log" in name for name in open_files(pid))]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("command", ["plan", "launch", "doctor", "submit", "run"])
def test_a_bad_graph_stops_each_command(command: str, tmp_path: Path) -> None:
    """It ends with 2 before anything starts, and names the file, the line and the fix."""
    file = tmp_path / "graph.txt"
    file.write_text("0 1\n1 7\n")
    flags = ["--mode=gossip", f"--topology={file}", "--model=linear"]
    hosts = ["--worker_hosts=127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "--job_name=worker", "--task_index=0"]
    of_command = {"run": hosts, "doctor": hosts, "submit": ["--to=compose", "--dry_run", "--num_workers=3"]}
    flags += of_command.get(command, ["--num_workers=3"])
    ended = run_tfps(command, *flags)
    assert ended.returncode == 2, ended
    assert f"--topology={file}, line 2, names worker 7, but the workers are 0 to 2" in ended.stderr, ended
