"""Partial updates, whose step was interrupted while they were applied: log and count those of a worker."""

import logging
import time

import tensorflow.compat.v1 as tf

from tfps.modes.base import Step
from tfps.text import plural
from tfps.tf_types import Session

_AT_REST_SECS = 1.0  # a lost process's requests have finished by then, or never will
_POLL_SECS = 0.02

log = logging.getLogger(__name__)


class PartialUpdates:
    """The partial updates of one worker. Make it while the training graph is the default one.

    Args:
        step: The mode's step.
        worker: The worker's index.
    """

    def __init__(self, step: Step, worker: int) -> None:
        self._of = of = step.partial
        if of is None:
            return
        self._own = of.unreported[worker]
        with tf.control_dependencies([of.total.assign_add(self._own, read_value=False)]):
            self._count = of.settle()

    def report(self, session: Session) -> None:
        """Log and count on the PS the partial updates not reported yet; call it while no step is in flight."""
        deadline = time.monotonic() + _AT_REST_SECS
        while self._of and (found := int(session.run(self._own))):
            if time.monotonic() > deadline:
                log.info(
                    "%s of this worker applied in part: interrupted when some variables had it and others did not",
                    plural(found, "update"),
                )
                session.run(self._count)
                return
            time.sleep(_POLL_SECS)
