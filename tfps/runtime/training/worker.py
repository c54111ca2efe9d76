"""A worker builds its graph, meets the other tasks, trains, and signs off. Worker 0 is the chief.

``worker_state`` draws the states of a worker, and ``job_state`` what the tasks agree on. ``joining`` describes how a
worker joins the job, and ``early_end`` how it stops before the end. The chief's further duties are in ``chief``.
"""

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import PeerLostError, RetryableError, TfpsError
from tfps.models.model import Model
from tfps.modes import registry
from tfps.runtime.checkpoint.ownership import HeldError
from tfps.runtime.coordination.job_state import Phase, WorkerTotals
from tfps.runtime.coordination.stall_detector import StallDetector
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.error_translation import REPLACED, translate_error
from tfps.runtime.graph.towers import devices
from tfps.runtime.process import task_log
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results.event_file import EventFile
from tfps.runtime.training import joining, summary_writer, worker_parts
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.early_end import EarlyEnd
from tfps.runtime.training.joining import Joining
from tfps.runtime.training.steps.reporter import Reporter
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker_parts import WorkerParts
from tfps.runtime.training.worker_progress import Progress
from tfps.runtime.training.worker_state import LifeCycle, WorkerState
from tfps.storage import JobDirectory
from tfps.text import plural
from tfps.timeouts import SAVED_WITHIN_SECS, WORKER_GRACE_SECS

_SIGN_OFF_SECS = 3.0

log = logging.getLogger(__name__)


