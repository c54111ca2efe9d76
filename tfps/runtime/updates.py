"""The updates that the chief keeps running in the background, in the modes that have such."""

import functools
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf


class Updates:
    """Runs an operation again and again, in a thread and a session of its own, until it fails or is ended.

    Args:
        session: On the chief, for this alone; when workers break off a step, the update that has begun goes on.
        update: The operation.
        now: Placeholders that it is run with, and their values.

    Attributes:
        error: Why there are no more updates, if that is an error.
    """

    def __init__(self, session: Any, update: Any, now: Mapping[Any, Any]) -> None:
        self.error: Exception | None = None
        self._session = session
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

    def end(self) -> None:
        """Close the session: the update that is under way is broken off."""
        self._session.close()
