"""A worker: builds its graph, meets the others, trains, and signs off. Worker 0 is the chief.

What the tasks agree on, and in which order, is told in ``jobstate``; the chief's further duties are in ``chief``.
"""

import contextlib
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.errors import PeerLostError, RetryableError, StoppedError, TfpsError
from tfps.models import Model, mistake
from tfps.report import brief, count
from tfps.runtime import agreement, graph, jobstate, net, server
from tfps.runtime import session as sessions
from tfps.runtime.chief import Chief, write_summary
from tfps.runtime.events import EventFile
from tfps.runtime.loop import Loop, Progress, Reporter
from tfps.runtime.model_dir import ended
from tfps.runtime.stop import WORKER_GRACE_SECS, Stop

_POLL_SECS = 0.02
_GONE_AFTER_SECS = 2.0  # at the end of the job, a worker that does not answer for so long is not waited for
_LOST_AFTER_SECS = 10.0  # in training, a peer that does not answer for so long is lost
_LAST_WILL_SECS = 3.0
_LAST_STEPS_SECS = 1.0

log = logging.getLogger(__name__)


class Worker:
    """One worker of a cluster; ``work`` is its whole life, the other methods look after it from another thread."""

    def __init__(self, config: JobConfig, cluster: Cluster, task: Task, model: Model, stop: Stop) -> None:
        self._config, self._cluster, self._task, self._model, self._stop = config, cluster, task, model, stop
        self._session: Any = None
        self._chief: Chief | None = None
        self._loop: Loop | None = None
        self._trained = False
        self._coordinator = tf.train.Coordinator()
        self._peers = net.Peers(cluster)

    def work(self) -> None:
        """Train until the job is done.

        Raises:
            ModelError: If the model is wrong.
            ConfigError: If another task was started otherwise.
            ClusterFormError: If some task never came.
            PeerLostError: If a PS went away.
            DivergedError: If the loss became NaN or Inf.
            CheckpointError: If the newest checkpoint cannot be used.
            StorageError: If the last checkpoint cannot be written.
            StoppedError: If told to stop; the state is saved.
        """
        try:
            self._build()
            if not self._join_cluster():
                return
            loop = self._loop = self._make_loop()
            self._train(loop)
        except tf.errors.OpError as error:
            raise self._explained(error) from error

    def _build(self) -> None:
        """Build the graphs, before anything is opened: a mistake in the model is told at once."""
        built = self._built = graph.training(self._config, self._cluster, self._task, self._model)
        with built.graph.as_default():
            self._state = jobstate.JobState(self._cluster, self._task.index)
            self._init_local = tf.group(
                tf.local_variables_initializer(), tf.tables_initializer(), built.iterator.initializer
            )
            if self._task.is_chief:
                self._chief = Chief(self._config, self._cluster, self._model, built)

    def _join_cluster(self) -> bool:
        """Start the server, wait for the others, and for the variables to have their values; tell if it came to it."""
        running = server.start(self._config, self._cluster, self._task)
        patience_secs, over = self._config.patience_secs, lambda: ended(self._config)
        # Without the filter, creating a session would wait for every other worker, for ever.
        filters = ["/job:ps", self._task.device]
        self._session_config = tf.ConfigProto(device_filters=filters, allow_soft_placement=True)
        # Grappler's algebra and folding round otherwise where the wire is packed: no bit may depend on that.
        rewriting = self._session_config.graph_options.rewrite_options
        rewriting.arithmetic_optimization = rewriting.constant_folding = RewriterConfig.OFF
        self._target = running.target
        stopping = lambda: self._stop.error  # noqa: E731
        if not net.wait_for_peers(self._cluster, self._task, patience_secs, stopping, over, self._was_here):
            return False
        session = self._session = self._new_session()
        self._wait_until(lambda: self._state.is_up(session))
        mine = agreement.terms(self._config, self._cluster, tf.__version__)
        agreement.check(mine, self._state.terms(session), self._cluster)
        again = self._meet_again(session)
        session.run(self._init_local)
        if self._chief and again:
            self._chief.go_on(session)
        elif self._chief:
            self._start_job(self._chief)
        self._wait_until(lambda: self._state.is_ready(session))
        session.run(self._built.step.worker_init)
        self._state.write(session, jobstate.RUNNING, 0)
        return True

    def _new_session(self) -> Any:
        return sessions.Session(self._target, graph=self._built.graph, config=self._session_config)

    def _was_here(self) -> bool:
        """Tell whether every PS knows this worker from before: those that are missing may be through and gone.

        A PS that goes just then would never answer: that is a no, too.
        """
        found: list[bool] = []

        def ask() -> None:
            with contextlib.suppress(tf.errors.OpError), self._new_session() as session:
                found.append(self._state.is_up(session) and all(self._state.marked(session)))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_GONE_AFTER_SECS)
        return found == [True]

    def _meet_again(self, session: Any) -> bool:
        """Join the PS; tell whether the job goes on that this task has been part of before.

        Raises:
            PeerLostError: If it has to begin anew; the PS that were part of it are told to leave.
        """
        marked = self._state.marked(session)
        if any(marked) and not (all(marked) and self._can_go_on(session)):
            self._state.dismiss(session, marked)
            raise PeerLostError("this task was started again: the job begins anew from its last checkpoint.")
        self._state.join(session)
        return all(marked) and self._state.is_ready(session)

    def _can_go_on(self, session: Any) -> bool:
        """Tell whether nobody waits for what this worker took along when it was lost."""
        if self._config.mode != "sync" or not (self._chief or self._state.is_ready(session)):
            return True
        phases, _ = self._state.read(session)
        others = [phases[task.index] for task in self._others()]
        self._trained = bool(others) and set(others) == {jobstate.DONE}  # all but what the chief does last
        return self._trained

    def _start_job(self, chief: Chief) -> None:
        chief.give_values(self._session)
        if self._built.updates is not None:
            runner = tf.train.QueueRunner(self._built.step.queue, [self._built.updates])
            runner.create_threads(self._session, coord=self._coordinator, daemon=True, start=True)
        self._state.set_ready(self._session)

    def _make_loop(self) -> Loop:
        chief, session = self._chief, self._session
        reporter = Reporter(self._config, EventFile(self._config.model_dir) if chief else None)
        between = (lambda: chief.save_if_due(session)) if chief else (lambda: None)
        return Loop(session, self._built, self._config, reporter, self._stop, between)

    def _train(self, loop: Loop) -> None:
        size = self._cluster.num_workers, self._cluster.num_ps
        log.info("training: mode %s, %d workers, %d ps", self._config.mode, *size)
        try:
            if not self._trained:
                loop.run()
            if self._chief:
                self._finish_job(self._chief, loop)
        except StoppedError:
            self._sign_off_early(loop)
            raise
        self._state.write(self._session, jobstate.DONE, loop.progress.steps)
        log.info("done: %s steps of this worker", count(loop.progress.steps))

    def _finish_job(self, chief: Chief, loop: Loop) -> None:
        """Wait for the others, then save, evaluate and report."""
        self._wait_until(self._others_are_through)
        chief.close_gaps(self._session, loop)
        loop.progress.global_step = chief.save(self._session)
        metrics = chief.evaluate(self._session, self._target, self._session_config)
        _, steps = self._state.read(self._session)
        write_summary(self._config, loop, chief, {**dict(enumerate(steps)), 0: loop.progress.steps}, metrics)

    def _others_are_through(self) -> bool:
        """Tell whether every other worker has signed off, or does not answer any more."""
        phases, _ = self._state.read(self._session)
        busy = [t for t in self._others() if phases[t.index] == jobstate.RUNNING]
        return len(self._peers.lost(busy, _GONE_AFTER_SECS)) == len(busy)

    def _others(self) -> Sequence[Task]:
        return [task for task in self._cluster.tasks() if task.job == "worker" and task != self._task]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._stop.error:
                raise self._stop.error
            time.sleep(_POLL_SECS)

    def _sign_off_early(self, loop: Loop) -> None:
        """Save, and let the PS know that this worker has left."""
        try:
            if self._chief:
                self._let_others_stop()
                loop.progress.global_step = self._chief.save(self._session)
            self._state.write(self._session, jobstate.STOPPED, loop.progress.steps)
        except (tf.errors.OpError, TfpsError) as error:
            log.info("the state could not be saved: %s", brief(error))

    def _let_others_stop(self) -> None:
        """Wait a little for the others' last steps, if they are told to stop too, so that these are saved."""
        deadline = time.monotonic() + _LAST_STEPS_SECS
        while self._any_is_training() and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)

    def _any_is_training(self) -> bool:
        phases, _ = self._state.read(self._session)
        return any(phases[task.index] == jobstate.RUNNING for task in self._others())

    def _sign_off_failed(self, error: TfpsError) -> None:
        with contextlib.suppress(tf.errors.OpError):
            steps = self._loop.progress.steps if self._loop else 0
            self._state.write(self._session, -error.exit_code, steps)

    def _explained(self, error: Any) -> TfpsError:
        """Return a TensorFlow error as what it means: a lost PS, or the model's own line. The log gets all of it."""
        print(f"{type(error).__name__}: {error.message}", file=sys.__stderr__, flush=True)
        if self._stop.error:
            return self._stop.error
        lost = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.FailedPreconditionError)
        if isinstance(error, (*lost, tf.errors.CancelledError)):
            names = self._lost_ps()
            what = f"lost {', '.join(map(str, names))}" if names else f"a PS was lost ({brief(error)})"
            return PeerLostError(f"{what}: start this task again to go on from the last checkpoint.")
        return mistake(self._model, type(error)(None, None, brief(error)), self._made_at(error))

    def _made_at(self, error: Any) -> Sequence[Any]:
        """Return the calls that made the operation which failed; only its name is known, and that not always."""
        made = {op.name: op for op in self._built.graph.get_operations()}
        names = [name for name in re.findall(r"\{\{node ([^}]+)\}\}", error.message) if name in made]
        calls = made[names[0]].traceback if names else []
        return [traceback.FrameSummary(call.filename, call.lineno, call.name) for call in calls]

    def _lost_ps(self) -> Sequence[Task]:
        """Return the PS that do not answer; one that was just killed may take a moment to be gone."""
        deadline = time.monotonic() + _GONE_AFTER_SECS
        servers = [task for task in self._cluster.tasks() if task.job == "ps"]
        while not (absent := net.missing(self._cluster, servers)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return absent

    # The methods below are called from the main thread.

    def watch(self) -> TfpsError | None:
        """Return an error if a task that this one cannot do without is gone, or the background work has failed."""
        try:
            self._coordinator.raise_requested_exception()
        except tf.errors.OpError as error:
            return self._explained(error)
        if self._session is None:
            return None  # the others may be on their way
        needed = [task for task in self._cluster.tasks() if task.job == "ps"]
        if self._loop is not None and self._config.mode == "sync":
            needed += self._others()
        lost = self._still_needed(self._peers.lost(needed, _LOST_AFTER_SECS))
        return _lost(lost, _LOST_AFTER_SECS) if lost else self._chief_is_missing()

    def _chief_is_missing(self) -> TfpsError | None:
        """Return an error if the chief, which has yet to set the variables, is not there, nor started again."""
        chief = [task for task in self._others() if task.is_chief]
        patience_secs = self._config.patience_secs
        missing = self._loop is None and self._peers.lost(chief, patience_secs)
        return _lost(chief, patience_secs) if missing else None

    def _still_needed(self, lost: Sequence[Task]) -> Sequence[Task]:
        """Return lost tasks without the workers that had signed off; if a PS is among them, none can be asked."""
        if not lost or any(task.job == "ps" for task in lost):
            return lost
        phases, _ = self._state.read(self._session)
        return [task for task in lost if phases[task.index] != jobstate.DONE]

    def grace_secs(self) -> float:
        """Return how long to wait for the step to end: a few times as long as steps take, for it may never end."""
        progress = self._loop.progress if self._loop else Progress()
        if not self._loop or not progress.steps:
            return WORKER_GRACE_SECS
        run_secs = progress.seconds / progress.steps * self._loop.pace.steps
        return min(1.0 + 3 * run_secs, WORKER_GRACE_SECS)

    def last_will(self) -> None:
        """Save and sign off although the training thread is blocked; give up after a few seconds."""
        if self._loop is not None and isinstance(self._stop.error, StoppedError):
            thread = threading.Thread(target=self._sign_off_early, args=(self._loop,), daemon=True)
            thread.start()
            thread.join(_LAST_WILL_SECS)

    def fail(self, error: TfpsError) -> None:
        """Let the PS know if this task has failed for good; write the summary of the job, if this is the chief."""
        if not isinstance(error, RetryableError) and self._loop is not None:
            thread = threading.Thread(target=self._sign_off_failed, args=(error,), daemon=True)
            thread.start()
            thread.join(_LAST_WILL_SECS)
        if self._task.is_chief:
            steps = self._loop.progress.steps if self._loop else 0
            write_summary(self._config, self._loop, self._chief, {0: steps}, {}, error)


def _lost(tasks: Sequence[Task], secs: float) -> PeerLostError:
    return PeerLostError(f"lost {', '.join(map(str, tasks))}: no answer for {secs:g} s.")
