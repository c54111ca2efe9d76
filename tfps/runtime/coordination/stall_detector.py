"""Detect that a task makes no more progress: log it, print the stacks, and end it. Does not import TensorFlow."""

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
    """Measure for how long a task could take a step and did not; time in which it was suspended does not count.

    Args:
        timeout_secs: Return a ``StallError`` after this long.
        unit: What a step is called in messages.
    """

    def __init__(self, timeout_secs: float, unit: str = "step") -> None:
        self._timeout_secs, self._unit = timeout_secs, unit
        self._steps: object = None
        self._idle_secs, self._report_at = 0.0, _REPORT_AFTER_SECS
        self._looked_at = time.monotonic()

    def error(
        self, steps: object, last_step: int | None, awaited: Callable[[], Sequence[str]] = list
    ) -> StallError | None:
        """Return why the task has to end, if it has been idle for too long; then the log gets Python's stacks.

        A worker that waits for others is not to blame. It ends when they have had twice the time.

        Args:
            steps: How many steps the task has taken, or anything else that changes with each step.
            last_step: The number of its last one, for messages; for a worker, the global step after it. ``None`` where
                there is only one.
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
        finding = f"no {self._unit} for {duration(idle)}" + (
            (f", the last was {last_step}" if last_step is not None else "")
            + (f": waiting for {others}" if others else "")
        )
        if idle > self._timeout_secs * (2 if others else 1):
            faulthandler.dump_traceback(file=2, all_threads=True)
            return StallError(
                f"{finding}: see the stacks in the task's log. If one takes longer, raise --stall_timeout_secs."
            )
        if idle > self._report_at:
            self._report_at *= 2
            log.info("waiting: %s", finding)
        return None
