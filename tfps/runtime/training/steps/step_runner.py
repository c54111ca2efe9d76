"""Run steps: how many a ``session.run`` takes, and how many runs a worker has in flight.

A run calls every task, however little it does, so it is better to take several short steps in one run (``unrolling``).
While one run waits for a PS, another can compute. Both numbers are chosen by measuring the first steps. A run gets as
many steps as fill ``_RUN_SECS``, unless they take too long to prepare. Two runs are in flight where the mode allows
gradients to be stale by one more step. Long steps stay as they are.
"""

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps import malloc, report
from tfps.config.converters import INT64_MAX
from tfps.config.job_config import JobConfig
from tfps.runtime.graph.builder import TrainGraph
from tfps.runtime.graph.passes.unrolling import UnrolledStep
from tfps.summary_entries import RunPace
from tfps.tf_types import Session

_RUN_SECS = 0.2
_MAX_STEPS = 16
_MAX_OPS = 2**14  # per run; TensorFlow took 1 s to prepare 2,000 (two workers, two cores), while training waits
_WARM_UP, _MEASURED = 3, 10  # runs of one step
_WORTH = 20  # only if at least this many runs remain: building a longer run takes as long as some runs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResults:
    """The results of a run of n steps.

    Attributes:
        losses: float [n].
        examples: int [n]: the number of examples in each batch.
        tickets: The next tickets; empty if none were drawn.
        reached: The global step after the run; ``None`` where the tickets of the steps give it.
        allowed: How many steps the worker may take after the run; ``None`` for no limit. See ``modes.base.StepLimit``.
        logged: For each step, the model's own ``log_tensors``; empty if they were not requested.
        summaries: For each step, the serialized summary; empty if there is none, or it was not requested.
    """

    losses: Sequence[float]
    examples: Sequence[int]
    tickets: Sequence[int]
    reached: int | None
    allowed: int | None
    logged: Sequence[Mapping[str, float]]
    summaries: Sequence[bytes]


@dataclass(frozen=True)
class TicketBatch:
    """The tickets of one run, which takes a step for each.

    ``draw_next``: At its end, the run draws as many tickets as the pace says. ``last``: Further tickets are of no use.
    """

    tickets: Sequence[int]
    draw_next: bool = True
    last: bool = False

    def apart(self, count: int) -> list["TicketBatch"]:
        """Return a batch for each of the first tickets; if others are left out, they are of no use."""
        last = count < len(self.tickets)
        singles = [TicketBatch([ticket], draw_next=False, last=last) for ticket in self.tickets[:count]]
        return [*singles[:-1], TicketBatch(self.tickets[count - 1 : count], self.draw_next, last)]


class InFlightRun:
    """A run that has started, in a thread of a pool or in the calling thread."""

    def __init__(
        self, block: TicketBatch, act: Callable[[], StepResults], submit: Callable[..., "Future[StepResults]"]
    ) -> None:
        self.block, self._act = block, act
        self.began = self.ended = time.monotonic()
        self._future = submit(self._run)

    def _run(self) -> StepResults:
        try:
            return self._act()
        finally:
            self.ended = time.monotonic()

    def result(self) -> StepResults:
        """Wait for the run to end, and return its results; raise what it raised."""
        return self._future.result()


