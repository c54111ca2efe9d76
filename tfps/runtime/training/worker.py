"""A worker builds its graph, meets the other tasks, trains, and signs off. Worker 0 is the chief.

``job_state`` describes what the tasks agree on, and in which order. The chief's further duties are in ``chief``.
"""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ClusterFormError, PeerLostError, RetryableError, StoppedError, StorageError, TfpsError
from tfps.models.loader import Model
from tfps.runtime.checkpoint.directory import ended
from tfps.runtime.checkpoint.ownership import HeldError
from tfps.runtime.coordination import compatibility, job_state
from tfps.runtime.coordination.heartbeat import Heartbeat
from tfps.runtime.coordination.partial_updates import PartialUpdates
from tfps.runtime.coordination.restart_barrier import RestartBarrier
from tfps.runtime.coordination.state_reader import JobStateReader
from tfps.runtime.error_translation import REPLACED, translate_error
from tfps.runtime.graph import builder, layout
from tfps.runtime.process import server, task_log
from tfps.runtime.process import session as sessions
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results.event_file import EventFile
from tfps.runtime.training import summary_writer
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.end import END_DONE, END_EARLY, End
from tfps.runtime.training.other_workers import OtherWorkers
from tfps.runtime.training.peer_monitor import PeerMonitor
from tfps.runtime.training.training_loop import Loop, Progress, Reporter, tell_of_the_end
from tfps.text import brief, count, plural
from tfps.tf_types import Session
from tfps.timeouts import SAVED_WITHIN_SECS, WORKER_GRACE_SECS

_POLL_SECS = 0.02
_SIGN_OFF_SECS = 3.0
_LAST_STEPS_SECS = 1.0
_FIND_EVERY_SECS = 0.5

log = logging.getLogger(__name__)


