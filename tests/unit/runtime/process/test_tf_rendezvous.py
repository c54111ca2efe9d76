"""What TensorFlow keeps of past runs is freed."""

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from support.cluster import session_config, shared_servers, target_of, wait_until

from tfps.cluster.spec import Task
from tfps.runtime.process import tf_rendezvous
from tfps.runtime.process.tf_rendezvous import Aborted


@pytest.fixture
def counter() -> Iterator[tuple[Any, Any, Any]]:
    """Yield a session, a step that adds a worker's number to a PS's variable, and the variable's value."""
    with shared_servers(), tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            total = tf.get_variable("total", [], tf.float64, initializer=tf.zeros_initializer())
        with tf.device("/job:worker/task:0"):
            step = total.assign_add(tf.ones([], tf.float64) * tf.placeholder_with_default(tf.ones([], tf.float64), []))
        config = session_config("/job:ps", "/job:worker/task:0")
        with tf.Session(target_of(Task("worker", 0)), graph=graph, config=config) as session:
            session.run(total.initializer)
            yield session, step.op, total.read_value()


def _run_until_kept(session: Any, step: Any, aborted: Aborted) -> int:
    """Run steps until TensorFlow has kept the rendezvous of some; returns how many."""
    for taken in range(1, 20_001):
        session.run(step)
        if len(aborted) >= 3:
            return taken
    raise AssertionError("TensorFlow keeps none any more: tfps.runtime.process.tf_rendezvous has had its time")


def test_the_rendezvous_of_past_runs_are_freed(counter: tuple[Any, Any, Any]) -> None:
    """The list is empty afterwards, again and again, and each step has been taken once."""
    session, step, value = counter
    aborted, taken = Aborted(), 0
    aborted.free(len(aborted))
    for _ in range(3):
        taken += _run_until_kept(session, step, aborted)
        kept = len(aborted)
        assert (aborted.free(1), len(aborted)) == (1, kept - 1)
        assert aborted.free(kept + 1_000) >= kept - 1
        assert len(aborted) < 3
    assert session.run(value) == taken


def test_they_are_freed_while_steps_are_taken(counter: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread does that now and then, beside the runs that add to the list."""
    monkeypatch.setattr(tf_rendezvous, "_EVERY_SECS", 0.01)
    session, step, value = counter
    aborted, taken = Aborted(), _run_until_kept(session, step, Aborted())
    tf_rendezvous.keep_freeing()
    for _ in range(2000):
        session.run(step)
    wait_until(lambda: not len(aborted))
    assert session.run(value) == taken + 2000


def test_another_release_of_tensorflow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a name is missing nothing is done, and nothing fails."""
    monkeypatch.setattr(tf_rendezvous, "_LIST", "_ZN10tensorflow15LocalRendezvous4goneE")
    with pytest.raises(ValueError, match="gone"):
        Aborted()
    tf_rendezvous.keep_freeing()
