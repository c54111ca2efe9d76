"""Join a job: reach the other tasks, agree with them, and get the variables' values.

In a job without PS, the chief is in the place of the only PS (``parameter_server.StateOfChief``)::

    all workers   start the server -> wait for the other tasks -> does this worker run elsewhere?
                  -> same options as the PS? -> join every PS
    chief         first values, or a checkpoint's
    all workers   wait for each other -> train

A run that calls another worker's server fails if that one is lost. ``outlives`` then waits for the restart of all.

``job_state`` describes what happens where a worker has joined before, because it was started again.
"""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import rendezvous
from tfps.config.launch_protocol import STARTED_AGAIN
from tfps.errors import ClusterFormError, PeerLostError
from tfps.modes.worker_queues import STALE
from tfps.runtime.checkpoint.job_end import has_ended
from tfps.runtime.checkpoint.ownership import check_launch
from tfps.runtime.coordination import compatibility, duplicate_worker
from tfps.runtime.coordination.heartbeat import FORGOTTEN
from tfps.runtime.coordination.job_state import Phase
from tfps.runtime.graph import layout
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.process import server
from tfps.runtime.process import session as sessions
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.training.parameter_server import StateOfChief
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker_parts import WorkerParts
from tfps.runtime.training.worker_progress import Progress
from tfps.runtime.training.worker_state import LifeCycle, WorkerState
from tfps.storage import JobDirectory
from tfps.text import brief
from tfps.tf_types import Session

_FIND_EVERY_SECS = 0.5
_REPLACED_WITHIN_SECS = 10.0  # an update of the chief ends within this time: a restart would interrupt it
_REJOINED_WITHIN_SECS = 3.0  # a process that has replaced a lost one requests a restart when it joins
_OF_A_LOST_WORKER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)

log = logging.getLogger(__name__)


