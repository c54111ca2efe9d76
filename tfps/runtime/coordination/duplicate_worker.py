"""Refuse to become a second process of a worker that runs at another address.

A new process of a worker takes the place of the former one: every PS forgets the former one's session as soon as the
new one opens its own (session_mgr.cc in TensorFlow's distributed runtime). That is right for a worker that was lost. A
process with a wrong address for itself, by a mistake in its ``--worker_hosts``, would end a healthy worker. So, before
it opens that session, a worker asks the first PS, in a session of that PS's own server:

1. Where do the PS reach this worker? Where they reach this process, nothing else can run.
2. Does something answer there as this worker, and does it send heartbeats? This process sends none yet.
"""

import contextlib
import time

import tensorflow.compat.v1 as tf

from tfps.cluster import addresses, probe
from tfps.cluster.spec import Cluster, Task
from tfps.errors import ConfigError
from tfps.runtime.coordination import compatibility, job_variables
from tfps.runtime.coordination.heartbeat import EVERY_SECS
from tfps.tf_types import Session

_ANSWER_SECS = 10.0
_LISTEN_SECS = 2 * EVERY_SECS + 1.0


def check(cluster: Cluster, task: Task) -> None:
    """Check that a worker does not run elsewhere, before this process opens a session as that worker.

    Raises:
        ConfigError: If it does.
    """
    elsewhere = None
    with contextlib.suppress(tf.errors.OpError):  # the PS is not set up yet, so no worker has joined it
        elsewhere = _running_elsewhere(cluster, task)
    if elsewhere:
        raise ConfigError(
            f"{task} runs at {elsewhere} already, but --worker_hosts has {cluster.address(task)} for it here: give "
            "every task the same --worker_hosts, and end that process if this one is to replace it."
        )


def _running_elsewhere(cluster: Cluster, task: Task) -> str | None:
    """Return the address at which a worker runs, if it is not the one that this process has for it."""
    first = Task("ps", 0)
    with tf.Graph().as_default() as graph:
        terms = job_variables.ps_variables(cluster, first.index).terms.read_value()
        pulses = job_variables.first_ps_variables(cluster).pulse.read_value()
    config = tf.ConfigProto(device_filters=[first.device], operation_timeout_in_ms=int(1000 * _ANSWER_SECS))
    with tf.Session(f"grpc://{cluster.address(first)}", graph=graph, config=config) as session:
        there = compatibility.address_of(task, session.run(terms).decode())
        if not there or addresses.normalized(there) == addresses.normalized(cluster.address(task)):
            return None
        return there if probe.probe_address(there).task == task and _beats(session, pulses, task) else None


def _beats(session: Session, pulses: tf.Tensor, task: Task) -> bool:
    """Return whether the first PS gets heartbeats of a worker."""
    before = session.run(pulses)[task.index]
    if not before:
        return False
    time.sleep(_LISTEN_SECS)
    return bool(session.run(pulses)[task.index] != before)
