"""What a worker does when the loss or a gradient of a step is NaN or Inf: skip the batch, or stop the job."""

import logging
from collections.abc import Callable

from tfps.config.job_config import JobConfig
from tfps.errors import DivergedError
from tfps.runtime.graph.passes.nan_guard import NonFiniteValue
from tfps.runtime.training.worker_progress import Progress

_MAX_SKIPPED = 100  # batches in a row; more are not the data's fault

log = logging.getLogger(__name__)


class NonFiniteSteps:
    """Decides about the steps of one worker whose values were not finite, and were not applied.

    Args:
        config: The job.
        remedy: What to try if training diverges.
        is_trained: Whether the variables have had an update.

    Attributes:
        may_skip: Whether such a step may be skipped.
    """

    def __init__(self, config: JobConfig, remedy: str, is_trained: Callable[[], bool]) -> None:
        self.may_skip, self._remedy, self._is_trained = config.on_nan == "skip", remedy, is_trained
        self._in_a_row = 0

    def note_step(self) -> None:
        """Note that a step was taken."""
        self._in_a_row = 0

    def skip(self, found: NonFiniteValue, step: int, progress: Progress) -> None:
        """Count a skipped batch.

        Args:
            found: The value.
            step: The step in which it was.
            progress: The worker's progress.

        Raises:
            DivergedError: If the step may not be skipped.
        """
        self._in_a_row += 1
        if not self.may_skip or self._in_a_row > _MAX_SKIPPED:
            raise self.error(found, step) from None
        progress.skipped += 1
        log.info("skipped a batch: %s at step %d", found.what, step)

    def error(self, found: NonFiniteValue, step: int) -> DivergedError:
        """Return the error that ends the job."""
        return DivergedError(f"{found.what} at step {step}: {self._what_to_do()}.")

    def _what_to_do(self) -> str:
        if self.may_skip and self._in_a_row > _MAX_SKIPPED:
            return f"--on_nan=skip has skipped {_MAX_SKIPPED} batches of this worker in a row, check its data"
        if self._is_trained():  # in async, the steps before this one may not have been applied
            return self._remedy
        return "nothing is trained yet, check the input and the model"
