"""The training input, of which a step that is broken off takes nothing with it."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.cluster import session_config, shared_servers, target_of

from tfps.cluster.spec import Task
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

from tfps.runtime.graph.cancel_safe_iterator import CancelSafeIterator  # noqa: E402

SLOW_SECS = 0.2


def slow(count: int) -> Any:
    """Return a dataset that takes its time over each of its numbers."""

    def wait(number: Any) -> Any:
        time.sleep(SLOW_SECS)
        return number

    return tf.data.Dataset.range(count).map(lambda x: tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), []))


class Reader:
    """Reads a dataset in a session on a worker's server."""

    def __init__(self, make: Callable[[], Any]) -> None:
        with tf.Graph().as_default() as self._graph, tf.device("/job:worker/task:0/cpu:0"):
            iterator = CancelSafeIterator(make())
            self._next = iterator.get_next()
        self.initializer = iterator.initializer
        self.session = self.new_session()
        self.session.run(self.initializer)

    def new_session(self) -> Any:
        """Return a new session, as that of a worker that goes on."""
        config = session_config("/job:worker/task:0")
        return tf.Session(target_of(Task("worker", 0)), graph=self._graph, config=config)

    def read(self, count: int) -> list[Any]:
        """Return the next elements."""
        return [self.session.run(self._next).tolist() for _ in range(count)]

    def break_off(self) -> int:
        """Close the session while a step waits for an element, and go on in another; return the last one before."""
        ended: list[BaseException] = []
        elements: list[Any] = []

        def read() -> None:
            try:
                for _ in range(100):
                    elements.extend(self.read(1))
            except (tf.errors.OpError, RuntimeError) as error:
                ended.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(1.5 * SLOW_SECS)
        self.session.close()
        thread.join(100)
        assert isinstance(ended[0], tf.errors.CancelledError | RuntimeError)  # RuntimeError: between two steps
        self.session = self.new_session()
        return max(elements, default=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: slow(100),
        lambda: slow(100).repeat(),
        lambda: slow(100).prefetch(3),
        lambda: slow(100).prefetch(tf.data.AUTOTUNE),
        lambda: slow(100).prefetch(3).with_options(tf.data.Options()),
        lambda: slow(100).map(lambda x: x, num_parallel_calls=2),
    ],
    ids=["plain", "repeated", "prefetched", "prefetched as it suits", "with options", "in parallel"],
)
def test_it_goes_on_after_a_step_that_was_broken_off(make: Callable[[], Any]) -> None:
    """The next elements come in order, of which at most those are missing that the broken-off step had asked for."""
    with shared_servers():
        reader = Reader(make)
        assert reader.read(1) == [0]
        last = reader.break_off()
        first, *others = reader.read(3)
        assert first in (last + 1, last + 2)
        assert others == [first + 1, first + 2]


def test_its_end_stays_its_end() -> None:
    """After the last element there is none, however often one asks; the initializer begins at the first again."""
    with shared_servers():
        reader = Reader(lambda: tf.data.Dataset.range(3).prefetch(2))
        assert reader.read(3) == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(tf.errors.OutOfRangeError):
                reader.read(1)
        reader.session.run(reader.initializer)
        assert reader.read(3) == [0, 1, 2]