class Joining:
    """How one worker joins its job.

    Args:
        parts: The worker's parts.
        stop: The request to end early.
        life: The worker's state.
        is_new_dir: Whether ``--model_dir`` was made for this process, so that it holds no earlier run.
    """

    def __init__(self, parts: WorkerParts, stop: StopRequest, life: LifeCycle, is_new_dir: bool) -> None:
        self._config = parts.config
        self._cluster = parts.cluster
        self._task = parts.task
        self._parts = parts
        self._stop = stop
        self._life = life
        self._is_new_dir = is_new_dir
        self._state = parts.state
        self._barrier = parts.barrier

    def join(self) -> bool:
        """Join; return ``False`` if the job is over.

        Raises:
            ClusterFormError: If some task never started.
            ConfigError: If another task was started with other options, or the PS hold another run, or another process
            runs as this worker.
            PeerLostError: If the job has to restart; the PS that were part of it are asked to exit.
        """
        self._life.enter(WorkerState.CONNECTING)
        if not self._reach_others():
            return False
        if self._parts.connection.held is None:
            duplicate_worker.check(self._config, self._cluster, self._task)
        session = self._parts.connection.open()
        self._check_options(session)
        self._wait_until_found(session)
        is_again = self._join_ps(session)
        self._parts.send_heartbeats(session)
        session.run(self._parts.init.input)
        self._get_values(session, is_again)
        if self._parts.chief:
            session.run(self._parts.init.local)  # the updates that it begins may read them
        if not self._barrier.over:
            self._parts.write_phase(Phase.RUNNING, Progress())  # before the chief's phase is read: see ``job_state``
            begin(self._parts, session)
        run = json.loads(self._state.run(session) or "{}")
        if is_again:
            self._count_unreported(run)
        layout.check(self._parts.built.layout, run.get("layout", {}), self._parts.model)
        if not self._parts.chief:
            session.run(self._parts.init.local)  # their first values may be computed from those that the chief gave
        return True

    def _reach_others(self) -> bool:
        """Start the server, and wait for the other tasks; return ``False`` if the job is over."""
        running = server.start(self._config, self._cluster, self._task)
        built = self._parts.built
        shown = [*built.spec.log_tensors.values(), *(one for one in (built.summary, built.updates) if one is not None)]
        inlined = side_effects.needs_inlining([*built.fetches, *shown])
        config, others = sessions.config_of(self._cluster, self._task, inlined), built.step.calls_workers
        training = sessions.with_workers(config, others) if others else config
        self._parts.connection.set_target(running.target, config, training)
        if self._task in self._cluster.state_tasks:
            held = StateOfChief(self._config, self._cluster, self._task, running.target, self._stop)
            self._parts.connection.held = held
        return rendezvous.wait_for_peers(
            self._cluster,
            self._task,
            self._config.patience_secs,
            lambda: self._stop.error,
            lambda: has_ended(self._config, self._cluster),
            self._parts.reader.was_here,
        )

    def _check_options(self, session: Session) -> None:
        """Wait until the PS hold the job's state, and compare the options that they were started with."""
        if not self._stop.wait_until(lambda: self._state.is_up(session), self._config.patience_secs):
            raise ClusterFormError(
                f"{self._cluster.state_holder} answers but has not set up the job's state in "
                f"{self._config.patience_secs:g} s: is it of another release? Start every task with the same version "
                "of tfps."
            )
        own = compatibility.fingerprint(self._config, self._cluster, tf.__version__)
        compatibility.check(own, self._state.terms(session), self._cluster)

    def _wait_until_found(self, session: Session) -> None:
        """Wait until every PS finds this worker at its host name, which may have moved: each PS looks it up repeatedly.

        Raises:
            ClusterFormError: If some PS does not.
        """
        if self._state.is_found(session):
            return
        name = self._cluster.address(self._task)
        log.info("waiting until every PS reaches this worker at %s", name)
        if not self._stop.wait_until(
            lambda: self._state.is_found(session), self._config.patience_secs, _FIND_EVERY_SECS
        ):
            raise ClusterFormError(
                f"{self._cluster.state_holder} does not reach {self._task} at {name}: does the name resolve correctly "
                "there?"
            )

    def _join_ps(self, session: Session) -> bool:
        """Join the PS; return whether the job continues in which this task took part before."""
        joined = self._state.marked(session)  # by PS, whether this worker joined it before
        if any(joined) and not all(joined):
            self._state.abort_job(session, joined)
            raise PeerLostError("this task restarted: the job restarts from its last checkpoint.")
        is_again = all(joined) and self._state.is_ready(session)
        if is_again and self._parts.chief:
            self._check_run(session)
        self._state.join(session)
        self._life.enter(WorkerState.JOINED)
        if is_again:
            self._parts.heartbeat.before = self._state.totals(session)[self._task.index]
            self._barrier.over = self._parts.others.this_one_ended(session)
        if is_again and self._barrier.is_blocking and not self._barrier.over:
            self._request_restart(session)
        return is_again

    def _check_run(self, session: Session) -> None:
        """Check that the run whose variables the PS hold is the one of ``--model_dir``.

        A chief whose launcher has started it again belongs to that run, also if its directory is new or was emptied.
        """
        first, model_dir = self._cluster.state_tasks[0], self._config.model_dir
        is_restart = STARTED_AGAIN in os.environ
        if is_restart and self._is_new_dir:
            return
        check_launch(model_dir)
        has_run = is_restart or not model_dir or JobDirectory(model_dir).has_run()
        server = f"{first} ({self._cluster.address(first)})"
        compatibility.check_run(model_dir, self._state.run(session), server, has_run)

    def _request_restart(self, session: Session) -> None:
        """Ask the others to restart, unless they are done: they wait for what this worker held when it was lost.

        When training has ended, they need nothing of a worker, but they may wait for what a lost chief has left undone.
        """
        are_done = self._parts.others.are_done(session)  # then only the chief's last duties are left
        self._barrier.over = are_done or self._barrier.has_ended(session)
        if self._barrier.over:
            self._barrier.settle(session)
        if not self._barrier.over:
            _check_can_repeat(self._parts, session, "this task restarted")
        if not self._barrier.over or (self._parts.chief and not are_done):
            self._parts.write_phase(Phase.RUNNING, Progress())
            self._state.request_restart(session)

    def _count_unreported(self, run: Mapping[str, Any]) -> None:
        """Count the steps that lost processes of this worker took and could not report, before it takes any itself."""
        counted = self._parts.counted_steps(run["step"]) if "step" in run else ()
        if counted:
            heartbeat = self._parts.heartbeat
            heartbeat.unreported = counted[self._task.index] - heartbeat.before.steps

    def _get_values(self, session: Session, is_again: bool) -> None:
        """Let the chief initialize the variables, unless the PS hold their values."""
        chief = self._parts.chief
        if chief and is_again:
            chief.take_over(session, self._state.run(session))
        elif chief:
            chief.check_evaluation()
            run = chief.initialize_variables(session)
            if self._parts.built.iterator.position:
                self._parts.built.iterator.position.begin(session)
            self._state.set_run(session, run)


