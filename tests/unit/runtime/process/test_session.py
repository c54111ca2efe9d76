"""Requests that TensorFlow refuses as repeated, though they were not."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from tfps.runtime.process.session import Session

REFUSAL = "The same RunGraph (Worker) request was received twice. request_id: 1055776002641479374"


def _refusing(real: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    """Return a call that raises each of ``errors`` once, and then does what the real one does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args, **kwargs)

    return call


def _refusals() -> list[Exception]:
    return [tf.errors.AbortedError(None, None, REFUSAL), tf.errors.CancelledError(None, None, f"ABORTED: {REFUSAL}")]


@pytest.fixture
def session() -> Any:
    """Yield a session on a counter's graph, as (session, operation that adds one and returns the sum)."""
    with tf.Graph().as_default(), Session() as made:
        counter = tf.get_variable("counter", [], tf.int32, tf.zeros_initializer(), use_resource=True)
        add = counter.assign_add(1)
        made.run(counter.initializer)
        yield made, add


def test_a_refused_run_is_taken_again(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was refused as repeated, whole or by way of another task's part, is taken again and counts once."""
    made, add = session
    errors = _refusals()
    monkeypatch.setattr(tf.Session, "run", _refusing(tf.Session.run, errors))
    assert made.run(add) == 1
    assert errors == []


def test_a_refused_callable_is_taken_again(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for a callable, the loop's way to take a step."""
    made, add = session
    errors = _refusals()
    real = tf.Session.make_callable
    monkeypatch.setattr(tf.Session, "make_callable", lambda self, *a: _refusing(real(self, *a), errors))
    assert made.make_callable(add)() == 1
    assert errors == []


@pytest.mark.parametrize("error", [tf.errors.AbortedError, tf.errors.UnavailableError, tf.errors.CancelledError])
def test_any_other_error_is_raised(session: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """A lost PS, which is Aborted or Unavailable too, is not tried again."""
    made, add = session
    monkeypatch.setattr(tf.Session, "run", _refusing(tf.Session.run, [error(None, None, "a PS is gone")]))
    with pytest.raises(error, match="gone"):
        made.run(add)


def test_it_gives_up_in_the_end(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused for ever is an error, not a hang."""
    made, add = session
    monkeypatch.setattr(tf.Session, "run", _refusing(tf.Session.run, _refusals() * 50))
    with pytest.raises((tf.errors.AbortedError, tf.errors.CancelledError), match="received twice"):
        made.run(add)


def test_a_fed_callable_takes_in_nothing(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread is adding to the graph, by half yet, stays out of the session when a callable is called."""
    made, _ = session
    with made.graph.as_default():
        counter = made.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)[0]
        number = tf.placeholder(tf.int32, [])
        call = made.make_callable(counter.assign_add(number, read_value=False), [number])
        value = made.make_callable(counter.read_value())
    monkeypatch.setattr(tf.Session, "_extend_graph", lambda _: pytest.fail("the graph was taken in"))
    call(3)
    call(4)
    assert value() == 7
