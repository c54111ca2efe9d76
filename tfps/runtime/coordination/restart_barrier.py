"""Barrier at which workers start together, and restart together after one of them was lost and replaced.

``job_state`` describes the protocol.
"""

import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow.compat.v1 as tf

from tfps.errors import PeerLostError
from tfps.runtime.coordination.job_state import JobState, Phase, RestartState
from tfps.runtime.coordination.stragglers import Stragglers, WorkerPace
from tfps.tf_types import Session

_LISTEN_SECS = 0.5
_LOOKS_IN_STEP = 5  # straggler checks per check for restart requests: the awaited workers change within a step
_FEW_LOOKS_IN_STEP = 20
_LISTENS_A_PACE = 4  # a worker's pace is measured over several checks

log = logging.getLogger(__name__)


class Recovery(Protocol):
    """The chief's duties where workers start together."""

    def settle_update(self, session: Session) -> bool:
        """Wait for the update that has started, and start no other; return whether all variables are of one step."""

    def release_workers(self, session: Session, generation: int) -> None:
        """Initialize the mode for a generation, so that all workers may continue."""

    def global_step(self, session: Session) -> int:
        """Return how many updates the variables have had."""


class RestartBarrier:
    """One worker's part in the barrier.

    Args:
        state: The job's state.
        chief: The chief's duties, if this worker is the chief.
        is_blocking: Whether workers wait for one another, and so have to restart together.
        wait_until: Returns when a condition is true; raises the reason to stop, if there is one.
        ahead: ``modes.base.Step.updates_ahead``.
        ended: ``modes.base.Step.ended``.
        can_spare: Returns whether a restart can go on without some workers, by their indices.

    Attributes:
        interrupted: Whether the session was closed because another worker requested a restart.
        over: Whether there is nothing more to train.
        stragglers: On the chief, which workers are behind.
    """

    def __init__(
        self,
        state: JobState,
        chief: Recovery | None,
        is_blocking: bool,
        wait_until: Callable[[Callable[[], bool]], object],
        ahead: Any,
        ended: Any = None,
        can_spare: Callable[[Sequence[int]], bool] = lambda workers: not workers,
    ) -> None:
        self._state, self._chief, self.is_blocking, self._wait_until = state, chief, is_blocking, wait_until
        self._ahead, self._ended, self._can_spare = ahead, ended, can_spare
        self._look_ahead: Callable[[], Sequence[int]] = lambda: []
        self._look_at_end: Callable[[], Any] = lambda: False
        self._look_at_beats: Callable[[], Sequence[WorkerPace]] = lambda: []
        self.stragglers = Stragglers(_FEW_LOOKS_IN_STEP) if is_blocking else Stragglers()
        self._session: Any = None
        self._look: Callable[[], RestartState] = lambda: RestartState(0, -1, [], [])
        self._generation = 0
        self._listening = False
        self.interrupted = self.over = False

    def begin(self, session: Session) -> None:
        """Wait until every worker that trains has arrived in the newest generation, and may continue.

        Raises:
            PeerLostError: If the variables are of no use, so that the job has to restart from its checkpoint.
        """
        self._session, self._listening, self.interrupted = session, False, False
        self._look = self._state.restart_state_reader(session)
        if self.is_blocking:
            self._look_ahead = session.make_callable(self._ahead)
        if self._ended is not None:
            self._look_at_end = session.make_callable(self._ended)
        self._look_at_beats = self._state.beats(session)
        while not self._arrive(session):
            pass
        self._listening = True

    def listen(self) -> None:
        """Start to interrupt the session when another worker requests a restart; on the chief, also find stragglers."""
        if self.is_blocking or self._chief:
            threading.Thread(target=self._listen, daemon=True, name="listener").start()

    def _listen(self) -> None:
        looks = _LOOKS_IN_STEP if self._chief and self.is_blocking else 1
        pauses = random.Random()  # noqa: S311  not the global generator, which the model may have seeded
        for turn in itertools.count(1):
            pause = _LISTEN_SECS / looks
            time.sleep(pause * pauses.uniform(0.5, 1.5))  # not always at the same point of a step
            session, look, generation = self._session, self._look, self._generation
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # RuntimeError: the session was closed
                called = self._listening and turn % looks == 0 and look().generation > generation
                if called and session is self._session:
                    self._listening, self.interrupted = False, True
                    # It interrupts the run, but may itself wait for a lost worker that the run has called.
                    threading.Thread(target=session.close, daemon=True, name="closing").start()
                elif self._listening and self._chief:
                    self._look_for_stragglers(turn)

    def _look_for_stragglers(self, turn: int) -> None:
        if self.is_blocking:
            self.stragglers.look_in_step(self._look_ahead())
        elif turn % _LISTENS_A_PACE == 0:
            training = [index for index, phase in enumerate(self._look().phases) if phase == Phase.RUNNING]
            self.stragglers.look_apart(self._look_at_beats(), training)

    def _arrive(self, session: Session) -> bool:
        """Arrive in the newest generation; return whether all continue in it, and not a newer one was requested."""
        generation = self._generation = self._state.arrive(session)
        if self._chief and self._look().released < generation:
            self._release(self._chief, session, generation)
        self._wait_until(
            lambda: (
                (seen := self._look()).released >= generation
                or seen.generation > generation
                or self._is_over(seen)
                or self._nothing_is_left()
            )
        )
        seen = self._look()
        self.over = self._is_over(seen) or self._nothing_is_left()
        return seen.released >= generation or self.over

    def _is_over(self, seen: RestartState) -> bool:
        """Return whether the chief trains no more, or has signed off: then it no longer checks for requests."""
        return self._chief is None and seen.phases[0] in (Phase.FINISHING, Phase.DONE)

    @property
    def is_waiting(self) -> bool:
        """Whether this worker waits for others to start together, or will as soon as it sees that it is interrupted."""
        return not self._listening and not self.over

    def has_ended(self, session: Session) -> bool:
        """Return whether training has ended for all workers, because the input of one has or all steps are taken."""
        return self._ended is not None and bool(session.run(self._ended))

    def _nothing_is_left(self) -> bool:
        """Return the same after a restart: then nobody has to be waited for."""
        return self._generation > 0 and bool(self._look_at_end())

    def settle(self, session: Session) -> None:
        """Let an update end that has started, as the chief.

        Raises:
            PeerLostError: If it cannot end: the variables are of no use, and the job restarts from its checkpoint.
        """
        if self._chief and not self._chief.settle_update(session):
            self._abort(session)

    def _abort(self, session: Session) -> None:
        self._state.abort_job(session)
        raise PeerLostError("the chief was lost in the middle of an update: the job restarts.")

    def _release(self, chief: Recovery, session: Session, generation: int) -> None:
        """Wait for the others, clear the remains of the earlier generation, and let all workers continue."""
        self._wait_until(lambda: self._all_have_arrived(generation) or self._nothing_is_left())
        if self._look().generation > generation:
            return
        try:
            of_use = not generation or chief.settle_update(session)
            if of_use and not self._nothing_is_left():
                chief.release_workers(session, generation)
        except tf.errors.DeadlineExceededError:
            of_use = False
        if not of_use:
            self._abort(session)
        self._state.release(session, generation)
        if generation and not self._nothing_is_left():
            log.info("a worker restarted: all workers continue from step %d", chief.global_step(session))

    def _all_have_arrived(self, generation: int) -> bool:
        seen = self._look()
        training = [index for index, phase in enumerate(seen.phases) if phase == Phase.RUNNING]
        missing = [index for index in training if seen.arrived[index] < generation]
        return seen.generation > generation or (self._can_spare(missing) if generation else not missing)
