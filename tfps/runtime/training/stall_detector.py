"""A worker that takes no step any more says so, shows where it is, and ends. Does not import TensorFlow."""

import faulthandler
import logging
import time
from collections.abc import Callable, Sequence

from tfps.errors import StallError
from tfps.report import duration

_TELL_AFTER_SECS = 30.0

log = logging.getLogger(__name__)


class StallDetector:
    """Since when a worker has taken no step.

    Args:
        timeout_secs: After how long that is a ``StallError``.
    """

    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        self._steps, self._since = -1, time.monotonic()
        self._tell_at = _TELL_AFTER_SECS

    def error(self, steps: int, global_step: int, awaited: Callable[[], Sequence[str]]) -> StallError | None:
        """Return why the worker has to end, if it has stood still for too long; the log gets Python's stacks.

        One that waits for others is not to blame: it ends when these have had twice the time.

        Args:
            steps: How many it has taken.
            global_step: The last that it has made.
            awaited: Returns which other workers it waits for, and what is known of them; nothing if that is not known.
        """
        now = time.monotonic()
        if steps != self._steps:
            self._steps, self._since, self._tell_at = steps, now, _TELL_AFTER_SECS
        idle = now - self._since
        if idle <= min(self._tell_at, self._timeout_secs):
            return None
        others = ", ".join(awaited())
        told = f"no step for {duration(idle)}, the last was {global_step}" + (
            f": waiting for {others}" if others else ""
        )
        if idle > self._timeout_secs * (2 if others else 1):
            faulthandler.dump_traceback(file=2, all_threads=True)
            return StallError(f"{told}: the task's log shows where it stands. --stall_timeout_secs allows for more.")
        if idle > self._tell_at:
            self._tell_at *= 2
            log.info("waiting: %s", told)
        return None
