"""What interrupted steps of workers have left on the PS: an update on its way, and requests of lost workers."""

import contextlib
import time

import tensorflow.compat.v1 as tf

from tfps.modes.recovery import Pause, SyncRecovery
from tfps.tf_types import Session

_CLEAR_SECS, _SETTLE_SECS, _POLL_SECS = 10.0, 3.0, 0.02


def settle(session: Session, recovery: SyncRecovery, pause: Pause | None) -> None:
    """Wait until the update that has started has ended, and let none start where none needs the chief's step.

    It may not end, if the chief that began it is lost. A chief that was lost while it saved has left updates paused.
    """
    if pause is not None:
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            session.run(pause.begin, options=tf.RunOptions(timeout_in_ms=int(_SETTLE_SECS * 1000)))
    deadline = time.monotonic() + _SETTLE_SECS
    while session.run(recovery.partially_applied) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)


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