class Worker:
    """One worker of a cluster. ``work`` trains from start to end; another thread calls the methods that supervise it.

    Attributes:
        is_new_dir: Whether ``--model_dir`` was made for this process, so that it holds no earlier run.
        on_built: Called when the worker's graphs are built, before it meets the other tasks.
        end: How the worker ends.
    """

    def __init__(self, config: JobConfig, cluster: Cluster, task: Task, model: Model, stop: StopRequest) -> None:
        self._config, self._cluster, self._task, self._model, self._stop = config, cluster, task, model, stop
        self.is_new_dir = False
        self.on_built: Callable[[], None] = lambda: None
        self._session: Any = None
        self._chief: Chief | None = None
        self._loop: Loop | None = None
        self._observed: Mapping[str, Any] = {}
        self._joined = self._trained = self._steps_on = self._leaving = False
        self._left = threading.Event()
        self.end = End()

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
            self._build()
            task_log.enable()
            self.on_built()
            if not self._join_cluster():
                return
            loop = self._loop = self._make_loop()
            self._train(loop)
        except tf.errors.OpError as error:
            raise self._explained(error) from error

    def _build(self) -> None:
        """Build the graphs before any connection is opened, so that a mistake in the model is reported early."""
        built = self._built = builder.training(self._config, self._cluster, self._task, self._model)
        with built.graph.as_default():
            self._state = job_state.JobState(self._cluster, self._task.index)
            self._init_tables = tf.tables_initializer()
            self._init_input = tf.group(self._init_tables, built.iterator.initializer)
            self._init_local = tf.local_variables_initializer()  # initial values may come from variables on the PS
            self._partial = PartialUpdates(built.step, self._task.index)
            if self._task.is_chief:
                self._chief = Chief(self._config, self._cluster, self._model, built, self._new_session)
        is_blocking = built.mode.is_blocking
        self._together = RestartBarrier(
            self._state, self._chief, is_blocking, self._wait_until, built.step.updates_ahead
        )
        self._heartbeat = Heartbeat(self._state, lambda: self._loop.progress.beat() if self._loop else None)
        self._enquiry = JobStateReader(
            self._new_session, self._state, built.step.updates_ahead, self._heartbeat.is_heard
        )
        silent_secs = self._heartbeat.silent_secs
        self._watch = PeerMonitor(self._config, self._cluster, self._task, is_blocking, self._enquiry, silent_secs)
        are_gone, fence = self._watch.are_gone, built.step.fence
        self._others = OtherWorkers(self._cluster, self._task, self._state, are_gone, fence)

    def _join_cluster(self) -> bool:
        """Start the server, and wait for the other tasks and the variables' values; return False if the job is over."""
        running = server.start(self._config, self._cluster, self._task)
        patience_secs, over = self._config.patience_secs, lambda: ended(self._config)
        self._session_config, self._target = sessions.config_of(self._task), running.target
        stopping = lambda: self._stop.error  # noqa: E731
        if not rendezvous.wait_for_peers(
            self._cluster, self._task, patience_secs, stopping, over, self._enquiry.was_here
        ):
            return False
        session = self._session = self._new_session()
        self._wait_until(lambda: self._state.is_up(session), patience_secs)
        mine = compatibility.fingerprint(self._config, self._cluster, tf.__version__)
        compatibility.check(mine, self._state.terms(session), self._cluster)
        self._wait_until_found(session)
        again = self._rejoin(session)
        self._heartbeat.use(session)
        session.run(self._init_input)
        if self._chief and again:
            self._chief.go_on(session, self._state.run(session))
        elif self._chief:
            self._chief.check_evaluation(self._target, self._session_config)
            self._state.set_run(session, self._chief.initialize_variables(session))
        if not self._trained:
            self._begin(session)
        told = json.loads(self._state.run(session) or "{}")
        layout.check(self._built.layout, told.get("layout", {}), self._model)
        session.run(self._init_local)
        self._state.write(session, job_state.RUNNING)
        return True

    def _wait_until_found(self, session: Session) -> None:
        """Wait until every PS finds this worker at its host name, which may have moved: each PS looks it up repeatedly.

        Raises:
            ClusterFormError: If some PS does not.
        """
        deadline, told = time.monotonic() + self._config.patience_secs, False
        while not self._state.is_found(session):
            if self._stop.error:
                raise self._stop.error
            name = self._cluster.address(self._task)
            if time.monotonic() > deadline:
                raise ClusterFormError(f"a PS does not reach {self._task} at {name}: what does the name mean there?")
            if not told:
                log.info("waiting until every PS finds this worker at %s", name)
                told = True
            time.sleep(_FIND_EVERY_SECS)

    def _begin(self, session: Session) -> None:
        """Start together with the other workers."""
        self._heartbeat.use(session)
        self._together.begin(session)
        self._trained = self._together.over
        self._partial.tell(session)
        session.run(self._built.step.worker_init)

    def _new_session(self) -> Any:
        return sessions.Session(self._target, graph=self._built.graph, config=self._session_config)

    def _rejoin(self, session: Session) -> bool:
        """Join the PS; return whether the job continues in which this task took part before.

        Raises:
            PeerLostError: If the job has to restart; the PS that were part of it are asked to exit.
            ConfigError: If the PS hold another run.
        """
        marked = self._state.marked(session)  # by PS, whether this worker joined it before
        if any(marked) and not all(marked):
            self._state.abort_job(session, marked)
            raise PeerLostError("this task was started again: the job begins anew from its last checkpoint.")
        again = all(marked) and self._state.is_ready(session)
        if again and self._chief:
            first = Task("ps", 0)
            there = f"{first} ({self._cluster.address(first)})"
            compatibility.check_run(
                None if self.is_new_dir else self._config.model_dir, self._state.run(session), there
            )
        self._state.join(session)
        self._joined = True
        if again:
            self._heartbeat.before = self._state.beats(session)()[self._task.index]
        if again and self._together.is_blocking:
            self._request_restart(session)
        return again

    def _request_restart(self, session: Session) -> None:
        """Ask the others to restart, unless they are done: they wait for what this worker held when it was lost."""
        self._trained = self._others.are_done(session)  # then only the chief's last duties are left
        if not self._trained:
            self._state.write(session, job_state.RUNNING)
            self._state.request_restart(session)

    def _make_loop(self) -> Loop:
        chief = self._chief
        events = EventFile(self._config.model_dir) if chief else None
        reporter = Reporter(self._config, events, self._cluster.num_workers)
        between = (lambda: chief.save_if_due(self._session)) if chief else (lambda: None)
        return Loop(self._session, self._built, self._config, reporter, self._stop, between)

    def _train(self, loop: Loop) -> None:
        workers = plural(self._cluster.num_workers, "worker")
        log.info("training: mode %s, %s, %d ps", self._config.mode, workers, self._cluster.num_ps)
        self._together.listen()
        try:
            while not self._train_until_done(loop):
                pass
        except StoppedError:
            self._sign_off_early(loop)
            raise
        log.info("done: %s steps of this worker", count(loop.progress.steps))

    def _train_until_done(self, loop: Loop) -> bool:
        """Train to the end and sign off; return False if another worker's restart request interrupted that."""
        try:
            if self._together.interrupted:
                self._restart(loop)
            if not self._trained:
                self._steps_on = True
                loop.run()
                self._steps_on = False
                self._take_what_is_left(loop)
            self._partial.tell(self._session)
            write_summary = self._finish_job(self._chief, loop) if self._chief else lambda: None
            with self.end.of_work(self._stop):
                write_summary()
                self._sign_off(job_state.DONE, loop)
        except (tf.errors.OpError, RuntimeError):  # RuntimeError: the session was closed
            if not self._together.interrupted:
                raise
            return False
        return True

    def _take_what_is_left(self, loop: Loop) -> None:
        """Stay until ``max_steps`` is reached; take the steps that other workers drew a ticket for and did not take.

        Those workers are lost, or their input has ended. One worker takes the steps when no other one is at work.
        """
        while self._built.step.any_worker_can_finish and not loop.progress.input_ended:
            self._sign_off(job_state.IDLE, loop)
            self._wait_until(lambda: self._step() >= self._config.max_steps or self._others.let_this_one(self._session))
            if (step := self._step()) >= self._config.max_steps:  # updates on their way have arrived, or never will
                return
            self._steps_on = True
            loop.take(step)
            self._steps_on = False

    def _step(self) -> int:
        return int(self._session.run(self._built.global_step))

    def _restart(self, loop: Loop) -> None:
        self._session = self._new_session()
        self._session.run(self._init_tables)  # the tables ended with the earlier session
        self._begin(self._session)
        loop.resume(self._session)

    def _sign_off(self, phase: int, loop: Loop) -> None:
        done, before = loop.progress, self._heartbeat.before
        tally = job_state.Tally(before.steps + done.steps, done.skipped, before.secs + done.seconds, done.batch_size)
        self._state.write(self._session, phase, tally)

    def _finish_job(self, chief: Chief, loop: Loop) -> Callable[[], None]:
        """Wait for the others, then save and evaluate; return the function that writes the summary."""
        if self._built.step.any_worker_can_finish and loop.progress.input_ended:
            self._sign_off(job_state.EXHAUSTED, loop)
        self._wait_until(lambda: self._others.are_through(self._session))
        if (step := self._step()) > loop.progress.global_step:
            loop.progress.last_step = time.monotonic()  # other workers took the last steps
        if step < self._config.max_steps:
            tell_of_the_end(self._config, step, chief.resumed_from_step)
        loop.progress.global_step, metrics = chief.complete(self._session, self._target, self._session_config)
        before = self._heartbeat.before
        own = before.steps + loop.progress.steps
        steps = chief.steps_taken(self._session) or [own, *self._state.steps(self._session)[1:]]
        idle = [task for task in self._others.tasks if not steps[task.index]]
        if idle and step > chief.resumed_from_step:
            log.info("%s took no step: their share of the input was not used", ", ".join(map(str, idle)))
        told = summary_writer.observations(self._session, self._state, chief, loop, self._together.stragglers, before)
        taken, told = dict(enumerate(steps)), told | {"eval": metrics}
        return lambda: summary_writer.write(self._config, self._cluster, loop, chief, taken, told)

    def _wait_until(self, condition: Callable[[], bool], most_secs: float = math.inf) -> None:
        deadline = time.monotonic() + most_secs
        while not condition():
            if self._stop.error:
                raise self._stop.error
            if time.monotonic() > deadline:
                raise ClusterFormError(
                    f"a PS is there but has not set up the job's state in {most_secs:g} s: is it of another release? "
                    "Start every task with the same version of tfps."
                )
            time.sleep(_POLL_SECS)

    def _sign_off_early(self, loop: Loop) -> None:
        """Save, and sign off as stopped on the PS, unless an end has started already, or the worker is done."""
        if not self.end.take(END_EARLY):
            return
        self._leaving = True
        try:
            if self._chief:
                self._let_others_stop()
                if not self._chief.settle_update(self._session):
                    raise PeerLostError("an update is under way and cannot be ended")
                loop.progress.global_step = self._chief.save(self._session)
                self._observed = {"partial_updates": self._chief.partial_updates(self._session)}
            self._sign_off(job_state.STOPPED, loop)
        except (tf.errors.OpError, TfpsError, RuntimeError) as error:
            log.info("the state could not be saved: %s", brief(error))
        finally:
            self._left.set()

    def _let_others_stop(self) -> None:
        """Wait briefly for the others' last steps, in case they have to stop too, so that these are saved."""
        deadline = time.monotonic() + _LAST_STEPS_SECS
        while self._others.any_trains(self._session) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)

    def _sign_off_failed(self, error: TfpsError) -> None:
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            steps = self._loop.progress.steps if self._loop else 0
            self._state.write(self._session, -error.exit_code, job_state.Tally(steps))

    def _explained(self, error: Any) -> TfpsError:
        size = self._config.batch_size
        return self._stop.error or translate_error(error, self._cluster, self._model, self._built.graph, size)

    # The methods below are called from the main thread.

    def watch(self) -> TfpsError | None:
        """Return an error if a task that this one depends on is lost, or if background work has failed."""
        if self._chief and self._chief.owner.error:
            return self._chief.owner.error
        if self._chief and self._chief.updates and self._chief.updates.error and not self._together.interrupted:
            return self._explained(self._chief.updates.error)
        if self._session is None:
            return None  # the other tasks may still be starting
        if self._heartbeat.forgotten:
            return PeerLostError(REPLACED)
        return self._watch.error(self._loop.progress if self._loop else None, self._steps_on)

    def grace_secs(self) -> float:
        """Return how long to wait for a step that may never end (a few times its usual length), or for the save."""
        if self._leaving:
            return SAVED_WITHIN_SECS
        progress = self._loop.progress if self._loop else Progress()
        if not self._loop or not progress.steps:
            return WORKER_GRACE_SECS
        run_secs = progress.seconds / progress.steps * self._loop.pace.steps
        return min(1.0 + 3 * run_secs, WORKER_GRACE_SECS)

    def emergency_save(self) -> None:
        """Save and sign off in the remaining time while the training thread is blocked, or let that thread sign off."""
        left_secs, is_stop = SAVED_WITHIN_SECS - self._stop.waited_secs, isinstance(self._stop.error, StoppedError)
        if self.end.is_done_within(left_secs) or self._loop is None or not is_stop:
            return
        if not self._leaving:
            threading.Thread(target=self._sign_off_early, args=(self._loop,), daemon=True).start()
        if not self._left.wait(SAVED_WITHIN_SECS - self._stop.waited_secs) and self._chief:
            newest = self._chief.checkpoint or "none"
            log.info("no time is left to save: the last steps are lost; the newest checkpoint: %s", newest)

    def fail(self, error: TfpsError) -> None:
        """Report a permanent failure of this task to the PS; on the chief, write the job's summary."""
        if not self.end.take(END_EARLY) and self.end.kind == END_DONE:
            return  # the work is signing off: then the PS exit, and the summary reports the same
        if not isinstance(error, RetryableError) and self._joined:
            thread = threading.Thread(target=self._sign_off_failed, args=(error,), daemon=True)
            thread.start()
            thread.join(_SIGN_OFF_SECS)
        if self._task.is_chief and not (isinstance(error, HeldError) or (self._chief and self._chief.owner.error)):
            steps = self._loop.progress.steps if self._loop else 0
            with contextlib.suppress(StorageError):  # the task exits with the original error
                told = self._config, self._cluster, self._loop, self._chief, {0: steps}, self._observed
                summary_writer.write(*told, error=error)

    def leave(self) -> None:
        """Release what this task holds, however it ends."""
        if self._chief:
            self._chief.owner.release()
