"""The synchronous mode against TensorFlow's own ``SyncReplicasOptimizer``, on what both get right."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.base import ModeContext
from tfps.modes.synchronous import SyncMode
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

from tfps.runtime.graph.background_updates import UpdateRunner  # noqa: E402

STEPS, SIZE = 20, 7
GRADIENTS = np.random.default_rng(7).normal(size=(STEPS, 2, SIZE)).astype(np.float32)  # by step and worker

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
}


def _theirs(optimizer: Any, loss: Any, global_step: Any, index: int) -> tuple[Any, Any, Any]:
    sync = tf.train.SyncReplicasOptimizer(optimizer, 2, 2)
    token = sync.minimize(loss, global_step)
    sync.ready_for_local_init_op.mark_used()
    runner = sync.get_chief_queue_runner()
    start = [] if index else [(sync.chief_init_op, {})]
    return token, start, lambda session: runner.create_threads(session, daemon=True, start=True)


def _ours(optimizer: Any, loss: Any, global_step: Any, index: int) -> tuple[Any, Any, Any]:
    cluster = Cluster(("p:1",), ("w:1", "w:2"))
    context = ModeContext(JobConfig(), cluster, Task("worker", index))
    step = SyncMode().build_step(optimizer, loss, global_step, context)
    now = {step.recovery.generation: 0}
    start = [] if index else [(step.chief_init, now)]
    return step.train_op, [*start, (step.worker_init, {})], lambda session: UpdateRunner(session, step.update, now)


def _trained(build: Callable[..., tuple[Any, Any, Any]], optimizer: Callable[[], Any]) -> np.ndarray:
    """Return the weights after both workers, a session each on one server, took every step together."""
    server = tf.train.Server.create_local_server()
    workers = []
    for index in range(2):
        with tf.Graph().as_default() as graph:
            gradient = tf.placeholder(tf.float32, [SIZE])
            weights = tf.get_variable("weights", [SIZE], initializer=tf.ones_initializer())
            made = build(optimizer(), tf.reduce_sum(weights * gradient), tf.train.get_or_create_global_step(), index)
            init = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
            workers.append((tf.Session(server.target, graph=graph), gradient, weights, init, *made))
    chief, _, weights, init, _, _, start_updates = workers[0]
    chief.run(init)
    for session, _, _, _, _, start, _ in workers:
        for op, fed in start:
            session.run(op, fed)
    start_updates(chief)
    for gradients in GRADIENTS:
        pushes = [
            threading.Thread(target=session.run, args=(token, {fed: value}), daemon=True)
            for (session, fed, _, _, token, *_), value in zip(workers, gradients, strict=True)
        ]
        for push in pushes:
            push.start()
        for push in pushes:
            push.join(100)
            assert not push.is_alive(), "a step hangs"
    result: np.ndarray = chief.run(weights)
    return result


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dense_updates_are_those_of_tensorflows_own_class(optimizer: str) -> None:
    """With dense gradients, one of each worker a step, the weights are the same to the bit, whatever the optimizer."""
    theirs, ours = (_trained(build, OPTIMIZERS[optimizer]) for build in (_theirs, _ours))
    assert not np.array_equal(ours, np.ones(SIZE))
    assert ours.tobytes() == theirs.tobytes()
