"""The early end of a worker that was asked to stop: save what there is, and sign off as stopped.

A chief that holds the variables itself, because there is no PS, saves as well when the job has to start again because
another worker is lost: what it holds ends with its process.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.errors import PeerLostError, StoppedError, TfpsError
from tfps.runtime.coordination.job_state import Phase, WorkerTotals
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker_parts import WorkerParts
from tfps.runtime.training.worker_state import LifeCycle, WorkerState
from tfps.text import brief
from tfps.timeouts import SAVED_WITHIN_SECS

_LAST_STEPS_SECS = 1.0
_POLL_SECS = 0.02

log = logging.getLogger(__name__)


class EarlyEnd:
    """Save and sign off, on the thread of the work or, while that is blocked in a step, on another one.

    Attributes:
        partial_updates: On the chief, how many partial updates the saved variables hold; ``None`` if nothing is saved.
        totals: On the chief, the work of all workers; empty if that is not known.
        steps: On the chief, by worker index, the steps taken in this run; empty if that is not known.
    """

    def __init__(self, parts: WorkerParts, loop: Loop, stop: StopRequest, life: LifeCycle) -> None:
        self._parts = parts
        self._loop = loop
        self._stop = stop
        self._life = life
        self._over = threading.Event()
        self.partial_updates: int | None = None
        self.totals: Sequence[WorkerTotals] = ()
        self.steps: Sequence[int] = ()

    def is_due(self, error: Exception | None) -> bool:
        """Return whether the state has to be saved before this task ends with an error."""
        is_last_copy = self._parts.connection.held is not None
        return isinstance(error, StoppedError) or (is_last_copy and isinstance(error, PeerLostError))

    def sign_off(self, error: Exception | None) -> None:
        """Save, and sign off on the PS if the error is that the worker is stopped.

        Do nothing if an end has started already, or the worker is done.
        """
        if not self._life.begin_end(WorkerState.STOPPING):
            return
        try:
            if self._parts.barrier.interrupted:  # which closes the session
                self._parts.connection.reopen()
            if self._parts.chief:
                self._save(self._parts.chief)
            if not isinstance(error, StoppedError):
                return
            self._parts.leave()
            is_at_end = self._parts.has_trained_all(self._loop.progress)
            self._parts.write_phase(Phase.STOPPED_AT_END if is_at_end else Phase.STOPPED, self._loop.progress)
        except (tf.errors.OpError, TfpsError, RuntimeError) as problem:
            log.info("the state could not be saved: %s", brief(problem))
        finally:
            self._over.set()

    def sign_off_in_time(self) -> None:
        """Do so in the remaining time while the training thread is blocked, or wait for that thread to do it."""
        left_secs = SAVED_WITHIN_SECS - self._stop.waited_secs
        error = self._stop.error
        if self._life.is_done_within(left_secs) or not self.is_due(error):
            return
        if self._life.state is not WorkerState.STOPPING:
            threading.Thread(target=self.sign_off, args=(error,), daemon=True).start()
        if not self._over.wait(SAVED_WITHIN_SECS - self._stop.waited_secs) and self._parts.chief:
            log.info("no time is left to save; newest checkpoint: %s", self._parts.chief.checkpoint or "none")

    def _save(self, chief: Chief) -> None:
        session = self._parts.connection.session
        chief.owner.check()
        self._let_others_stop()
        if not chief.settle_update(session):
            raise PeerLostError("an update is in progress and cannot be finished")
        self._loop.progress.global_step = chief.save(session)
        self.partial_updates = chief.partial_updates(session)
        progress = self._loop.progress
        self.totals = self._parts.totals_of_workers(progress)
        with contextlib.suppress(tf.errors.OpError):  # the state is saved, whatever the summary lacks
            self.steps = chief.steps_taken(session) or self._parts.steps_of_workers(chief.resumed_from_step, progress)

    def _let_others_stop(self) -> None:
        """Wait briefly for the others' last steps, in case they have to stop too, so that these are saved."""
        deadline = time.monotonic() + _LAST_STEPS_SECS
        while self._parts.others.any_trains(self._parts.connection.session) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
