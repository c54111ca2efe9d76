"""Detect that a worker takes no more steps: log it, print the stacks, and end it. Does not import TensorFlow."""

import faulthandler
import logging
import time
from collections.abc import Callable, Sequence

from tfps.errors import StallError
from tfps.text import duration

_REPORT_AFTER_SECS = 30.0
_LONGEST_GAP_SECS = (
    5.0  # between two checks; during a longer gap the process itself was suspended, so the step is not to blame
)

log = logging.getLogger(__name__)


class StallDetector:
    """Measure for how long a worker could take a step and did not; time in which it was suspended does not count.

    Args:
        timeout_secs: Return a ``StallError`` after this long.
    """

    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        self._steps, self._idle_secs, self._report_at = -1, 0.0, _REPORT_AFTER_SECS
        self._looked_at = time.monotonic()

    def error(self, steps: int, global_step: int, awaited: Callable[[], Sequence[str]]) -> StallError | None:
        """Return why the worker has to end, if it has been idle for too long; then the log gets Python's stacks.

        A worker that waits for others is not to blame. It ends when they have had twice the time.

        Args:
            steps: How many steps the worker has taken.
            global_step: The global step after its last one.
            awaited: Returns which workers this one waits for, and what is known of them; empty if that is not known.
        """
        gap_secs, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
        self._idle_secs += min(gap_secs, _LONGEST_GAP_SECS)
        if steps != self._steps:
            self._steps, self._idle_secs, self._report_at = steps, 0.0, _REPORT_AFTER_SECS
        idle = self._idle_secs
        if idle <= min(self._report_at, self._timeout_secs):
            return None
        others = ", ".join(awaited())
        finding = f"no step for {duration(idle)}, the last was {global_step}" + (
            f": waiting for {others}" if others else ""
        )
        if idle > self._timeout_secs * (2 if others else 1):
            faulthandler.dump_traceback(file=2, all_threads=True)
            return StallError(
                f"{finding}: see the stacks in the task's log. If steps take longer, raise --stall_timeout_secs."
            )
        if idle > self._report_at:
            self._report_at *= 2
            log.info("waiting: %s", finding)
        return None
