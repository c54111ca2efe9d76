"""Workers of ``allreduce`` that are called together, as by one that was lost and started again, on real servers."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support import cluster
from support.processes import summary

import tfps
from tfps.cluster.spec import Task
from tfps.errors import PeerLostError
from tfps.modes.ring.ring import Ring
from tfps.modes.worker_queues import device_of
from tfps.runtime.coordination import interrupted_steps, job_state, restart_barrier
from tfps.runtime.training import joining

pytestmark = pytest.mark.slow

TWINS = ("left", "right")
PLENTY = 10**6


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_barrier, "_LISTEN_SECS", 0.05)
    monkeypatch.setattr(interrupted_steps, "_SETTLE_SECS", 0.5)


def _waited(x: Any) -> Any:
    time.sleep(0.002)
    return x


def powers(mode: str, params: Any, context: Any) -> Any:
    """Give worker i the gradient 3 * 2^i, for ever, each after a time: the mean of up to three is exact."""

    def slowly(x: Any, y: Any) -> Any:
        return {"x": tf.ensure_shape(tf.numpy_function(_waited, [x["x"]], tf.float32), [])}, y

    value = np.float32([3 * 2.0 ** (context.input_pipeline_id if context else 0)])
    return None if mode == "eval" else cluster.dataset_of(value).repeat().map(slowly)


def twins(optimizer: Any) -> Any:
    """Return a model of two variables whose gradients are its feature, and which counts its steps."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weights = [tf.get_variable(name, [4], initializer=tf.zeros_initializer()) for name in TWINS]
        seen = tf.get_variable("seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, seen.assign_add(1))
        return tfps.ModelSpec(loss=tf.reduce_sum(tf.add_n(weights) * features["x"]), optimizer=optimizer())

    return cluster.model_of(powers, model_fn)


SGD = twins(lambda: tf.train.GradientDescentOptimizer(1.0))


def permits() -> Any:
    """Return the queue of the worker on whose device it is."""
    return tf.FIFOQueue(-1, tf.int64, shapes=[], shared_name="permits", name="permits")


class Halting(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Needs a permit between the updates of its two variables."""

    def apply_gradients(self, grads_and_vars: Any, *_rest: Any) -> Any:
        """Update one variable, take a permit, update the other."""
        first = super().apply_gradients(grads_and_vars[:1])
        with tf.control_dependencies([first]):
            permit = permits().dequeue()
        with tf.control_dependencies([permit.op]):
            return tf.group(first, super().apply_gradients(grads_and_vars[1:]))


class Caller:
    """A task beside a job's that sees the chief's variables and the job's state."""

    def __init__(self, num_workers: int) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self._state = job_state.JobState(cluster.cluster_of(0, num_workers), 0)
        self.session = tf.Session(
            cluster.target_of(Task("worker", 0)), graph=self.graph, config=cluster.session_config("/job:worker")
        )

    def wait_until_released(self, generation: int) -> None:
        """Wait until the workers go on in a generation."""
        state, session = self._state, self.session
        cluster.wait_until(lambda: state.is_up(session) and state.restart_state(session).released == generation)

    def value(self, name: str, dtype: Any = tf.float32, shape: Any = (4,)) -> Any:
        """Return the chief's value of a variable."""
        with self.graph.as_default(), tf.device(device_of(0)):
            handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
            return self.session.run(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))

    def count(self, name: str) -> int:
        """Return one of the chief's counts."""
        return int(self.value(f"tfps/ring/{name}", tf.int64, ()))

    def pause(self) -> None:
        """Do what the chief does before it saves."""
        with self.graph.as_default(), tf.device(device_of(0)):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="tfps/ring/paused")
            self.session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(1, tf.int64)))

    def give_permits(self, worker: int, count: int) -> None:
        """Let a worker make so many updates."""
        with self.graph.as_default(), tf.device(device_of(worker)):
            self.session.run(permits().enqueue_many([np.zeros(count, np.int64)]))

    def call(self) -> None:
        """Call the workers together."""
        self._state.request_restart(self.session)


