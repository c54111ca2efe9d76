"""What interrupted steps of workers have left on the PS, which a restart of all workers removes."""

import time

import tensorflow.compat.v1 as tf

from tfps.modes.base import SyncRecovery
from tfps.tf_types import Session

_CLEAR_SECS = 10.0


def clear(session: Session, recovery: SyncRecovery) -> None:
    """Remove the requests and elements of lost workers: satisfy the requests, then empty queues and accumulators.

    Raises:
        tf.errors.DeadlineExceededError: If this does not end in time.
    """
    deadline, stays = time.monotonic() + _CLEAR_SECS, False
    while not stays:
        for _ in range(recovery.unblock_count):
            session.run(recovery.unblock)
        stays = (session.run(recovery.counts) >= recovery.unblock_count).all()
        if time.monotonic() > deadline:
            raise tf.errors.DeadlineExceededError(
                None, None, "the queues do not stay filled: requests keep emptying them"
            )
    patience = tf.RunOptions(timeout_in_ms=int(_CLEAR_SECS * 1000))
    while (counts := session.run(recovery.counts)).any():
        full = [clear for clear, held in zip(recovery.clear, counts, strict=True) if held]
        session.run(full, options=patience)
