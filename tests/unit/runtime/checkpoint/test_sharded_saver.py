"""Claims about a save that comes while an update is on some PS and not on others."""

import threading
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import session_config, shared_servers, target_of, wait_until

from tfps.cluster.spec import Task
from tfps.modes.updates import atomic_update
from tfps.modes.updates.moments import Moments
from tfps.runtime.checkpoint import sharded_saver
from tfps.runtime.checkpoint.sharded_saver import ShardedSaver
from tfps.runtime.graph.passes.snapshot import Snapshot


class _StandingStill:
    """The clock of a machine that stands still for 10 s whenever it is looked at.

    Args:
        at_look: Called at each pause between two looks, with their number so far.
    """

    def __init__(self, at_look: Callable[[int], None]) -> None:
        self._now, self.looks, self._at_look = 0.0, 0, at_look

    def monotonic(self) -> float:
        self._now += 10.0
        return self._now

    def sleep(self, secs: float) -> None:
        del secs
        self.looks += 1
        self._at_look(self.looks)


@pytest.mark.parametrize(("arrives_at", "saved"), [(5, [-1.0, -1.0]), (1000, [-1.0, 0.0])])
def test_a_machine_that_stands_still_is_no_reason_to_save_an_update_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives_at: int, saved: list[float]
) -> None:
    """However long it stands still: an update that arrives after some looks is in the checkpoint, on both PS.

    One that never comes does not keep the job from saving.
    """
    with shared_servers(), tf.Graph().as_default() as graph:
        weights = []
        for index in range(2):
            with tf.device(f"/job:ps/task:{index}"):
                weights.append(tf.get_variable(f"weight{index}", [], initializer=tf.zeros_initializer()))
        with tf.device("/job:ps/task:0"):
            global_step = tf.train.get_or_create_global_step()
        with tf.device("/job:ps/task:1"):
            late = tf.FIFOQueue(9, tf.float32, shapes=[[]])
            gradients = [tf.identity(tf.ones([])), late.dequeue()]
        moments, push = Moments(2, 1), late.enqueue(1.0)
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        update = atomic_update.apply(optimizer, list(zip(gradients, weights, strict=True)), global_step, moments, 0)
        saver = ShardedSaver(Snapshot(moments))
        init = tf.group(tf.global_variables_initializer(), moments.reset([0]))
        target = target_of(Task("worker", 0))
        with tf.Session(target, graph=graph, config=session_config("/job:ps", "/job:worker/task:0")) as session:
            session.run(init)
            step = threading.Thread(target=session.run, args=([update.counted, *update.others],))
            step.start()
            wait_until(lambda: session.run(weights[0]) == -1.0)

            def look(number: int) -> None:
                if number == arrives_at:
                    session.run(push)
                    step.join()

            clock = _StandingStill(look)
            still = types.SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
            monkeypatch.setattr(sharded_saver, "time", still)
            saver.save(session, str(tmp_path / "model.ckpt"))
            if step.is_alive():
                session.run(push)
                step.join()
    reader = tf.train.load_checkpoint(str(tmp_path / "model.ckpt"))
    assert [np.float32(reader.get_tensor(f"weight{index}")) for index in range(2)] == saved
    assert min(arrives_at, 10) <= clock.looks <= 30