@pytest.mark.parametrize(("num_workers", "steps_per_run"), [(2, 1), (3, 4)])
def test_called_together_they_lose_no_step(tmp_path: Path, num_workers: int, steps_per_run: int) -> None:
    """Broken off in its steps and begun anew four times, a job has made exactly its updates, each the exact mean.

    A job that is called in the moment of the chief's update goes back to its checkpoint, as the launcher does it here.
    """
    steps = 600
    flags = {"mode": "allreduce", "max_steps": steps, "steps_per_run": steps_per_run, "model_dir": str(tmp_path)}
    with cluster.job(SGD, 0, num_workers, **flags) as running:
        caller = Caller(num_workers)
        for generation in range(4):
            cluster.wait_until(lambda: running.ended or _is_released(caller, generation))  # noqa: B023
            if running.ended:
                break
            before = caller.value("left")[0]
            cluster.wait_until(lambda: running.ended or caller.value("left")[0] < before)  # noqa: B023
            caller.call()
        ended = running.wait()
    if any(isinstance(error, PeerLostError) for error in ended.values()):
        cluster.train(SGD, 0, num_workers, **flags)
    else:
        cluster.assert_done(ended)
    saved = cluster.variables_of(tmp_path)
    assert saved["global_step"] == saved["seen"] == steps
    for name in TWINS:
        np.testing.assert_array_equal(saved[name], [-steps * 3 * (2**num_workers - 1) / num_workers] * 4)


def _is_released(caller: Caller, generation: int) -> bool:
    caller.wait_until_released(generation)
    return True


def test_an_update_of_the_chief_that_is_interrupted_sends_the_job_back_to_its_checkpoint(tmp_path: Path) -> None:
    """It has changed one variable and not the other: nobody may go on with these values, or save them."""
    flags = {"mode": "allreduce", "max_steps": 30, "model_dir": str(tmp_path), "save_checkpoint_secs": 1000.0}
    with cluster.job(twins(lambda: Halting(1.0)), 0, 2, **flags) as running:
        caller = Caller(2)
        caller.give_permits(1, PLENTY)
        caller.give_permits(0, 5)
        caller.wait_until_released(0)
        cluster.wait_until(lambda: caller.value("left")[0] == -6 * 4.5)
        assert caller.value("right")[0] == -5 * 4.5
        caller.call()
        cluster.wait_until(lambda: "worker/0" in running.ended)  # whose server would end with it
    assert isinstance(running.ended["worker/0"], PeerLostError), running.ended
    assert tf.train.latest_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("message", "secs"),
    [
        ("Socket closed", joining._REPLACED_WITHIN_SECS),
        ('Session handle is not found: 1. Possibly this worker ("/job:worker/replica:0/task:2") just restarted.', 3.0),
        ("The same worker request was received twice.", 0.0),
    ],
)
def test_a_worker_waits_less_for_one_that_is_back(message: str, secs: float) -> None:
    """A process that is there has requested a restart, unless it is new to a chief that is new itself."""
    assert joining._patience_secs(tf.errors.AbortedError(None, None, message)) == secs


def test_no_update_begins_while_the_chief_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief that is asked to stop saves while its step waits for others: the step may get what it waits for."""
    monkeypatch.setattr(joining, "_REPLACED_WITHIN_SECS", 0.2)
    flags = {"mode": "allreduce", "max_steps": 10**6, "model_dir": str(tmp_path), "save_checkpoint_secs": 1000.0}
    with cluster.job(SGD, 0, 2, **flags) as running:
        caller = Caller(2)
        caller.wait_until_released(0)
        cluster.wait_until(lambda: caller.value("left")[0] < 0)
        caller.pause()
        cluster.wait_until(lambda: "worker/0" in running.ended)
        assert caller.count("begun") == caller.count("ended") + 1
        assert [caller.value(name)[0] for name in TWINS] == [-4.5 * caller.count("ended")] * 2
    assert isinstance(running.ended["worker/0"], PeerLostError), running.ended


def test_workers_that_receive_something_old_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost worker has left in a queue at the last moment costs a restart of all, and no step."""
    monkeypatch.setattr(joining, "_REPLACED_WITHIN_SECS", 0.2)
    flags = {"mode": "allreduce", "max_steps": 200, "model_dir": str(tmp_path), "steps_per_run": 1}
    with cluster.job(SGD, 0, 2, **flags) as running:
        caller = Caller(2)
        caller.wait_until_released(0)
        cluster.wait_until(lambda: caller.value("left")[0] < 0)
        with caller.graph.as_default(), tf.device(device_of(0)):
            ring = Ring(2, 0, tf.constant(0, tf.int64))
            ring.sum(tf.zeros([8]))
            stray = ring._queues[0][0].enqueue([tf.constant([-1, 3], tf.int64), tf.ones([4])])
        caller.session.run(stray)
        caller.wait_until_released(1)
        cluster.assert_done(running.wait())
    saved = cluster.variables_of(tmp_path)
    assert saved["global_step"] == saved["seen"] == 200
    assert {saved[name][0] for name in TWINS} == {-200 * 4.5}
    assert {task["steps"] for task in summary(tmp_path)["tasks"].values()} == {200}
