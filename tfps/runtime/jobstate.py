"""The job's own state, held on the PS as TensorFlow resources, so that the tasks agree on the end among themselves.

Each PS holds a vector with a phase per worker, and the same vector of steps taken. The protocol:

1. A PS sets its vectors to zero as soon as its server is up, and says on what terms it was started.
2. A worker that was started on the same (``agreement``) reads which PS have its mark, then leaves it on all of them.
3. The chief gives the variables their values (initial, or a checkpoint's), then sets ``ready`` on PS 0.
4. The other workers wait for ``ready``, then train.
5. A worker that is through (or was told to stop) writes DONE (or STOPPED) on every PS, and leaves.
   The chief does so last, when the final checkpoint, the evaluation and the summary are written.
   A worker that cannot go on, and would not if it were started again, writes minus its exit code.
6. A PS leaves when every worker is DONE, or one has failed.

A worker that finds its mark has been here before: it was started again, by a platform or a person. Where every PS has
its mark, and no worker waits for another (``async``; before ``ready``; or all others are DONE), it goes on, the chief
too: the PS hold all there is. Where only some have it, PS were started again, and lack their variables; and in ``sync``
the others wait for what the lost worker took along. Then the job has to begin anew from its checkpoint: the worker
tells the PS with its mark to leave, and leaves; so does everyone who misses a PS then. The platform starts them all
again, and they find no marks.

The variables are in no collection: they are no part of the model and of no checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster

RUNNING, STOPPED, DONE = 0, 1, 2  # and below 0, minus an exit code


def _variable(name: str, shape: Sequence[int], dtype: Any) -> Any:
    return tf.Variable(
        lambda: tf.zeros(shape, dtype), dtype=dtype, trainable=False, collections=[], use_resource=True, name=name
    )


def _text(name: str, value: str) -> Any:
    return tf.Variable(lambda: tf.constant(value), trainable=False, collections=[], use_resource=True, name=name)


@dataclass(frozen=True)
class PsState:
    """The state held on one PS, as operations of one graph.

    Attributes:
        phase: int32 variable [num_workers]: RUNNING, STOPPED or DONE, or minus an exit code.
        steps: int64 variable [num_workers]: steps that each worker has taken.
        marks: bool variable [num_workers]: who has joined.
        ready: bool variable: the chief has given the variables their values. Used on PS 0.
        leave: bool variable: the job has to begin anew.
        terms: string variable: what the PS was started on; see ``agreement``.
    """

    phase: Any
    steps: Any
    marks: Any
    ready: Any
    leave: Any
    terms: Any

    @property
    def init_op(self) -> Any:
        """Operation with which the PS sets everything to zero."""
        return tf.group(*(variable.initializer for variable in vars(self).values()))


def on_ps(cluster: Cluster, index: int, terms: str = "") -> PsState:
    """Add the state of one PS to the default graph; the PS itself gives its terms."""
    with tf.device(None), tf.device(f"/job:ps/task:{index}/cpu:0"):
        return PsState(
            phase=_variable(f"tfps/phase_{index}", [cluster.num_workers], tf.int32),
            steps=_variable(f"tfps/steps_{index}", [cluster.num_workers], tf.int64),
            marks=_variable(f"tfps/marks_{index}", [cluster.num_workers], tf.bool),
            ready=_variable(f"tfps/ready_{index}", [], tf.bool),
            leave=_variable(f"tfps/leave_{index}", [], tf.bool),
            terms=_text(f"tfps/terms_{index}", terms),
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
        self._marked = tf.stack([ps.marks.read_value()[worker] for ps in servers])
        self._mark = tf.group(*(ps.marks.scatter_update(tf.IndexedSlices(True, worker)) for ps in servers))
        self._dismiss = [ps.leave.assign(True, read_value=False) for ps in servers]
        self._terms = [ps.terms.read_value() for ps in servers]
        self._up = tf.group(*(variable.read_value().op for ps in servers for variable in vars(ps).values()))

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

    def terms(self, session: Any) -> list[str]:
        """Return by PS what it was started on."""
        return [terms.decode() for terms in session.run(self._terms)]

    def marked(self, session: Any) -> list[bool]:
        """Tell by PS whether this worker has joined it before."""
        marked: list[bool] = session.run(self._marked).tolist()
        return marked

    def join(self, session: Any) -> None:
        """Leave this worker's mark on every PS."""
        session.run(self._mark)

    def dismiss(self, session: Any, which: Sequence[bool]) -> None:
        """Tell some of the PS to leave."""
        session.run([leave for leave, chosen in zip(self._dismiss, which, strict=True) if chosen])

    def is_ready(self, session: Any) -> bool:
        """Tell whether the variables have their values."""
        return bool(session.run(self._ready))

    def read(self, session: Any) -> tuple[list[int], list[int]]:
        """Return every worker's phase and steps."""
        phase, steps = session.run(self._read)
        return phase.tolist(), steps.tolist()
