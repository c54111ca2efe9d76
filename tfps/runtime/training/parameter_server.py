"""A parameter server: holds its part of the variables and of the job's state until every worker has signed off.

In a job without PS, the chief does this beside its work as a worker: ``StateOfChief``.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import probe, rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import PeerLostError, TfpsError, error_for_failed_worker
from tfps.runtime.checkpoint.job_end import has_ended
from tfps.runtime.coordination import compatibility, job_variables
from tfps.runtime.coordination.job_state import AT_WORK, Phase
from tfps.runtime.process import server
from tfps.runtime.process import session as sessions
from tfps.runtime.process.shutdown import StopRequest
from tfps.text import plural
from tfps.timeouts import PS_GRACE_SECS

_POLL_SECS = 0.1
_PROBE_EVERY_SECS = 0.5
_WATCH_EVERY_SECS = 0.5
_PROBE_SECS_EACH = 0.1
_GONE_AFTER_SECS = 1.0
_FROZEN_AFTER_SECS = 20.0  # at the end of the job, a worker whose process is frozen for this long is gone, too
_LAST_WORDS_SECS = 3.0

log = logging.getLogger(__name__)


def serve(config: JobConfig, cluster: Cluster, task: Task, stop: StopRequest) -> None:
    """Serve as a parameter server until the job is over.

    Raises:
        ClusterFormError: If some task never started.
        PeerLostError: If every worker that is not done has been gone for ``start_timeout_secs``, or has been frozen
            for ``stall_timeout_secs``; or if the job has to restart.
        TfpsError: If a worker has failed permanently; it has the worker's exit code if that is 2, 65, 66 or 74.
        WorkerFailedError: If a worker has failed permanently with another exit code.
        StoppedError: If the task is asked to stop, after the workers have saved and exited, or had their time to.
    """
    read = _hold_state(config, cluster, task, server.start(config, cluster, task).target)

    def stopping() -> TfpsError | None:
        if not stop.error and (failed := _failed(read()[0])):
            _let_it_end_first(stop)
            return failed
        return stop.error

    if rendezvous.wait_for_peers(cluster, task, config.patience_secs, stopping, lambda: has_ended(config, cluster)):
        log.info("training: serving %s", plural(cluster.num_workers, "worker"))
        _until_done(read, cluster, task, config, stop)
    log.info("done")


def _hold_state(config: JobConfig, cluster: Cluster, task: Task, target: str) -> Callable[[], Any]:
    """Set this task's part of the job's state to its first values; return what reads phases, aborted and joined."""
    with tf.Graph().as_default() as graph:
        terms = compatibility.terms_of_ps(config, cluster, tf.__version__)
        init, state = job_variables.all_variables(cluster, task.index, terms)
        values = state.phase.read_value(), state.aborted.read_value(), state.joined.read_value()
        session = sessions.Session(target, graph=graph, config=tf.ConfigProto(device_filters=[task.device]))
        session.run(init)
    read: Callable[[], Any] = session.make_callable(values)
    return read


class StateOfChief:
    """What a PS does, done by the chief of a job without PS: it holds the job's state, and ends last.

    Args:
        config: The job.
        cluster: Its tasks.
        task: The chief.
        target: The address of its server.
        stop: The chief's request to end early.

    Attributes:
        error: Why the job cannot continue: another worker has failed for good. ``None`` while it can.
    """

    def __init__(self, config: JobConfig, cluster: Cluster, task: Task, target: str, stop: StopRequest) -> None:
        self._read = _hold_state(config, cluster, task, target)
        self._others = [other for other in cluster.tasks() if other != task]
        self._peers, self._stop = rendezvous.Peers(cluster), stop
        self.error: TfpsError | None = None
        threading.Thread(target=self._watch, name="state", daemon=True).start()

    def _watch(self) -> None:
        """Look for a worker that has failed for good, until this process ends."""
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            while not (failed := _failed([0, *self._read()[0][1:]])):  # this worker has its own error
                time.sleep(_WATCH_EVERY_SECS)
            _let_it_end_first(self._stop)
            self.error = failed

    def serve_others(self) -> None:
        """Serve until no other worker takes steps or signs off, or those that do are gone.

        If this task is asked to stop, it takes no longer than a PS.
        """
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            while self._others and self._stop.waited_secs < PS_GRACE_SECS:
                phases = self._read()[0]
                left = [other for other in self._others if phases[other.index] in AT_WORK]
                gone = {
                    *self._peers.unreachable(left, _GONE_AFTER_SECS),
                    *self._peers.unresponsive(left, _FROZEN_AFTER_SECS),
                }
                if set(left) <= gone:
                    self._let_them_leave()
                    return
                time.sleep(_POLL_SECS)

    def _let_them_leave(self) -> None:
        """Wait briefly for the end of the other workers: the answer to their last request may be on its way."""
        deadline = time.monotonic() + _GONE_AFTER_SECS
        while time.monotonic() < deadline and len(self._peers.unreachable(self._others, 0.0)) < len(self._others):
            time.sleep(_POLL_SECS)


def _until_done(read: Callable[[], Any], cluster: Cluster, task: Task, config: JobConfig, stop: StopRequest) -> None:
    """Return when every worker is done, or gone after the chief was done; ``serve`` lists the exceptions."""
    peers, others = rendezvous.Peers(cluster), _OtherServers(cluster, task)
    next_probe = 0.0
    while unfinished := _not_done(cluster, phases := _phases(read, peers, others, stop)):
        if stop.error and (stop.waited_secs > PS_GRACE_SECS or not set(AT_WORK) & set(phases)):
            raise stop.error
        if time.monotonic() > next_probe:
            chief_is_done = phases[0] == Phase.DONE
            is_over = chief_is_done or stop.error is not None
            patience = _GONE_AFTER_SECS if is_over else config.patience_secs
            frozen_secs = _FROZEN_AFTER_SECS if is_over else config.stall_timeout_secs
            waited_for = [task for task in unfinished if not stop.error or phases[task.index] in AT_WORK]
            gone = {*peers.unreachable(waited_for, patience), *peers.unresponsive(waited_for, frozen_secs)}
            if set(waited_for) <= gone:
                if chief_is_done:
                    return
                raise stop.error or PeerLostError(
                    f"no worker has answered for {patience:g} s: giving up on the job. See the workers' logs."
                )
            next_probe = time.monotonic() + _PROBE_EVERY_SECS
        time.sleep(_POLL_SECS)


def _phases(read: Callable[[], Any], peers: rendezvous.Peers, others: "_OtherServers", stop: StopRequest) -> list[int]:
    """Return the workers' phases; raise if the job cannot continue."""
    phases, aborted, joined = read()
    if aborted:
        raise PeerLostError("a worker restarted: the job restarts from its last checkpoint.")
    if failed := _failed(phases):
        _wait_gone(peers, Task("worker", next(index for index, phase in enumerate(phases) if phase < 0)))
        _let_it_end_first(stop)
        _let_others_save(read, peers, stop)
        raise failed
    others.check(bool(joined.any()))
    known: list[int] = phases.tolist()
    return known