class StepRunner:
    """Take the steps of one worker; several threads may call it.

    Args:
        session: Session on this worker's server.
        built: The worker's training graph.

    Attributes:
        updates_use_worker_state: See ``TrainGraph``.
        skips_steps: See ``modes.base.Step.may_skip_steps``.
        can_be_long: Whether a run can take several steps.
        can_overlap: Whether two runs can be in flight at the same time.
        max_steps: The largest number of steps for which a run is not too expensive to prepare.
    """

    def __init__(self, session: Session, built: TrainGraph) -> None:
        self._session, self._built = session, built
        self._reported = int(built.step.reports_step) + int(built.step.limit is not None)  # before the tickets
        self._names = list(built.spec.log_tensors)
        summary = [] if built.summary is None else [built.summary]
        self._shown = [*built.spec.log_tensors.values(), *summary]
        fetched = [built.step.train_op, built.spec.loss, built.examples]
        self._steps = UnrolledStep(built.graph, fetched, built.step.read_barrier, shown=self._shown)
        self.updates_use_worker_state = built.updates_use_worker_state
        self.skips_steps = built.step.may_skip_steps
        self.can_be_long = self._steps.in_order and not (self.updates_use_worker_state or self.skips_steps)
        self.can_overlap = built.mode.can_overlap and not (built.keeps_order or self._steps.keeps_order)
        self.max_steps = max(1, min(_MAX_STEPS, _MAX_OPS // self._steps.size))
        self._fetches: dict[tuple[int, int, bool], Any] = {}
        self._calls: dict[tuple[int, int, bool], Callable[[], Any]] = {}
        self._building = threading.Lock()

    def log_limits(self, config: JobConfig, size_is_known: bool, most: int) -> None:
        """Log why runs are shorter or fewer than the flags say.

        Args:
            config: The job.
            size_is_known: Whether the size of the input is known.
            most: The most steps that a run may have.
        """
        steps, name = config.steps_per_run or 1, config.mode
        if steps > 1 and (why := self._why_short(size_is_known, config.on_nan == "skip")):
            log.info("--steps_per_run=%d: %s, so a run takes one step", steps, why)
        elif steps > most:
            log.info("--steps_per_run=%d: --mode=%s allows %d in a run", steps, name, most)
        if (config.runs_in_flight or 1) > 1 and self._built.mode.can_overlap and not self.can_overlap:
            why = "the model keeps state on the worker, changes trained variables itself, calls Python or prints"
            log.info("--runs_in_flight=%d: %s, so one run is in flight", config.runs_in_flight, why)

    def _why_short(self, size_is_known: bool, may_skip: bool) -> str:
        if not size_is_known:
            return "the input may end anywhere"
        if may_skip:
            return "--on_nan=skip may skip a step"
        if self.skips_steps:
            return "others may take steps without this worker"
        if self.updates_use_worker_state:
            return "the optimizer uses a variable of the worker or calls Python"
        return (
            "" if self.can_be_long else "the model uses a variable in a branch, or has an operation with hidden state"
        )

    def use(self, session: Session) -> None:
        """Continue in another session."""
        self._session, self._calls = session, {}

    def draw(self, count: int, pending: int = 0) -> Sequence[int]:
        """Draw ``count`` tickets between steps, while the worker holds ``pending`` others."""
        with self._built.graph.as_default(), self._building:
            return sorted(self._session.run(self._built.step.draw(count, pending)).tolist())

    def give_back(self, count: int) -> None:
        """Give ``count`` tickets back because the input has ended."""
        with self._built.graph.as_default(), self._building:
            self._session.run(self._built.step.give_back(count))

    def global_step(self) -> int:
        """Return how many updates the variables have had."""
        with self._building:  # a session would take in an incomplete graph while another thread adds to it
            return int(self._session.run(self._built.global_step))

    def take(self, count: int, draw: int, shown: bool) -> StepResults:
        """Take ``count`` steps and draw ``draw`` tickets; with ``shown``, also return the values to report."""
        with self._building:
            what = count, draw, shown and bool(self._shown)  # one graph for both where there is nothing to show
            if what not in self._fetches:
                self._fetches[what] = self._build(*what)
            if what not in self._calls:
                of_workers = self._built.step.calls_workers  # a call that is repeated would miss what it has taken
                make = self._session.make_once if of_workers else self._session.make_callable
                self._calls[what] = make(self._fetches[what])
            call = self._calls[what]
        losses, examples, drawn, values = call()[:4]
        mode, reported = self._built.step, self._reported
        size = len(self._shown)
        steps = [values[i * size : (i + 1) * size] for i in range(count if shown else 0)]
        names = self._names
        return StepResults(
            losses=[float(loss) for loss in losses],
            examples=[int(number) for number in examples],
            tickets=sorted(int(ticket) for ticket in drawn[reported:]),
            reached=int(drawn[0]) if mode.reports_step else None,
            allowed=int(drawn[reported - 1]) if mode.limit else None,
            logged=[dict(zip(names, (v.item() for v in step), strict=False)) for step in steps],
            summaries=[step[-1] for step in steps if len(step) > len(names)],
        )

    def _build(self, count: int, draw: int, shown: bool) -> Any:
        built = self._built
        with built.graph.as_default():
            copies = [self._steps.copy(index) for index in range(count)]
            losses = tf.stack([copy(built.spec.loss) for copy in copies])
            examples = tf.stack([copy(built.examples) for copy in copies])
            tickets = built.step.draw_after(draw, copies[-1]) if draw or self._reported else []
            values = [copy(tensor) for copy in copies for tensor in self._shown] if shown else []
            done = [copy(built.step.train_op) for copy in copies]
        malloc.ask_for_large_pages()
        return [losses, examples, tickets, values, done]


class Pace:
    """How many steps a run takes and how many runs are in flight, from the flags or from measuring the first steps.

    Args:
        config: The job.
        num_workers: How many workers share the steps.
        many_steps: Whether a run may take several steps; not where the input could end in the middle of the run.
        many_runs: Whether several runs may be in flight; without a flag, one worker alone has one, so nothing is stale.
        max_steps: The most steps of a run, if the flags do not give a number.
        most: The most steps that a worker is ever allowed. A measured run has half of them: the others may take as many
            meanwhile, and the next run does not have to wait.

    Attributes:
        steps: Steps of a run.
        runs: Runs in flight at the same time.
    """

    def __init__(
        self,
        config: JobConfig,
        num_workers: int,
        many_steps: bool,
        many_runs: bool,
        max_steps: int = _MAX_STEPS,
        most: int = INT64_MAX,
    ) -> None:
        self._config, self._num_workers, self._most_steps = config, num_workers, max(1, min(max_steps, most // 2))
        self._many_steps, self._many_runs = many_steps, many_runs
        self.steps = min(config.steps_per_run or 1, most) if many_steps else 1
        self.runs = (config.runs_in_flight or 1) if many_runs else 1
        self._secs: list[float] = []
        self._chosen = None not in (config.steps_per_run, config.runs_in_flight)

    def __str__(self) -> str:
        return report.describe_pace(self.in_summary)

    def blocks(self, tickets: Sequence[int]) -> Sequence[TicketBatch]:
        """Return the tickets of the next runs."""
        return [TicketBatch(tickets[at : at + self.steps]) for at in range(0, len(tickets), self.steps)]

    @property
    def in_summary(self) -> RunPace:
        """The pace as the summary has it."""
        return RunPace(self.steps, self.runs)

    def measure(self, secs: float, left: int) -> bool:
        """Add a run's duration, with ``left`` steps to go in the job; return whether the pace has changed."""
        if self._chosen:
            return False
        self._secs.append(secs)
        if len(self._secs) < _WARM_UP + _MEASURED:
            return False
        self._chosen = True
        before = self.steps, self.runs
        fit = _RUN_SECS / statistics.median(self._secs[_WARM_UP:]) * self.steps
        if self._many_steps and self._config.steps_per_run is None:
            self.steps = 2 ** int(math.log2(max(1.0, min(self._most_steps, fit, left / self._num_workers / _WORTH))))
        if self._many_runs and self._config.runs_in_flight is None:
            self.runs = 2 if fit >= 2 and self._num_workers > 1 else 1
        return (self.steps, self.runs) != before
