"""The training loop of one worker: take steps, report them, and save now and then.

The loop does not depend on the mode. ``tfps.modes.base`` describes the tickets that steps are taken for, and
``step_runner`` decides how many steps a run takes. Every step keeps its guarantees (it ends at ``max_steps``, is
reported, and has input), however many steps a run takes.
"""

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from tfps.config.converters import INT64_MAX
from tfps.config.job_config import JobConfig
from tfps.runtime.coordination.allowance import Allowance
from tfps.runtime.graph import cancel_safe_iterator
from tfps.runtime.graph.builder import TrainGraph
from tfps.runtime.graph.passes.nan_guard import NonFiniteValue, find_non_finite
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.process.thread_pool import ThreadPool, at_once
from tfps.runtime.training.steps.input import Input
from tfps.runtime.training.steps.non_finite import NonFiniteSteps
from tfps.runtime.training.steps.reporter import Reporter
from tfps.runtime.training.steps.step_runner import InFlightRun, Pace, StepResults, StepRunner, TicketBatch
from tfps.runtime.training.worker_progress import Progress
from tfps.tf_types import Session

log = logging.getLogger(__name__)


class Loop:
    """Take the steps of one worker.

    Args:
        session: Session on this worker's server.
        built: Its training graph.
        config: The job.
        reporter: Reports each step that is due.
        stop: Checked between runs.
        between_runs: Called after every run, and while the worker waits for others; the chief saves in it.

    Attributes:
        progress: The worker's progress.
        pace: How many steps a run takes, and how many runs are in flight.
    """

    def __init__(
        self,
        session: Session,
        built: TrainGraph,
        config: JobConfig,
        reporter: Reporter,
        stop: StopRequest,
        between_runs: Callable[[], None],
    ) -> None:
        self._reporter, self._stop, self._between_runs, self._max_steps = reporter, stop, between_runs, config.max_steps
        self._runs = StepRunner(session, built)
        self._input = Input(session, built)
        self._allowance = Allowance(session, built.step.limit) if built.step.limit else None
        self._in_flight: Sequence[int] = []
        self._workers = built.num_workers if built.step.reports_step else 0
        self._ahead = 0  # by how much tickets are ahead of steps
        self._pool: ThreadPool[StepResults] = ThreadPool("work")
        self._non_finite = NonFiniteSteps(config, built.remedy, lambda: self._runs.global_step() > 0)
        many = self._input.size_is_known and self._runs.can_be_long and not self._non_finite.may_skip
        most = self._allowance.most if self._allowance else INT64_MAX
        self.pace = Pace(config, built.num_workers, many, self._runs.can_overlap, self._runs.max_steps, most)
        self.progress = Progress()
        self._runs.log_limits(config, self._input.size_is_known, most)

    def resume(self, session: Session) -> None:
        """Continue in another session; the run in flight in the earlier one was interrupted."""
        self._runs.use(session)
        if self._allowance:
            self._allowance.use(session)
        self._drop_round()
        self.progress.go_on_from(self._runs.global_step())
        self.progress.steps += sum(ticket < self.progress.global_step for ticket in self._in_flight)
        self._in_flight = []

    def _drop_round(self) -> None:
        """Count the steps of a round no more that has not ended, and does not."""
        if self._allowance and self._allowance.ends_rounds:
            self.progress.take_back(self._runs.global_step())
            self._in_flight = []

    def run(self) -> None:
        """Take steps until the tickets reach ``max_steps`` or the input ends.

        Raises:
            DivergedError: If the loss or a gradient is NaN or Inf, and may not be skipped.
            TfpsError: The reason to stop, if there is one.
        """
        pending = deque(self.pace.blocks(self._runs.draw(self.pace.steps * self.pace.runs)))
        if pending[0].tickets[0] >= self._max_steps and not self.progress.steps:
            log.info("nothing to train: --max_steps=%d is reached; raise it to continue", self._max_steps)
        in_flight: deque[InFlightRun] = deque()
        while pending or in_flight:
            if self._stop.error:
                pending.clear()
            while pending and len(in_flight) < self.pace.runs:
                in_flight.extend(self._start(pending))
            if in_flight:
                pending.extend(self._finish(in_flight.popleft(), self._stop.error is None))
        if self._allowance and self._allowance.ends_rounds and not self._stop.error:
            self._wait_for_allowance(TicketBatch([]))  # which ends the last round
        if self._stop.error:
            raise self._stop.error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, between two runs: the others may train for long, so the chief goes on saving.

        Raises:
            TfpsError: The reason to stop, if there is one.
        """

        def holds() -> bool:
            if not (is_so := condition()):
                self._between_runs()
            return is_so

        self._stop.wait_until(holds)

    def take(self, ticket: int) -> None:
        """Take a step, for a ticket that another worker drew, or rounds; raise the reason to stop, if there is one."""
        if self._allowance:
            self._allowance.set(None)  # this worker had left
        if self._allowance and self._allowance.ends_rounds:
            self.run()
        elif self._stop.error:
            raise self._stop.error
        else:
            for run in self._start(deque([TicketBatch([ticket], last=True)])):
                self._finish(run)

    def _start(self, pending: "deque[TicketBatch]") -> Sequence[InFlightRun]:
        """Start a run for the first block in hand or a part of it; return no run if the tickets are used up."""
        block = pending.popleft()
        usable = [ticket for ticket in block.tickets if ticket < self._max_steps]
        if not usable or not self._is_fed(len(usable)):
            return []
        last = len(usable) < len(block.tickets)
        if last or (len(usable) > 1 and not self._input.has(len(usable))):
            block, *rest = block.apart(len(usable))
            pending.extendleft(reversed(rest))
        if not (block := self._allowed_part(block, pending)).tickets:
            return []
        self._input.take(len(block.tickets))
        self._in_flight = block.tickets
        draw = 1 if block.last else self.pace.steps if block.draw_next else 0  # 1: that graph exists already
        act = functools.partial(self._runs.take, len(block.tickets), draw, self._is_to_show(block.tickets))
        return [InFlightRun(block, act, self._pool.submit if self.pace.runs > 1 else at_once)]

    def _is_fed(self, wanted: int) -> bool:
        """Return whether there is a batch for a step; wait for one if another worker may leave some."""
        is_fed, progress = self._input.fill(wanted, self._goes_on_waiting), self.progress
        if progress.is_waiting and self._allowance:
            self._allowance.set(None)  # the others did not wait for this worker
        progress.is_waiting, progress.input_ended = False, progress.input_ended or not (is_fed or self._stop.error)
        return is_fed

    def _allowed_part(self, block: TicketBatch, pending: "deque[TicketBatch]") -> TicketBatch:
        """Return as much of a block as is allowed now, and put the rest back. Wait until at least one step is allowed.

        Return a block without tickets if this worker is asked to stop before, or tickets in hand are void.
        """
        if self._allowance is None:
            return block
        allowed = self._wait_for_allowance(block)
        if not allowed:
            return TicketBatch([])
        if self._allowance.has_ended_round:
            pending.clear()
            pending.extend(self.pace.blocks(self._runs.draw(self.pace.steps)))
            return TicketBatch([])
        count = self._allowance.part(len(block.tickets), self.pace.steps)
        if count == len(block.tickets):
            return block
        pending.appendleft(TicketBatch(block.tickets[count:], block.draw_next, block.last))
        return TicketBatch(block.tickets[:count], draw_next=False)

    def _wait_for_allowance(self, block: TicketBatch) -> int:
        """Return how many steps are allowed; 0 if this worker takes none any more."""
        if self._allowance is None or self.progress.input_ended:
            return 0
        try:
            return self._allowance.wait(self._goes_on_waiting)
        except tf.errors.OpError as error:
            if found := find_non_finite(error):
                raise self._non_finite.error(found, self.progress.global_step) from None
            if not cancel_safe_iterator.is_end(error):
                raise
            self._end_of_input(block, of_another=True)
            return 0
        finally:
            self.progress.is_waiting = False

    def _goes_on_waiting(self) -> bool:
        """Do between two waits what is done between two runs; return whether to wait on."""
        self.progress.is_waiting = True
        self._between_runs()
        return self._stop.error is None

    def _is_to_show(self, tickets: Sequence[int]) -> bool:
        """Return whether a run should return the values to report, as far as its tickets predict its steps.

        In async, tickets run ahead of the steps. So any of the last runs may make the last step.
        """
        if self._reporter.reports_all:
            return True
        steps = [ticket + 1 - self._ahead for ticket in (tickets[0], tickets[-1])]
        pending = self._workers * self.pace.steps * self.pace.runs
        return any(map(self._reporter.due, steps)) or tickets[-1] + 1 + pending >= self._max_steps

    def _finish(self, run: InFlightRun, continues: bool = True) -> Sequence[TicketBatch]:
        """Process what a run returned; return blocks of further tickets."""
        if self._allowance:
            self._allowance.set(None)
            self.progress.waited_secs = self._allowance.waited_secs
        try:
            taken = run.result()
        except tf.errors.OpError as error:
            if found := find_non_finite(error):
                return self._skip(run.block, found)
            if not cancel_safe_iterator.is_end(error):
                raise
            self._end_of_input(run.block, cancel_safe_iterator.is_of_another(error))
            return []
        finally:
            self._input.note_end()
        self._in_flight = []
        self._non_finite.note_step()
        if self._allowance:
            self._allowance.set(taken.allowed)
        count = len(run.block.tickets)
        if taken.reached is not None:
            self._ahead = max(0, run.block.tickets[-1] + 1 - taken.reached)
        for index, ticket in enumerate(run.block.tickets):
            step = ticket + 1 if taken.reached is None else taken.reached - count + index + 1
            self._note(step, index, taken, run.began + (index + 1) / count * (run.ended - run.began))
        self._between_runs()
        if not run.block.draw_next or run.block.last:
            return []
        return self.pace.blocks(self._renewed(run, taken.tickets) if continues else taken.tickets)

    def _renewed(self, run: InFlightRun, tickets: Sequence[int]) -> Sequence[int]:
        """Return a run's next tickets, and additional ones if the pace has changed and more are in hand from now on."""
        others = self.pace.runs - 1
        if not self.pace.measure(run.ended - run.began, self._max_steps - run.block.tickets[-1]):
            return tickets
        log.info("pace: %s", self.pace)
        missing = self.pace.steps * (self.pace.runs - others) - len(tickets)
        return [*tickets, *self._runs.draw(missing, pending=len(tickets))]

    def _note(self, step: int, index: int, taken: StepResults, ended: float) -> None:
        """Count one step of a run, and report it if that is due."""
        loss, progress = taken.losses[index], self.progress
        progress.count(step, loss, taken.examples[index], ended)
        if (taken.logged or step >= self._max_steps) and self._reporter.due(step, ended):
            summary = taken.summaries[index] if taken.summaries else None
            logged = taken.logged[index] if taken.logged else {}
            self._reporter.report(step, progress, {**logged, "loss": loss}, summary, ended)

    def _skip(self, block: TicketBatch, found: NonFiniteValue) -> Sequence[TicketBatch]:
        """Return a block to run again with the next batch, because a value was not finite and not applied; or raise.

        If others take steps without this worker, it is for the step that the job has come to meanwhile.
        """
        self._in_flight = []
        step = block.tickets[found.index] + 1
        self.progress.steps += found.index  # the run took the steps before this one
        self.progress.global_step = max(self.progress.global_step, step - 1)
        self._non_finite.skip(found, step, self.progress)
        return self.pace.blocks(self._runs.draw(1)) if self._runs.skips_steps else [block]

    def _end_of_input(self, block: TicketBatch, of_another: bool) -> None:
        """Log that the input has ended, and give the tickets back."""
        self._in_flight = []
        if not self.progress.input_ended:
            log.info("%s has ended", "another worker's input" if of_another else "the input")
        self.progress.input_ended = True
        if len(block.tickets) > 1 and not of_another:
            what = "the input ended in a run of %d steps, though TensorFlow says that it has no end"
            log.warning(
                f"{what}: some of its last batches were not used. --steps_per_run=1 uses all", len(block.tickets)
            )
        in_rounds = self._allowance is not None and self._allowance.ends_rounds
        if not (in_rounds and of_another):  # that worker has ended the last round
            with contextlib.suppress(tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.OutOfRangeError):
                self._runs.give_back(len(block.tickets))
        if in_rounds:
            self._drop_round()
        elif not self._workers and (len(block.tickets) > 1 or of_another):  # the first steps of the run may be applied
            self.progress.global_step = self._runs.global_step()
            if applied := sum(ticket < self.progress.global_step for ticket in block.tickets):
                self.progress.steps, self.progress.last_step = self.progress.steps + applied, time.monotonic()
