"""The updates that the chief keeps running in the background, in the modes that have such."""

import functools
import threading
import time
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.step import Leftovers


class Updates:
    """Runs an operation again and again, in a thread of its own, until it fails or its session is closed.

    Args:
        session: The chief's.
        update: The operation.
        leftovers: The mode's.
        era: The present one.

    Attributes:
        error: Why there are no more updates, if that is an error.
    """

    def __init__(self, session: Any, update: Any, leftovers: Leftovers, era: int) -> None:
        self.error: Exception | None = None
        self._run = functools.partial(session.make_callable(update, [leftovers.era]), era)
        self._is_under_way = session.make_callable(leftovers.torn)
        threading.Thread(target=self._keep_running, daemon=True, name="updates").start()

    def _keep_running(self) -> None:
        try:
            while True:
                self._run()
        except (tf.errors.CancelledError, RuntimeError):  # the session is closed, or the queue of the updates
            return
        except tf.errors.OpError as error:
            self.error = error

    def wait_for_begun(self, deadline: float) -> None:
        """Wait until none has begun that has not ended, or for ``time.monotonic()`` to be so late.

        Raises:
            tf.errors.OpError: If a PS is lost.
        """
        while self._is_under_way() and time.monotonic() < deadline:
            time.sleep(0.01)