def begin(parts: WorkerParts, session: Session) -> None:
    """Start together with the other workers."""
    parts.send_heartbeats(session)
    parts.barrier.begin(session)
    parts.connection.keep_spare(parts.built.global_step)
    if not parts.barrier.over:
        parts.partial.report(session)
        session.run(parts.built.step.worker_init)
        if parts.built.iterator.position:
            parts.built.iterator.position.find(session)
            session.run(parts.built.iterator.initializer)


def outlives(parts: WorkerParts, loop: Loop, stop: StopRequest, error: Exception) -> bool:
    """Return whether this worker goes on after the error of a run: another worker is lost, or done and gone.

    Wait until all restart together, or training has ended. The replacement of a lost worker requests the restart. If
    none does, as where only the way to a worker was interrupted or something of an earlier generation has arrived, this
    worker requests it. It waits less if the replacement is there already, which is new to a chief that is new itself,
    and not at all if a task has rejected a call by mistake.

    Raises:
        TfpsError: The reason to stop, if there is one.
    """
    barrier, session = parts.barrier, parts.connection.session
    if barrier.interrupted:
        return True
    if not parts.built.step.calls_workers or not _is_of_another(error):
        return False
    try:
        is_over = lambda: barrier.interrupted or barrier.has_ended(session)  # noqa: E731
        if not stop.wait_until(is_over, _patience_secs(error)):
            _check_can_repeat(parts, session, "another worker is lost")
            log.info("asking all workers to restart: %s", brief(error))
            parts.state.request_restart(session)
            stop.wait_until(is_over)
        if not barrier.interrupted:
            barrier.settle(session)  # the chief's update may have been interrupted, too
    except (tf.errors.OpError, RuntimeError):  # RuntimeError: the session was closed
        return barrier.interrupted
    if not barrier.interrupted:
        barrier.over = True
        loop.resume(session)
    return True


def await_end(parts: WorkerParts, loop: Loop) -> None:
    """Wait until training has ended for all: until then, another worker's loss lets all take the last step again."""
    if parts.built.step.calls_workers and not loop.progress.input_ended:
        loop.wait_until(lambda: parts.barrier.has_ended(parts.connection.session))


def _check_can_repeat(parts: WorkerParts, session: Session, why: str) -> None:
    """Check that workers can take a step again in the same process.

    Raises:
        PeerLostError: If the position in the data counts, and the input cannot go back: the job has to restart.
    """
    if parts.built.iterator.position:
        parts.state.abort_job(session)
        raise PeerLostError(f"{why}: with --data_policy, the job restarts from its last checkpoint.")


def _patience_secs(error: Exception) -> float:
    """Return how long to wait for a restart that the replacement of a lost worker requests."""
    if sessions.is_refused(error):
        return 0.0
    return _REJOINED_WITHIN_SECS if FORGOTTEN in str(error) else _REPLACED_WITHIN_SECS


def _is_of_another(error: Any) -> bool:
    return isinstance(error, _OF_A_LOST_WORKER) or STALE in str(error)
