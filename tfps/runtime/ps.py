"""A parameter server: holds its part of the variables and of the job's state until every worker has signed off."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.errors import PeerLostError, of_exit_code
from tfps.runtime import agreement, jobstate, net, server
from tfps.runtime import session as sessions
from tfps.runtime.model_dir import ended
from tfps.runtime.stop import PS_GRACE_SECS, Stop

_POLL_SECS = 0.1
_PROBE_EVERY_SECS = 0.5
_GONE_AFTER_SECS = 1.0

log = logging.getLogger(__name__)


def serve(config: JobConfig, cluster: Cluster, task: Task, stop: Stop) -> None:
    """Be a parameter server until the job is over.

    Raises:
        ClusterFormError: If some task never came.
        PeerLostError: If every worker that is not done has been gone for ``start_timeout_secs``, or the job has to
            begin anew.
        TfpsError: If a worker has failed for good, with the same exit code.
        StoppedError: If told to stop, after the workers have saved and left, or had their time to.
    """
    running = server.start(config, cluster, task)
    with tf.Graph().as_default() as graph:
        init, state = jobstate.of_ps(cluster, task.index, agreement.terms(config, cluster, tf.__version__))
        told = state.phase.read_value(), state.leave.read_value()
        session = sessions.Session(running.target, graph=graph, config=tf.ConfigProto(device_filters=[task.device]))
        session.run(init)
    if net.wait_for_peers(cluster, task, config.patience_secs, lambda: stop.error, lambda: ended(config)):
        log.info("training: serving %d workers", cluster.num_workers)
        _until_done(session.make_callable(told), cluster, config.patience_secs, stop)
    log.info("done")


def _until_done(read: Callable[[], Any], cluster: Cluster, patience_secs: float, stop: Stop) -> None:
    """Return when every worker is done, or gone after the chief was done; see ``serve`` for what is raised."""
    peers = net.Peers(cluster)
    next_probe = 0.0
    while unfinished := _not_done(cluster, phases := _phases(read, peers)):
        if stop.error and (stop.waited_secs > PS_GRACE_SECS or not set(jobstate.AT_WORK) & set(phases)):
            raise stop.error
        if time.monotonic() > next_probe:
            chief_is_done = phases[0] == jobstate.DONE
            patience = _GONE_AFTER_SECS if chief_is_done or stop.error else patience_secs
            waited_for = [task for task in unfinished if not stop.error or phases[task.index] in jobstate.AT_WORK]
            if len(peers.lost(waited_for, patience)) == len(waited_for):
                if chief_is_done:
                    return
                raise stop.error or PeerLostError(f"no worker has answered for {patience:g} s: the job is given up.")
            next_probe = time.monotonic() + _PROBE_EVERY_SECS
        time.sleep(_POLL_SECS)


def _phases(read: Callable[[], Any], peers: net.Peers) -> list[int]:
    """Return the workers' phases; raises if the job cannot go on."""
    phases, leave = read()
    if leave:
        raise PeerLostError("a worker was started again: the job begins anew from its last checkpoint.")
    for index, phase in enumerate(phases):
        if phase < 0:
            _wait_gone(peers, Task("worker", index))  # what it says of why comes first
            raise of_exit_code(-int(phase), f"worker/{index} has failed with exit code {-phase}.")
    known: list[int] = phases.tolist()
    return known


def _wait_gone(peers: net.Peers, task: Task, most_secs: float = 5.0) -> None:
    deadline = time.monotonic() + most_secs
    while peers.answer(task) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)


def _not_done(cluster: Cluster, phases: Sequence[int]) -> list[Task]:
    """Return the workers that are not done."""
    return [task for task in cluster.tasks() if task.job == "worker" and phases[task.index] != jobstate.DONE]
