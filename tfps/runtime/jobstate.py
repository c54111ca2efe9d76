"""The job's own state, held on the PS as TensorFlow resources, so that the tasks agree on the end among themselves.

Each PS holds a vector with a phase per worker, and the same vector of steps taken. The protocol:

1. A PS sets its vectors to zero as soon as its server is up.
2. The chief gives the variables their values (initial, or a checkpoint's), then sets ``ready`` on PS 0.
3. The other workers wait for ``ready``, then train.
4. A worker that is through (or was told to stop) writes DONE (or STOPPED) on every PS, and leaves.
   The chief does so last, when the final checkpoint, the evaluation and the summary are written.
5. A PS leaves when every worker is DONE.

The variables are in no collection: they are no part of the model and of no checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster

RUNNING, STOPPED, DONE = 0, 1, 2


def _variable(name: str, shape: Sequence[int], dtype: Any) -> Any:
    return tf.Variable(
        lambda: tf.zeros(shape, dtype), dtype=dtype, trainable=False, collections=[], use_resource=True, name=name
    )


@dataclass(frozen=True)
class PsState:
    """The state held on one PS, as operations of one graph.

    Attributes:
        phase: int32 variable [num_workers]: RUNNING, STOPPED or DONE.
        steps: int64 variable [num_workers]: steps that each worker has taken.
        ready: bool variable: the chief has given the variables their values. Used on PS 0.
    """

    phase: Any
    steps: Any
    ready: Any

    @property
    def init_op(self) -> Any:
        """Operation with which the PS sets everything to zero."""
        return tf.group(self.phase.initializer, self.steps.initializer, self.ready.initializer)


def on_ps(cluster: Cluster, index: int) -> PsState:
    """Add the state of one PS to the default graph."""
    with tf.device(None), tf.device(f"/job:ps/task:{index}/cpu:0"):
        return PsState(
            phase=_variable(f"tfps/phase_{index}", [cluster.num_workers], tf.int32),
            steps=_variable(f"tfps/steps_{index}", [cluster.num_workers], tf.int64),
            ready=_variable(f"tfps/ready_{index}", [], tf.bool),
        )


class JobState:
    """The state of all PS, from one worker's side. Build it while the worker's graph is the default one."""

    def __init__(self, cluster: Cluster, worker: int) -> None:
        servers = [on_ps(cluster, index) for index in range(cluster.num_ps)]
        self._phase = tf.placeholder(tf.int32, [], name="tfps/phase")
        self._steps = tf.placeholder(tf.int64, [], name="tfps/steps")
        self._write = tf.group(
            *(ps.phase.scatter_update(tf.IndexedSlices(self._phase, worker)) for ps in servers),
            *(ps.steps.scatter_update(tf.IndexedSlices(self._steps, worker)) for ps in servers),
        )
        self._set_ready = servers[0].ready.assign(True, read_value=False)
        self._ready = servers[0].ready.read_value()
        self._read = servers[0].phase.read_value(), servers[0].steps.read_value()
        self._up = tf.group(*(ps.phase.read_value().op for ps in servers))

    def write(self, session: Any, phase: int, steps: int) -> None:
        """Tell every PS this worker's phase and how many steps it has taken."""
        session.run(self._write, {self._phase: phase, self._steps: steps})

    def set_ready(self, session: Any) -> None:
        """Let the other workers start: the variables have their values."""
        session.run(self._set_ready)

    def is_up(self, session: Any) -> bool:
        """Tell whether every PS has set up its state."""
        try:
            session.run(self._up)
        except tf.errors.FailedPreconditionError:
            return False
        return True

    def is_ready(self, session: Any) -> bool:
        """Tell whether the variables have their values."""
        return bool(session.run(self._ready))

    def read(self, session: Any) -> tuple[list[int], list[int]]:
        """Return every worker's phase and steps."""
        phase, steps = session.run(self._read)
        return phase.tolist(), steps.tolist()
