"""A parameter server: holds its part of the variables and of the job's state until every worker has signed off."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.errors import PeerLostError
from tfps.runtime import jobstate, net, server
from tfps.runtime.stop import Stop

_POLL_SECS = 0.1
_PROBE_EVERY_SECS = 1.0
_GONE_AFTER_SECS = 2.0

log = logging.getLogger(__name__)


def serve(config: JobConfig, cluster: Cluster, task: Task, stop: Stop) -> None:
    """Be a parameter server until the job is over.

    Raises:
        ClusterFormError: If some task never came.
        PeerLostError: If every worker that is not done has been gone for ``start_timeout_secs``.
        StoppedError: If told to stop, after the workers have saved and left, or had their time to.
    """
    running = server.start(cluster, task)
    with tf.Graph().as_default() as graph:
        state = jobstate.on_ps(cluster, task.index)
        phase = state.phase.read_value()
        session = tf.Session(running.target, graph=graph, config=tf.ConfigProto(device_filters=[task.device]))
        session.run(state.init_op)
    net.wait_for_peers(cluster, task, config.start_timeout_secs, lambda: stop.error)
    log.info("training: serving %d workers", cluster.num_workers)
    _until_done(session.make_callable(phase), cluster, config.start_timeout_secs, stop)
    log.info("done")


def _until_done(read_phases: Callable[[], Any], cluster: Cluster, patience_secs: float, stop: Stop) -> None:
    """Return when every worker is done, or gone after the chief was done; see ``serve`` for what is raised."""
    peers = net.Peers(cluster)
    next_probe = 0.0
    while True:
        phases: list[int] = read_phases().tolist()
        unfinished = _not_done(cluster, phases)
        if not unfinished:
            return
        if stop.error and (stop.overdue or jobstate.RUNNING not in phases):
            raise stop.error
        if time.monotonic() > next_probe:
            chief_is_done = phases[0] == jobstate.DONE
            if len(peers.lost(unfinished, _GONE_AFTER_SECS if chief_is_done else patience_secs)) == len(unfinished):
                if chief_is_done:
                    return
                raise PeerLostError(f"no worker has answered for {patience_secs:g} s: the job is given up.")
            next_probe = time.monotonic() + _PROBE_EVERY_SECS
        time.sleep(_POLL_SECS)


def _not_done(cluster: Cluster, phases: Sequence[int]) -> list[Task]:
    """Return the workers that are not done."""
    return [task for task in cluster.tasks() if task.job == "worker" and phases[task.index] != jobstate.DONE]
