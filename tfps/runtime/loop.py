"""The training loop of one worker: take steps, report them, save now and then.

It knows nothing of modes: see ``tfps.modes.step`` for the ticket that a step is taken for.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.config import JobConfig
from tfps.errors import DivergedError
from tfps.report import format_progress
from tfps.runtime.events import EventFile
from tfps.runtime.graph import TrainGraph
from tfps.runtime.stop import Stop

_QUIET_SECS = 5.0  # a slow model reports at least this often

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a worker has come.

    Attributes:
        steps: Steps that this worker has taken.
        loss: The loss of its last step.
        global_step: The global step that its last step made.
        began: Monotonic time when training began, in seconds.
        last_step: Monotonic time of its last step's end.
        input_ended: Whether its input, or that of a worker it trains in step with, has ended.
    """

    steps: int = 0
    global_step: int = 0
    loss: float | None = None
    began: float = field(default_factory=time.monotonic)
    last_step: float = 0.0
    input_ended: bool = False

    @property
    def seconds(self) -> float:
        """For how long this worker has been taking steps."""
        return max(self.last_step - self.began, 1e-9)


class Reporter:
    """Prints a worker's progress lines and, on the chief, writes the event file."""

    def __init__(self, config: JobConfig, events: EventFile | None) -> None:
        self._every = config.steps_to_validate
        self._batch_size = config.batch_size
        self._max_steps = config.max_steps
        self._events = events
        self._last: tuple[int, int, float] = (-1, 0, time.monotonic())

    def due(self, step: int) -> bool:
        """Tell whether a report is due when ``step`` is done: every ``steps_to_validate``, first, last, or long ago."""
        last, _, when = self._last
        passed = last < 0 or step // self._every > last // self._every
        return passed or step >= self._max_steps or time.monotonic() - when > _QUIET_SECS

    def report(self, step: int, steps_taken: int, values: dict[str, float], merged: bytes | None) -> None:
        """Report a step: the values, and the speed since the last report."""
        last, taken, when = self._last
        now = time.monotonic()
        self._last = step, steps_taken, now
        if last >= 0:
            secs = max(now - when, 1e-9)
            values["examples/s"] = (steps_taken - taken) * self._batch_size / secs
            values["steps/s"] = (step - last) / secs
        log.info(format_progress(step, {k: v for k, v in values.items() if k != "steps/s"}))
        if self._events:
            self._events.write(step, values, merged)


class Loop:
    """Takes the steps of one worker.

    Args:
        session: Session on this worker's server.
        built: Its training graph.
        config: The job.
        reporter: Told of each step that is due to be reported.
        stop: Looked at between steps.
        between_steps: Called after every step; the chief saves here.
    """

    def __init__(
        self,
        session: Any,
        built: TrainGraph,
        config: JobConfig,
        reporter: Reporter,
        stop: Stop,
        between_steps: Callable[[], None],
    ) -> None:
        self._session, self._step = session, built.step
        self._max_steps = config.max_steps
        self._reporter, self._stop, self._between_steps = reporter, stop, between_steps
        self.progress = Progress()
        plain = [built.step.next_ticket, built.spec.loss, built.step.train_op]
        self._names = list(built.spec.log_tensors)
        merged = [] if built.summary is None else [built.summary]
        self._plain = session.make_callable(plain)
        self._full = session.make_callable([*plain, *built.spec.log_tensors.values(), *merged])

    def run(self) -> None:
        """Take steps until the tickets reach ``max_steps`` or the input ends.

        Raises:
            DivergedError: If the loss is NaN or Inf.
            TfpsError: The reason to stop, if there is one.
        """
        ticket = int(self._session.run(self._step.first_ticket))
        if ticket >= self._max_steps:
            log.info("nothing to train: --max_steps=%d is reached; raise it to go on", self._max_steps)
        while ticket < self._max_steps:
            try:
                ticket = self.take(ticket)
            except tf.errors.OutOfRangeError:
                self._end_of_input()
                return

    def take(self, ticket: int) -> int:
        """Take one step; returns the next ticket."""
        if self._stop.error:
            raise self._stop.error
        due = self._reporter.due(ticket + 1)
        next_ticket, loss, _, *rest = self._full() if due else self._plain()
        progress = self.progress
        progress.steps, progress.global_step = progress.steps + 1, ticket + 1
        progress.loss, progress.last_step = float(loss), time.monotonic()
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} at step {ticket + 1}: try a smaller --learning_rate.")
        if due:
            logged = {name: value.item() for name, value in zip(self._names, rest, strict=False)}
            merged = rest[-1] if len(rest) > len(self._names) else None
            self._reporter.report(ticket + 1, progress.steps, {**logged, "loss": float(loss)}, merged)
        self._between_steps()
        return self._other_than(ticket, int(next_ticket))

    def _other_than(self, ticket: int, drawn: int) -> int:
        """Return a ticket other than the one just used, drawing again if need be."""
        while drawn == ticket and self._step.redraw is not None:
            if self._stop.error:
                raise self._stop.error
            drawn = self._redraw()
        return drawn

    def _redraw(self) -> int:
        try:
            return int(self._session.run(self._step.redraw))
        except tf.errors.CancelledError as error:
            if "is closed" not in error.message:
                raise
            raise tf.errors.OutOfRangeError(error.node_def, error.op, "another worker's input has ended") from error

    def _end_of_input(self) -> None:
        """Say that there is no more input, and let go of the ticket."""
        self.progress.input_ended = True
        log.info("the input has ended after %d steps of this worker", self.progress.steps)
        with contextlib.suppress(tf.errors.AbortedError, tf.errors.CancelledError):  # another worker's ended first
            self._session.run(self._step.give_back)
