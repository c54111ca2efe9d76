"""Updates that are applied in part, as their step was broken off: how many a worker leaves, and that it says so."""

import logging
import time

import tensorflow.compat.v1 as tf

from tfps.modes.base import Step
from tfps.report import plural
from tfps.tf_types import Session

_AT_REST_SECS = 1.0  # what a lost process has asked for has ended by then, or never does
_POLL_SECS = 0.02

log = logging.getLogger(__name__)


class PartialUpdates:
    """Those of one worker. Make it while the training graph is the default one.

    Args:
        step: The mode's.
        worker: Its index.
    """

    def __init__(self, step: Step, worker: int) -> None:
        self._of = of = step.partial
        if of is None:
            return
        self._mine = of.untold[worker]
        with tf.control_dependencies([of.total.assign_add(self._mine, read_value=False)]):
            self._count = of.settle()

    def tell(self, session: Session) -> None:
        """Say, and count on the PS, how many it has not told yet; no step of it is under way now."""
        deadline = time.monotonic() + _AT_REST_SECS
        while self._of and (found := int(session.run(self._mine))):
            if time.monotonic() > deadline:
                log.info(
                    "%s of this worker applied in part: broken off when some variables had it, and others had not",
                    plural(found, "update"),
                )
                session.run(self._count)
                return
            time.sleep(_POLL_SECS)
