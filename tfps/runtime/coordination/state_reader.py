"""What a task asks the PS while its own session may be blocked: in another session, and not for long."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.coordination.job_state import JobState
from tfps.runtime.coordination.stragglers import WorkerPace

_PATIENCE_SECS = 2.0


class JobStateReader:
    """Asks the PS.

    Args:
        new_session: Makes a session on the training graph.
        state: What is asked.
        ahead: ``Step.updates_ahead``.
        may_ask: Tells whether the PS know this process: a session of one that was replaced would end its successor's.
    """

    def __init__(
        self, new_session: Callable[[], Any], state: JobState, ahead: Any, may_ask: Callable[[], bool] = lambda: True
    ) -> None:
        self._new_session, self._state, self._ahead, self._may_ask = new_session, state, ahead, may_ask

    def was_here(self) -> bool:
        """Return whether every PS knows this worker from before: those that are missing may be through and gone.

        A PS that goes just then would never answer: that is a no, too.
        """
        return bool(self._asked(lambda session: self._state.is_up(session) and all(self._state.marked(session))))

    def phases(self) -> Sequence[int]:
        """Return the workers' phases, if the PS tell them."""
        return self._asked(lambda session: self._state.read(session)[0]) or []

    def ahead(self) -> Sequence[int]:
        """Return ``Step.updates_ahead``, if the PS tell it."""
        return [] if self._ahead is None else self._asked(lambda session: session.run(self._ahead).tolist()) or []

    def beats(self) -> Sequence[WorkerPace]:
        """Return the workers' heartbeats, if the PS tell them."""
        return self._asked(lambda session: self._state.beats(session)()) or []

    def _asked(self, question: Callable[[Any], Any]) -> Any:
        """Return what the PS answer within a short time, ``None`` if they do not."""
        found: list[Any] = []
        if not self._may_ask():
            return None

        def ask() -> None:
            with contextlib.suppress(tf.errors.OpError), self._new_session() as session:
                found.append(question(session))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECS)
        return found[0] if found else None
