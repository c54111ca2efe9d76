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
def counter() -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield a session, a step that adds a worker's number to a PS's variable, a step that fails, and the variable."""
    with shared_servers(), tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            total = tf.get_variable("total", [], tf.float64, initializer=tf.zeros_initializer())
            nan = tf.debugging.check_numerics(tf.placeholder_with_default(tf.constant(float("nan")), []), "NaN")
        with tf.device("/job:worker/task:0"):
            step = total.assign_add(tf.ones([], tf.float64) * tf.placeholder_with_default(tf.ones([], tf.float64), []))
            failing = tf.identity(nan)
        config = session_config("/job:ps", "/job:worker/task:0")
        with tf.Session(target_of(Task("worker", 0)), graph=graph, config=config) as session:
            session.run(total.initializer)
            yield session, step.op, failing, total.read_value()


def _fail(session: Any, failing: Any, aborted: Aborted) -> int:
    """Run failing steps, whose rendezvous TensorFlow keeps (of an applied step it is only now and then); how many."""
    before = len(aborted)
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
            session.run(failing)
    wait_until(lambda: len(aborted) >= before + 3)
    return len(aborted)


def test_the_rendezvous_of_past_runs_are_freed(counter: tuple[Any, Any, Any, Any]) -> None:
    """The list is empty afterwards, again and again, and each step has been taken once."""
    session, step, failing, value = counter
    aborted = Aborted()
    aborted.free(len(aborted))
    for _ in range(3):
        session.run(step)
        kept = _fail(session, failing, aborted)
        assert aborted.free(1) == 1
        assert aborted.free(1_000) >= kept - 1
        wait_until(lambda: aborted.free(1_000) + len(aborted) == 0)
    assert session.run(value) == 3


def test_they_are_freed_while_steps_are_taken(
    counter: tuple[Any, Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread does that now and then, beside the runs that add to the list."""
    monkeypatch.setattr(tf_rendezvous, "_EVERY_SECS", 0.01)
    session, step, failing, value = counter
    aborted = Aborted()
    _fail(session, failing, aborted)
    tf_rendezvous.keep_freeing()
    for _ in range(2000):
        session.run(step)
    wait_until(lambda: not len(aborted))
    assert session.run(value) == 2000


def test_another_release_of_tensorflow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a name is missing nothing is done, and nothing fails."""
    monkeypatch.setattr(tf_rendezvous, "_LIST", "_ZN10tensorflow15LocalRendezvous4goneE")
    with pytest.raises(ValueError, match="gone"):
        Aborted()
    tf_rendezvous.keep_freeing()
