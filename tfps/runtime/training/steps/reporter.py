"""Progress lines of a worker, and the chief's event file."""

import logging
import time

from tfps.config.job_config import JobConfig
from tfps.modes.registry import mode_of
from tfps.progress import format_progress
from tfps.runtime.results.event_file import EventFile
from tfps.runtime.training.worker_progress import Progress

_QUIET_SECS = 5.0  # a slow model reports at least this often
_SHORTEST_SECS = 0.001  # a shorter interval gives no speed

log = logging.getLogger(__name__)


class Reporter:
    """Log a worker's progress lines and, on the chief, write the event file; its speeds are those of the whole job."""

    def __init__(self, config: JobConfig, events: EventFile | None, num_workers: int = 1) -> None:
        self._every = config.steps_to_validate
        self._batches = mode_of(config).gradients_per_update(config, num_workers)  # per global step
        self._max_steps = config.max_steps
        self._events = events
        self._last: tuple[int, float] = (-1, time.monotonic())  # step and time of the last report
        self._mark: tuple[int, int, float] | None = None  # start of the speed interval: step, examples, time

    @property
    def reports_all(self) -> bool:
        """Whether to report each step."""
        return self._every == 1

    def due(self, step: int, ended: float | None = None) -> bool:
        """Return whether to report after ``step``: every ``steps_to_validate``, first, last, after ``_QUIET_SECS``.

        ``ended`` is when the step ended, a monotonic time, by default now.
        """
        last, when = self._last
        now = time.monotonic() if ended is None else ended
        passed = last < 0 or step // self._every > last // self._every
        return step > last and (passed or step >= self._max_steps or now - when > _QUIET_SECS)

    def report(
        self, step: int, progress: Progress, values: dict[str, float], merged: bytes | None, ended: float | None = None
    ) -> None:
        """Report a step's values and the speed since the last report; ``ended`` is a monotonic time, by default now."""
        now = time.monotonic() if ended is None else ended
        self._last = step, now
        last, examples, when = self._mark or (step, progress.examples, now)
        secs = now - when
        if secs >= _SHORTEST_SECS:  # two runs in flight may end at the same time
            values["examples/s"] = (progress.examples - examples) / secs
            values["steps/s"] = (step - last) / secs
        if self._mark is None or secs >= _SHORTEST_SECS:
            self._mark = step, progress.examples, now
        log.info(format_progress(step, {k: v for k, v in values.items() if k != "steps/s"}))
        if self._events:
            if "steps/s" in values:
                values = values | {"examples/s": values["steps/s"] * self._batches * progress.batch_size}
            self._events.write(step, values, merged)
