"""What an error of TensorFlow means for the job: a lost PS, or the model's own line."""

import re
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster, Task
from tfps.errors import PeerLostError, TfpsError
from tfps.models import Model, mistake
from tfps.report import brief
from tfps.runtime import net
from tfps.runtime.heartbeat import FORGOTTEN

_EITHER = "another process has replaced this task, which was taken for lost, or a PS was started again"
REPLACED = f"a PS knows nothing of this task any more: {_EITHER}. This one ends."
_POLL_SECS = 0.02
_GONE_AFTER_SECS = 2.0
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.FailedPreconditionError,
    tf.errors.CancelledError,
)


def explained(error: Any, cluster: Cluster, model: Model, graph: Any) -> TfpsError:
    """Return what an error of a run means; the log gets all of it.

    Args:
        error: A ``tf.errors.OpError``.
        cluster: Whose PS may be lost.
        model: Whose operations may have failed.
        graph: Of the run.
    """
    print(f"{type(error).__name__}: {error.message}", file=sys.__stderr__, flush=True)
    if not isinstance(error, _LOST):
        return mistake(model, type(error)(None, None, brief(error)), _made_at(error, graph))
    if FORGOTTEN in error.message:
        return PeerLostError(REPLACED)
    names = _lost_ps(cluster)
    told = f"a PS broke off what this task did ({brief(error)}), and answers: {_EITHER}"
    what = f"lost {', '.join(map(str, names))}" if names else told
    return PeerLostError(f"{what}: start this task again to go on from the last checkpoint.")


def _made_at(error: Any, graph: Any) -> Sequence[Any]:
    """Return the calls that made the operation which failed; only its name is known, and that not always."""
    made = {op.name: op for op in graph.get_operations()}
    names = [name for name in re.findall(r"\{\{node ([^}]+)\}\}", error.message) if name in made]
    calls = made[names[0]].traceback if names else []
    return [traceback.FrameSummary(call.filename, call.lineno, call.name) for call in calls]


def _lost_ps(cluster: Cluster) -> Sequence[Task]:
    """Return the PS that do not answer; one that was just killed may take a moment to be gone."""
    deadline = time.monotonic() + _GONE_AFTER_SECS
    servers = [task for task in cluster.tasks() if task.job == "ps"]
    while not (absent := net.missing(cluster, servers)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return absent