class Worker:
    """One worker of a cluster. ``work`` trains from start to end; another thread calls the methods that supervise it.

    Attributes:
        is_new_dir: Whether ``--model_dir`` was made for this process, so that it holds no earlier run.
        on_built: Called when the worker's graphs are built, before it meets the other tasks.
        life: The worker's state.
        parts: The worker's parts, once its graphs are built.
    """

    def __init__(self, config: JobConfig, cluster: Cluster, task: Task, model: Model, stop: StopRequest) -> None:
        self._config = config
        self._cluster = cluster
        self._model = model
        self._stop = stop
        self.task = task
        self.is_new_dir = False
        self.on_built: Callable[[], None] = lambda: None
        self.life = LifeCycle()
        self.parts: WorkerParts | None = None
        self._loop: Loop | None = None
        self._steps = 0
        self._early_end: EarlyEnd | None = None
        self._build = StallDetector(math.inf, "training graph yet")  # a first download, say, may take any time

    def work(self) -> None:
        """Train until the job is done.

        Raises:
            ModelError: If the model is wrong.
            ConfigError: If another task was started with other options.
            ClusterFormError: If some task never started.
            PeerLostError: If a PS is lost.
            DivergedError: If the loss or a gradient became NaN or Inf.
            CheckpointError: If the newest checkpoint cannot be used.
            StorageError: If the last checkpoint cannot be written.
            StoppedError: If the task is asked to stop; the state is saved if that is possible.
        """
        try:
            parts = worker_parts.build(self._config, self._cluster, self.task, self._model, self._stop, self._heartbeat)
            self.parts = parts
            task_log.enable()
            self.on_built()
            if Joining(parts, self._stop, self.life, self.is_new_dir).join():
                self._train(parts)
                parts.connection.serve_others()
        except tf.errors.OpError as error:
            raise self._explained(error) from error

    def _heartbeat(self) -> WorkerPace | None:
        return self._loop.progress.beat() if self._loop else None

    def _train(self, parts: WorkerParts) -> None:
        loop = self._make_loop(parts)
        early_end = EarlyEnd(parts, loop, self._stop, self.life)
        self._loop = loop
        self._early_end = early_end
        workers, here = plural(self._cluster.num_workers, "worker"), devices.described(self._config)
        mode, rounds = registry.described(self._config), parts.built.rounds
        here += f", rounds of {plural(rounds.steps[self.task.index], 'step')}" if rounds else ""
        log.info("training: mode %s, %s, %d ps%s", mode, workers, self._cluster.num_ps, here)
        parts.barrier.listen()
        try:
            while not self._train_until_done(parts, loop):
                pass
        except TfpsError as error:
            if early_end.is_due(error):
                early_end.sign_off(error)
            raise
        log.info("done: %s of this worker", plural(self._steps, "step"))

    def _make_loop(self, parts: WorkerParts) -> Loop:
        chief, connection, model_dir = parts.chief, parts.connection, self._config.model_dir
        events = EventFile(JobDirectory(model_dir).training_events if model_dir else None) if chief else None
        if events:
            events.start(parts.global_step())
        reporter = Reporter(self._config, events, self._cluster.num_workers)
        between = (lambda: chief.save_if_due(connection.session)) if chief else (lambda: None)
        return Loop(connection.session, parts.built, self._config, reporter, self._stop, between)

    def _train_until_done(self, parts: WorkerParts, loop: Loop) -> bool:
        """Train to the end and sign off; return ``False`` if another worker's restart request interrupted that."""
        try:
            if parts.barrier.interrupted:
                self._restart(parts, loop)
            if not parts.barrier.over:
                self._take_steps(loop.run)
                joining.await_end(parts, loop)
                parts.leave()
                self._take_remaining_steps(parts, loop)
            parts.partial.report(parts.connection.session)
            self._steps = parts.own_steps(loop.progress)
            write_summary = self._finish_job(parts, parts.chief, loop) if parts.chief else lambda: None
            with self.life.signing_off(self._stop):
                write_summary()
                parts.write_phase(Phase.DONE, loop.progress)
        except (tf.errors.OpError, RuntimeError) as error:  # RuntimeError: the session was closed
            if not joining.outlives(parts, loop, self._stop, error):
                raise
            return False
        return True

    def _restart(self, parts: WorkerParts, loop: Loop) -> None:
        session = parts.connection.open()
        session.run(parts.init.tables)  # the tables ended with the earlier session
        joining.begin(parts, session)
        loop.resume(session)

    def _take_steps(self, take: Callable[[], None]) -> None:
        self.life.enter(WorkerState.TRAINING)
        take()
        self.life.enter(WorkerState.FINISHING)

    def _take_remaining_steps(self, parts: WorkerParts, loop: Loop) -> None:
        """Stay until ``max_steps`` is reached; take the steps that other workers drew a ticket for and did not take.

        Those workers are lost, or their input has ended. One worker takes the steps when no other one is at work.
        """
        max_steps = self._config.max_steps
        while parts.built.step.any_worker_can_finish and not loop.progress.input_ended:
            parts.write_phase(Phase.IDLE, loop.progress)
            loop.wait_until(
                lambda: parts.global_step() >= max_steps or parts.others.let_this_one(parts.connection.session)
            )
            step = parts.global_step()
            if step >= max_steps:  # updates on their way have arrived, or never will
                return
            parts.write_phase(Phase.RUNNING, loop.progress)  # a worker that comes back now waits for this step
            parts.rejoin()  # before it reads the step: it does not have to wait between that and taking it
            if parts.others.let_this_one(parts.connection.session) and (step := parts.global_step()) < max_steps:
                self._take_steps(functools.partial(loop.take, step))
            parts.leave()

    def _finish_job(self, parts: WorkerParts, chief: Chief, loop: Loop) -> Callable[[], None]:
        """Wait for the others, then save and evaluate; return the function that writes the summary."""
        session = parts.connection.session
        self._wait_for_others(parts, loop)
        step = parts.global_step()
        if step < self._config.max_steps:
            chief.report_end_of_input(step)
        loop.progress.global_step, metrics = chief.complete(session)
        steps = chief.steps_taken(session) or parts.steps_of_workers(chief.resumed_from_step, loop.progress)
        if step > chief.resumed_from_step:
            why_idle = functools.partial(parts.built.mode.why_idle, self._config, self._cluster.num_workers)
            parts.others.report_idle(steps, why_idle)
        totals = parts.totals_of_workers(loop.progress)
        observed = summary_writer.observations(session, totals, chief, parts.barrier.stragglers)
        observed = replace(observed, metrics=metrics)
        by_worker = dict(enumerate(steps))
        return lambda: summary_writer.write(self._config, self._cluster, loop, chief, by_worker, observed)

    def _wait_for_others(self, parts: WorkerParts, loop: Loop) -> None:
        """Wait until no other worker trains, and none that comes back will."""
        session, can_finish = parts.connection.session, parts.built.step.any_worker_can_finish
        if parts.has_trained_all(loop.progress):
            parts.write_phase(Phase.EXHAUSTED, loop.progress)

        def are_through() -> bool:
            return parts.others.are_through(session, can_finish and not parts.is_at_end())

        loop.wait_until(are_through)
        while can_finish:
            parts.write_phase(Phase.FINISHING, loop.progress)
            if are_through():
                break
            parts.write_phase(Phase.EXHAUSTED, loop.progress)  # one has come back just before
            loop.wait_until(are_through)
        left = parts.others.not_done(session) if can_finish else []
        if left and not parts.is_at_end():
            log.info("the job ends without %s: gone, and not replaced", ", ".join(map(str, left)))

    def _explained(self, error: Exception) -> TfpsError:
        graph = self.parts.built.graph if self.parts else None
        size = self._config.batch_size
        return self._stop.error or translate_error(error, self._cluster, self._model, graph, size)

    # The methods below are called from the main thread.

    def watch(self) -> TfpsError | None:
        """Return an error if a task that this one depends on is lost, or the work stalls, or work apart has failed."""
        parts = self.parts
        if parts is None:
            return self._build.error(0, None)
        if parts.chief and (error := self._error_of_chief(parts, parts.chief)):
            return error
        if parts.connection.session is None:
            return None  # the other tasks may still be starting
        if parts.heartbeat.forgotten:
            return PeerLostError(REPLACED)
        progress, is_training = self._loop.progress if self._loop else None, self.life.state is WorkerState.TRAINING
        if is_training:
            parts.eviction.act()
        return parts.monitor.error(progress, is_training, is_training or parts.barrier.is_waiting)

    def _error_of_chief(self, parts: WorkerParts, chief: Chief) -> TfpsError | None:
        chief.report_slow_save()
        if error := chief.owner.error or parts.connection.error:
            return error
        if chief.updates and chief.updates.error and not parts.barrier.interrupted:
            return self._explained(chief.updates.error)
        return chief.evaluation.error()

    def grace_secs(self) -> float:
        """Return how long to wait for a step that may never end (a few times its usual length), or for the save."""
        if self.life.state is WorkerState.STOPPING:
            return SAVED_WITHIN_SECS
        progress = self._loop.progress if self._loop else Progress()
        if not self._loop or not progress.steps:
            return WORKER_GRACE_SECS
        run_secs = progress.seconds / progress.steps * self._loop.pace.steps
        return min(1.0 + 3 * run_secs, WORKER_GRACE_SECS)

    def emergency_save(self) -> None:
        """Save and sign off in the remaining time while the training thread is blocked, or let that thread sign off."""
        if self._early_end:
            self._early_end.sign_off_in_time()

    def fail(self, error: TfpsError) -> None:
        """Report a permanent failure of this task to the PS; on the chief, write the job's summary."""
        if not self.life.begin_end(WorkerState.STOPPING) and self.life.state is not WorkerState.STOPPING:
            return  # the work is signing off: then the PS exit, and the summary reports the same
        if not isinstance(error, RetryableError) and self.life.has_joined:
            thread = threading.Thread(target=self._write_failure, args=(error,), daemon=True)
            thread.start()
            thread.join(_SIGN_OFF_SECS)
        if self.task.is_chief and not isinstance(error, HeldError):
            chief = self.parts.chief if self.parts else None
            with contextlib.suppress(TfpsError):  # another chief has the directory; the task exits with its own error
                if chief:
                    chief.owner.check()
                self._write_summary(chief, error)

    def _write_failure(self, error: TfpsError) -> None:
        progress = self._loop.progress if self._loop else Progress()
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            if self.parts:
                self.parts.write_phase(-error.exit_code, progress)

    def _write_summary(self, chief: Chief | None, error: TfpsError) -> None:
        """Write the summary of a job that failed or was stopped."""
        progress, early_end = self._loop.progress if self._loop else Progress(), self._early_end
        totals = [self.parts.totals(progress) if self.parts else WorkerTotals()]
        steps = dict(enumerate((early_end and early_end.steps) or [totals[0].steps]))
        observed = summary_writer.counts((early_end and early_end.totals) or totals)
        observed = replace(observed, partial_updates=early_end.partial_updates if early_end else None)
        summary_writer.write(self._config, self._cluster, self._loop, chief, steps, observed, error=error)

    def leave(self) -> None:
        """Release what this task holds, however it ends; one that is stopped first lets the others end."""
        if self.parts and self.parts.chief:
            self.parts.connection.end_in_time(self._stop)
            self.parts.chief.owner.release()
