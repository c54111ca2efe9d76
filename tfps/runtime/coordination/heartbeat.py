"""Each worker's heartbeat on the PS, for the tasks that wait for it: a pulse, its step, and the time of that step.

It shows which workers are alive and reach the PS, whether or not they reach each other.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import tensorflow.compat.v1 as tf

from tfps.runtime.coordination.job_state import JobState, WorkerTotals
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.tf_types import Graph, Session

FORGOTTEN = "Session handle is not found"
EVERY_SECS = 1.0
_HEARD_SECS = 5.0


class Heartbeat:
    """Send heartbeats from a separate thread, from the first ``use`` until the process ends.

    Args:
        state: The job's state.
        progress: Returns the progress of this process; ``None`` if it does not train yet.
        graph: The graph of ``state``, if it is not the training graph.

    Attributes:
        state: See there.
        graph: See there.
        before: What lost processes of this worker had reported of their work.
        unreported: How many more steps they had taken.
        forgotten: Whether a PS no longer knows this worker's session.
    """

    def __init__(self, state: JobState, progress: Callable[[], WorkerPace | None], graph: Graph | None = None) -> None:
        self.state, self._progress, self.graph = state, progress, graph
        self._beat: Callable[[WorkerPace], None] | None = None
        self._pulse: Callable[[], list[int]] | None = None
        self._pulses: dict[int, tuple[int, float]] = {}  # by worker: its last pulse, and when that arrived here
        self._heard = 0.0
        self.before, self.unreported = WorkerTotals(), 0
        self.forgotten = False

    @property
    def is_used(self) -> bool:
        """Whether heartbeats are sent."""
        return self._beat is not None

    def use(self, session: Session) -> None:
        """Send heartbeats through this session from now on."""
        first = not self.is_used
        self._beat, self._pulse = self.state.heartbeat_writer(session), self.state.pulse(session)
        if first:
            threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat").start()

    def silent_secs(self, worker: int) -> float:
        """Return for how long a worker had sent no heartbeat when the PS last answered."""
        return self._heard - self._pulses[worker][1] if worker in self._pulses else 0.0

    def pulse_of(self, worker: int) -> int:
        """Return how many heartbeats a worker had sent when the PS last answered."""
        return self._pulses[worker][0]

    def is_heard(self) -> bool:
        """Return whether the PS have just answered this worker, or it has not started to send heartbeats."""
        return not self.is_used or time.monotonic() - self._heard < _HEARD_SECS

    def _keep_beating(self) -> None:
        last = -1, 0, False
        while True:
            try:
                self._give_sign()
                last = self._leave_step(last)
            except (tf.errors.OpError, RuntimeError) as error:  # a closed session, or a lost PS
                self.forgotten = self.forgotten or FORGOTTEN in str(error)
            time.sleep(EVERY_SECS)

    def _give_sign(self) -> None:
        if not self._pulse:
            return
        pulses, now = self._pulse(), time.monotonic()
        if self._heard and (unheard_secs := now - self._heard) > _HEARD_SECS:  # nobody's heartbeats arrived meanwhile
            self._pulses = {worker: (pulse, when + unheard_secs) for worker, (pulse, when) in self._pulses.items()}
        for worker, pulse in enumerate(pulses):
            if self._pulses.get(worker, (None, 0.0))[0] != pulse:
                self._pulses[worker] = pulse, now
        self._heard = now

    def _leave_step(self, last: tuple[int, int, bool]) -> tuple[int, int, bool]:
        """Write the present progress, if its steps, its skipped batches and whether it waits differ from ``last``.

        Return these three.
        """
        own, before = self._progress(), self.before
        if not (own and self._beat) or (own.steps, own.skipped, own.is_waiting) == last:
            return last
        counts = ("steps", "secs", "skipped", "batches", "examples")
        self._beat(replace(own, **{name: getattr(before, name) + getattr(own, name) for name in counts}))
        return own.steps, own.skipped, own.is_waiting
