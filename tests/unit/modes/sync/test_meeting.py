"""Claims about the meeting of the chief's step with its update: what the step changes comes in between, or nothing."""

import threading
from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from tfps.modes.sync.meeting import Meeting


class Runs:
    """A step that adds 1 to ``changes``, and an update that adds these to ``seen``, if its generation is 0."""

    def __init__(self) -> None:
        self.changes, self.seen, self.generation = (
            tf.Variable(0.0, use_resource=True, name=name) for name in ("changes", "seen", "generation")
        )
        is_right = lambda: tf.equal(self.generation.read_value(), 0.0)  # noqa: E731
        check = lambda: tf.raw_ops.Assert(condition=is_right(), data=["over"])  # noqa: E731
        start = tf.no_op("start")
        self.meeting = Meeting([tf.no_op("complete")], [start], check)
        self.token, change = tf.no_op("token"), tf.no_op("change")
        with tf.control_dependencies([change]):
            changed = self.changes.assign_add(1.0, read_value=False)
        is_certain = self.meeting.hold(self.token, [changed])
        change._add_control_input(is_certain)
        with tf.control_dependencies([start]):
            self.update = self.seen.assign_add(self.changes.read_value(), read_value=False)


def started(session: Any, op: Any) -> tuple[threading.Thread, list[Exception]]:
    """Run an operation in a thread; return that, and what it raises."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            session.run(op)
        except tf.errors.OpError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("update_is_first", [True, False])
def test_the_update_sees_what_the_step_changes(update_is_first: bool) -> None:
    """Whichever of both begins first, in each of several turns."""
    with tf.Graph().as_default(), tf.Session() as session:
        runs = Runs()
        session.run(tf.global_variables_initializer())
        for turn in range(1, 4):
            first, second = (runs.update, runs.token) if update_is_first else (runs.token, runs.update)
            thread, errors = started(session, first)
            session.run(second)
            thread.join(60)
            assert not errors
            assert session.run([runs.changes, runs.seen]) == [turn, turn * (turn + 1) / 2]


def test_a_step_without_a_mean_changes_nothing() -> None:
    """A worker whose input has ended closes the queues, which ends the step that waits."""
    with tf.Graph().as_default(), tf.Session() as session:
        runs = Runs()
        session.run(tf.global_variables_initializer())
        thread, errors = started(session, runs.token)
        session.run([queue.close() for queue in runs.meeting.queues])
        thread.join(60)
        assert [type(error) for error in errors] == [tf.errors.OutOfRangeError]
        assert session.run(runs.changes) == 0


def test_an_update_of_an_earlier_generation_changes_nothing() -> None:
    """Though a restart lets it go on: it may be of a chief that is lost."""
    with tf.Graph().as_default(), tf.Session() as session:
        runs = Runs()
        session.run(tf.global_variables_initializer())
        thread, errors = started(session, runs.update)
        session.run(runs.generation.assign(1.0))
        session.run([queue.enqueue(0) for queue in runs.meeting.queues])
        thread.join(60)
        assert [type(error) for error in errors] == [tf.errors.InvalidArgumentError]
        assert session.run(runs.seen) == 0
