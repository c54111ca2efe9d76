"""The updates that the chief keeps running in the background, in the modes that have such."""

import functools
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf


class Updates:
    """Runs an operation again and again, in a thread of its own, until it fails or its session is closed.

    Args:
        session: The chief's.
        update: The operation.
        now: Placeholders that it is run with, and their values.

    Attributes:
        error: Why there are no more updates, if that is an error.
    """

    def __init__(self, session: Any, update: Any, now: Mapping[Any, Any]) -> None:
        self.error: Exception | None = None
        self._run = functools.partial(session.make_callable(update, list(now)), *now.values())
        threading.Thread(target=self._keep_running, daemon=True, name="updates").start()

    def _keep_running(self) -> None:
        try:
            while True:
                self._run()
        except (tf.errors.CancelledError, RuntimeError):  # the session is closed, or the queue of the updates
            return
        except tf.errors.OpError as error:
            self.error = error