def _failed(phases: Any) -> TfpsError | None:
    """Return the error with which the job has failed permanently, if a worker has."""
    return next(
        (error_for_failed_worker(index, -int(phase)) for index, phase in enumerate(phases) if phase < 0),
        None,
    )


class _OtherServers:
    """The other PS. A restarted PS lacks its variables, and then the variables held here are of no use either."""

    def __init__(self, cluster: Cluster, task: Task) -> None:
        self._cluster = cluster
        self._others = [other for other in cluster.state_tasks if other != task]
        self._born: dict[Task, bytes] = {}
        self._every_secs = max(_PROBE_EVERY_SECS, _PROBE_SECS_EACH * len(self._others))
        self._next = 0.0

    def check(self, joined: bool) -> None:
        """Check now and then whether another PS was restarted.

        Args:
            joined: Whether a worker has joined this PS, and so all of them. Before that, no state can be lost here. A
                PS that restarts then, with the whole job, is no reason to exit too, and to send the workers away.

        Raises:
            PeerLostError: If one was restarted since a worker joined.
        """
        if not joined or not self._others or time.monotonic() < self._next:
            return
        for other, answer in probe.probe_all(self._cluster, self._others).items():
            if answer.task == other and answer.born and self._born.setdefault(other, answer.born) != answer.born:
                raise PeerLostError(f"{other} restarted: the job restarts from its last checkpoint.")
        self._next = time.monotonic() + self._every_secs


def _let_it_end_first(stop: StopRequest) -> None:
    """Wait briefly, so that the failed worker's own message and exit code come first."""
    deadline = time.monotonic() + _LAST_WORDS_SECS
    while not stop.error and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)


def _let_others_save(read: Callable[[], Any], peers: rendezvous.Peers, stop: StopRequest) -> None:
    """Serve until the other workers have left, if all are asked to stop because one has failed: the chief saves."""
    while stop.error and stop.waited_secs < PS_GRACE_SECS:
        at_work = [Task("worker", index) for index, phase in enumerate(read()[0]) if phase in AT_WORK]
        if set(at_work) <= set(peers.unreachable(at_work, _GONE_AFTER_SECS)):
            return
        time.sleep(_POLL_SECS)


def _wait_gone(peers: rendezvous.Peers, task: Task, max_secs: float = 5.0) -> None:
    deadline = time.monotonic() + max_secs
    while peers.answer(task) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)


def _not_done(cluster: Cluster, phases: Sequence[int]) -> list[Task]:
    """Return the workers that are not done."""
    return [task for task in cluster.tasks() if task.job == "worker" and phases[task.index] != Phase.DONE]
