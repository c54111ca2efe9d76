"""The progress of an evaluation, and whether it still makes any. Does not import TensorFlow."""

import contextlib
from collections.abc import Iterator

from tfps.errors import StallError
from tfps.runtime.coordination.stall_detector import StallDetector


class EvaluationProgress:
    """Count the batches that a thread evaluates, for another thread that ends the task if they stop coming.

    Args:
        timeout_secs: How long a batch may take.

    Attributes:
        batches: How many batches of the evaluation are done.

    Example::

        with progress.running():
            for batch in batches:
                evaluate(batch)
                progress.batches += 1
    """

    def __init__(self, timeout_secs: float) -> None:
        self._stall = StallDetector(timeout_secs, "evaluation batch")
        self._evaluations, self._is_running = 0, False
        self.batches = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count from 0, while an evaluation runs."""
        self._evaluations, self.batches, self._is_running = self._evaluations + 1, 0, True
        try:
            yield
        finally:
            self._is_running = False

    def error(self) -> StallError | None:
        """Return why the task has to end, if an evaluation runs and no batch of it has ended for too long."""
        if not self._is_running:
            return None
        return self._stall.error((self._evaluations, self.batches), self.batches)
