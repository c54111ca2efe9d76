"""Refuse to become a second process of a worker that runs at another address.

A new process of a worker takes the place of the former one: every PS forgets the former one's session as soon as the
new one opens its own (session_mgr.cc in TensorFlow's distributed runtime). That is right for a worker that was lost. A
process with a wrong address for itself, by a mistake in its ``--worker_hosts``, would end a healthy worker. So, before
it opens that session, a worker asks the first PS, in a session of that PS's own server:

1. Does it have the options of this process? Those of a worker with others are refused (``compatibility``).
2. Where does it reach this worker? At the address of this process, nothing else can run.
3. Do heartbeats of this worker arrive? This process sends none yet.
"""

import contextlib
import time
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.cluster import addresses
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.runtime.coordination import compatibility, job_variables
from tfps.runtime.coordination.heartbeat import EVERY_SECS
from tfps.tf_types import Session

_ANSWER_SECS = 10.0
_LISTEN_SECS = 10 * EVERY_SECS


def check(config: JobConfig, cluster: Cluster, task: Task) -> None:
    """Check that a worker does not run elsewhere, before this process opens a session as that worker.

    Raises:
        ConfigError: If it does, or if the first PS has other options, or the workers' addresses in another order.
        PeerLostError: If the first PS had other options, and has exited.
    """
    elsewhere = None
    with contextlib.suppress(tf.errors.OpError):  # the PS is not set up yet, so no worker has joined it
        elsewhere = _running_elsewhere(config, cluster, task)
    if elsewhere:
        raise ConfigError(
            f"{task} runs at {elsewhere} already, but --worker_hosts has {cluster.address(task)} for it here: give "
            "every task the same --worker_hosts, and end that process if this one is to replace it."
        )


def _running_elsewhere(config: JobConfig, cluster: Cluster, task: Task) -> str | None:
    """Return the address at which a worker runs, if it is not the one that this process has for it.

    Raises:
        ConfigError: If the first PS has other options, or the workers' addresses in another order.
        PeerLostError: If the first PS had other options, and has exited.
    """
    first = cluster.state_tasks[0]
    with tf.Graph().as_default() as graph:
        terms = job_variables.ps_variables(cluster, first.index).terms.read_value()
        pulses = job_variables.first_ps_variables(cluster).pulse.read_value()
    options = tf.ConfigProto(device_filters=[first.device], operation_timeout_in_ms=int(1000 * _ANSWER_SECS))
    with tf.Session(f"grpc://{cluster.address(first)}", graph=graph, config=options) as session:
        theirs = session.run(terms).decode()
        if not theirs:
            return None  # the PS is not set up yet, so no worker has joined it
        compatibility.check(compatibility.fingerprint(config, cluster, tf.__version__), [theirs], cluster)
        _check_order(cluster, compatibility.worker_hosts(theirs))
        there = compatibility.address_of(task, theirs)
        if not there or addresses.normalized(there) == addresses.normalized(cluster.address(task)):
            return None
        return there if _beats(session, pulses, task) else None


def _check_order(cluster: Cluster, theirs: Sequence[str]) -> None:
    """Check that this process has the workers' addresses in the order in which the PS have them."""
    here, there = ([addresses.normalized(one) for one in hosts] for hosts in (cluster.workers, theirs))
    if here != there and sorted(here) == sorted(there):
        raise ConfigError(
            f"--worker_hosts={','.join(cluster.workers)} here, {','.join(theirs)} on the PS: give every task the same "
            "addresses in the same order."
        )


def _beats(session: Session, pulses: tf.Tensor, task: Task) -> bool:
    """Return whether the first PS gets heartbeats of a worker within some seconds, if it ever has had one."""
    before, deadline = session.run(pulses)[task.index], time.monotonic() + _LISTEN_SECS
    while before and time.monotonic() < deadline:
        time.sleep(EVERY_SECS / 4)
        if session.run(pulses)[task.index] != before:
            return True
    return False
