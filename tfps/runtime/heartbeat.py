"""Each worker's heartbeat: now and then it leaves its step, and when that was, on the PS, for whoever waits for it."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.jobstate import JobState
from tfps.runtime.loop import Progress
from tfps.runtime.stragglers import Beat

_EVERY_SECS = 1.0


class Heartbeat:
    """Beats in a thread of its own, from the first ``use`` until the process ends.

    Args:
        state: The job's.
        progress: Returns how far the worker has come; ``None`` if it does not train yet.

    Attributes:
        before: What this worker had left here when it was lost, if it was started again.
    """

    def __init__(self, state: JobState, progress: Callable[[], Progress | None]) -> None:
        self._state, self._progress = state, progress
        self._beat: Callable[[Beat], None] | None = None
        self.before = Beat()

    def use(self, session: Any) -> None:
        """Beat by this session from now on."""
        first = self._beat is None
        self._beat = self._state.beater(session)
        if first:
            threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat").start()

    def _keep_beating(self) -> None:
        last = -1
        while True:
            progress = self._progress()
            if progress and self._beat and progress.steps != last:
                ago = time.monotonic() - progress.last_step
                with contextlib.suppress(tf.errors.OpError, RuntimeError):  # of a closed session, or a lost PS
                    steps, secs = self.before.steps + progress.steps, self.before.secs + progress.seconds
                    self._beat(Beat(steps, progress.global_step, time.time() - ago, secs))
                    last = progress.steps
            time.sleep(_EVERY_SECS)
