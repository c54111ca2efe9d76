"""How the workers begin together, and begin anew when one of them was lost and started again.

The protocol is in ``job_state``.
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
from tfps.runtime.coordination.job_state import DONE, RUNNING, JobState, RestartState
from tfps.runtime.coordination.stragglers import Stragglers, WorkerPace
from tfps.tf_types import Session

_LISTEN_SECS = 0.5
_LOOKS_IN_STEP = 5  # while the chief listens once: who is waited for changes within a step
_FEW_LOOKS_IN_STEP = 20
_LISTENS_A_PACE = 4  # a pace is taken over some time

log = logging.getLogger(__name__)


class Recovery(Protocol):
    """What the chief does where workers begin together."""

    def settle_update(self, session: Session) -> bool:
        """Let the update end that has begun, and no other begin; return whether all variables are of one step."""

    def release_workers(self, session: Session, generation: int) -> None:
        """Set up the mode for a generation, so that everyone may go on."""

    def global_step(self, session: Session) -> int:
        """Return how many updates the variables have had."""


class RestartBarrier:
    """One worker's part in it.

    Args:
        state: The job's.
        chief: The chief's duties, if this worker is the chief.
        is_blocking: Whether workers wait for one another, and so have to begin anew together.
        wait_until: Returns when a condition is true; raises the reason to stop, if there is one.
        ahead: ``modes.base.Step.updates_ahead``.

    Attributes:
        interrupted: Whether the session was closed because another worker has called.
        over: Whether there is nothing more to train.
        stragglers: On the chief, who is behind.
    """

    def __init__(
        self,
        state: JobState,
        chief: Recovery | None,
        is_blocking: bool,
        wait_until: Callable[[Callable[[], bool]], None],
        ahead: Any,
    ) -> None:
        self._state, self._chief, self.is_blocking, self._wait_until = state, chief, is_blocking, wait_until
        self._ahead = ahead
        self._look_ahead: Callable[[], Sequence[int]] = lambda: []
        self._look_at_beats: Callable[[], Sequence[WorkerPace]] = lambda: []
        self.stragglers = Stragglers(_FEW_LOOKS_IN_STEP) if is_blocking else Stragglers()
        self._session: Any = None
        self._look: Callable[[], RestartState] = lambda: RestartState(0, -1, [], [])
        self._generation = 0
        self._listening = False
        self.interrupted = self.over = False

    def begin(self, session: Session) -> None:
        """Wait until every worker that trains has come to the newest generation, and may go on.

        Raises:
            PeerLostError: If the variables are of no use: the job has to begin anew from its checkpoint.
        """
        self._session, self._listening, self.interrupted = session, False, False
        self._look = self._state.restart_state_reader(session)
        if self.is_blocking:
            self._look_ahead = session.make_callable(self._ahead)
        self._look_at_beats = self._state.beats(session)
        while not self._arrive(session):
            pass
        self._listening = True

    def listen(self) -> None:
        """From now on, break off what the session does when another worker calls; the chief looks who is behind."""
        if self.is_blocking or self._chief:
            threading.Thread(target=self._listen, daemon=True, name="listener").start()

    def _listen(self) -> None:
        looks = _LOOKS_IN_STEP if self._chief and self.is_blocking else 1
        pauses = random.Random()  # noqa: S311  not the model's, which it may have seeded
        for turn in itertools.count(1):
            pause = _LISTEN_SECS / looks
            time.sleep(pause * pauses.uniform(0.5, 1.5))  # not always at the same point of a step
            session, look, generation = self._session, self._look, self._generation
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # of a closed session
                called = self._listening and turn % looks == 0 and look().generation > generation
                if called and session is self._session:
                    self._listening, self.interrupted = False, True
                    session.close()
                elif self._listening and self._chief:
                    self._look_for_stragglers(turn)

    def _look_for_stragglers(self, turn: int) -> None:
        if self.is_blocking:
            self.stragglers.look_in_step(self._look_ahead())
        elif turn % _LISTENS_A_PACE == 0:
            training = [index for index, phase in enumerate(self._look().phases) if phase == RUNNING]
            self.stragglers.look_apart(self._look_at_beats(), training)

    def _arrive(self, session: Session) -> bool:
        """Come to the newest generation; return whether everyone goes on in it, or has been called again."""
        generation = self._generation = self._state.arrive(session)
        if self._chief and self._look().released < generation:
            self._release(self._chief, session, generation)
        self._wait_until(
            lambda: (seen := self._look()).released >= generation or seen.generation > generation or self._is_over(seen)
        )
        seen = self._look()
        self.over = self._is_over(seen)
        return seen.released >= generation or self.over

    def _is_over(self, seen: RestartState) -> bool:
        """Return whether the chief has left: it heard no call any more, as all was done."""
        return self._chief is None and seen.phases[0] == DONE

    def _release(self, chief: Recovery, session: Session, generation: int) -> None:
        """Wait for the others, clear what is left of the generation before, and let everyone go on."""
        self._wait_until(lambda: self._all_have_arrived(generation))
        if self._look().generation > generation:
            return
        try:
            of_use = not generation or chief.settle_update(session)
            if of_use:
                chief.release_workers(session, generation)
        except tf.errors.DeadlineExceededError:
            of_use = False
        if not of_use:
            self._state.abort_job(session)
            raise PeerLostError("the chief was lost in the middle of an update: the job begins anew.")
        self._state.release(session, generation)
        if generation:
            log.info("a worker was started again: all go on together from step %d", chief.global_step(session))

    def _all_have_arrived(self, generation: int) -> bool:
        seen = self._look()
        training = [index for index, phase in enumerate(seen.phases) if phase == RUNNING]
        return seen.generation > generation or all(seen.arrived[index] >= generation for index in training)
