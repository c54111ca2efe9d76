"""Reach the PS for a task whose own session may be blocked: in another session, and with a short timeout."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Task
from tfps.modes.recovery import Fence
from tfps.runtime.coordination.job_state import JobState
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.tf_types import Session

_PATIENCE_SECS = 2.0

log = logging.getLogger(__name__)


class JobStateReader:
    """Read the job's state from the PS.

    Args:
        new_session: Makes a session on the training graph.
        state: The job's state.
        ahead: ``Step.updates_ahead``.
        may_ask: Returns whether the PS know this process: a session of a replaced one would end its successor's.
        awaited: ``StepLimit.awaited``.
    """

    def __init__(
        self,
        new_session: Callable[[], Any],
        state: JobState,
        ahead: Any,
        may_ask: Callable[[], bool] = lambda: True,
        awaited: Any = None,
    ) -> None:
        self._new_session, self._state, self._ahead, self._may_ask = new_session, state, ahead, may_ask
        self._awaited = awaited

    def was_here(self) -> bool:
        """Return whether every PS knows this worker from before; then missing workers may be done and gone.

        A PS that exits at that moment would never answer, which counts as a no.
        """
        return bool(self._asked(lambda session: self._state.is_up(session) and all(self._state.marked(session))))

    def are_ps_up(self) -> bool:
        """Return whether every PS answers on the connections that this process has."""
        return bool(self._asked(self._state.is_up))

    def phases(self) -> Sequence[int]:
        """Return the workers' phases; empty if the PS do not answer."""
        return self._asked(lambda session: self._state.read(session)[0]) or []

    def ahead(self) -> Sequence[int]:
        """Return ``Step.updates_ahead``; empty if the PS do not answer."""
        return [] if self._ahead is None else self._asked(lambda session: session.run(self._ahead).tolist()) or []

    def awaited(self) -> Sequence[int]:
        """Return for which workers this one waits, by ``StepLimit.awaited``; empty if the PS do not answer."""
        ask = lambda session: session.run(self._awaited).nonzero()[0].tolist()  # noqa: E731
        return [] if self._awaited is None else self._asked(ask) or []

    def evict(self, fence: Fence, pulses: Mapping[int, int]) -> None:
        """Raise a fence for those workers that hold others and have sent no heartbeat since; log which.

        Args:
            fence: The mode's fence.
            pulses: By worker, how many heartbeats it is known to have sent.
        """

        def act(session: Any) -> None:
            held_by, now = session.run(fence.held_by), self._state.pulse(session)()
            lost = [index for index, pulse in pulses.items() if held_by[index] and now[index] == pulse]
            if lost:
                session.run(fence.raise_, {fence.workers: lost})
                names = ", ".join(str(Task("worker", index)) for index in lost)
                log.info("lost %s: no heartbeat; no worker waits for it until it is started again", names)

        self._asked(act)

    def beats(self) -> Sequence[WorkerPace]:
        """Return the workers' heartbeats, with times of this machine's clock; empty if the PS do not answer."""
        return self._asked(self._own_beats) or []

    def _own_beats(self, session: Session) -> Sequence[WorkerPace]:
        beats, ahead = self._state.beats(session)(), time.time() - self._state.now(session)
        return [replace(beat, when=beat.when + ahead) if beat.when else beat for beat in beats]

    def _asked(self, question: Callable[[Any], Any]) -> Any:
        """Return the answer of the PS, or ``None`` if they do not answer within a short time."""
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
