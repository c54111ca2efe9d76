"""Translate an error of TensorFlow to its meaning for the job: a lost PS, or a line of the model."""

import re
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.errors import DataError, PeerLostError, TfpsError
from tfps.models.model import Model, mistake, where
from tfps.modes.updates.moments import FENCED
from tfps.runtime.coordination.heartbeat import FORGOTTEN
from tfps.runtime.graph.placement import holds_state
from tfps.text import brief
from tfps.tf_types import Graph, Operation

_EITHER = "another process replaced this task, which was presumed lost, or a PS restarted, or the network cut them off"
REPLACED = f"a PS no longer knows this task: {_EITHER}. This process exits."
_TAKEN_FOR_LOST = (
    "this task gave no sign of life and was presumed lost: other workers took its remaining steps. "
    "Restart this task to continue, if the job has not ended."
)
_POLL_SECS = 0.02
_GONE_AFTER_SECS = 2.0
_PART = re.compile(r"^(?=[A-Z_]+: From /job:)", re.MULTILINE)  # one task's part of an error that several tasks report
_NODE = re.compile(r"\[\[(?:\{\{node )?([^}\]]+)")
_COPY = re.compile(r"^tfps/step_[0-9]+(_[0-9]+)?/")  # an operation of a run's further steps; see ``unrolling``
_PYTHON = re.compile(r'^ *File "([^"]+)", line ([0-9]+)', re.MULTILINE)
_TASK = re.compile(r"^(?:[A-Z_]+: )?From /job:\S+:\s*")  # names where it ran, which is this task
_INPUTS = ("IteratorGetNext", "MultiDeviceIteratorGetNextFromShard", "MakeIterator", "MultiDeviceIteratorInit")
_STATE = re.compile("variable|initialized|[Rr]esource")  # state that a PS no longer has
_MEMORY = re.compile("OOM|alloc|[Mm]emory")  # rather than a full disk, or too many open files
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.FailedPreconditionError,
    tf.errors.CancelledError,
)


def translate_error(error: Any, cluster: Cluster, model: Model, graph: Graph, batch_size: int) -> TfpsError:
    """Return the error that the job ends with for an error of a run; log the original in full.

    Args:
        error: A ``tf.errors.OpError``.
        cluster: The cluster, whose PS may be lost.
        model: The model, whose operations may have failed.
        graph: The graph of the run.
        batch_size: The job's batch size.
    """
    if FENCED in error.message:
        _log(error)
        return PeerLostError(_TAKEN_FOR_LOST)
    if not is_of_peers(error, graph):
        return failed(error, model, graph, batch_size)
    _log(error)
    if FORGOTTEN in error.message:
        return PeerLostError(REPLACED)
    names = _lost_ps(cluster)
    text = f"{cluster.state_holder} canceled a request of this task ({brief(error)}), but answers: {_EITHER}"
    what = f"lost {', '.join(map(str, names))}" if names else text
    return PeerLostError(f"{what}: restart this task to continue from the last checkpoint.")


def is_of_peers(error: Any, graph: Graph) -> bool:
    """Return whether an error of a run on a cluster means a lost task, and not a fault of the model or the data.

    Lost state on a PS has the same error type as a file that is a directory. Then the failed operation decides.
    """
    cause = _cause(error)
    named = _named_in(cause, graph) if isinstance(error, _LOST) else []
    if isinstance(error, (tf.errors.FailedPreconditionError, tf.errors.UnavailableError)) and _has_input(named):
        return False
    if isinstance(error, tf.errors.FailedPreconditionError) and named and not _STATE.search(cause):
        return any(map(holds_state, named))
    return isinstance(error, _LOST)


def failed(error: Any, model: Model, graph: Graph, batch_size: int) -> TfpsError:
    """Return the error for a failed operation: a ``DataError`` if the input failed, else one of the model.

    Args:
        error: A ``tf.errors.OpError``.
        model: The model.
        graph: The graph of the run.
        batch_size: The job's batch size.
    """
    _log(error)
    text = _TASK.sub("", brief(error))
    if isinstance(error, tf.errors.ResourceExhaustedError) and _MEMORY.search(text):
        text += f" (out of memory: give a smaller --batch_size than {batch_size}, or a smaller model)"
    named = _named_in(_cause(error), graph)
    if _has_input(named):
        place = where(model, _in_input(error, graph)) or model.line_of("input_fn")
        return DataError(f"--model={model.name}: {place}: the input failed: {type(error).__name__}: {text}")
    table = _table(named[0]) if named else None
    text += f", in a lookup of rows of the variable {table.name!r}" if table else ""
    frames = _frames(named[0]) if named else []
    if table and not where(model, frames):  # the lookup is of ``embedding_rows``
        frames = _frames(table)
    return mistake(model, type(error)(None, None, text), frames)


def _table(op: Operation) -> Operation | None:
    """Return the variable of which an operation looks up rows."""
    table = op.inputs[0].op if op.type == "ResourceGather" else None
    return table if table is not None and table.type == "VarHandleOp" else None


def _log(error: Any) -> None:
    print(f"{type(error).__name__}: {error.message}", file=sys.__stderr__, flush=True)


def _has_input(ops: Iterable[Operation]) -> bool:
    return any(op.type in _INPUTS for op in ops)


def _cause(error: Any) -> str:
    """Return the part of an error about its cause, without those of other tasks, which stopped because of it.

    TensorFlow joins the errors of several tasks, each with its code. Those with the code of the whole error come first
    (``StatusGroup::as_summary_status`` in tsl's status.cc). A lost PS is followed by the input that was waited for.
    """
    _, *parts = _PART.split(error.message)
    codes = [part.partition(":")[0] for part in parts]
    return "".join(part for part, code in zip(parts, codes, strict=True) if code == codes[0]) or str(error.message)


def _named_in(text: str, graph: Graph) -> Sequence[Any]:
    """Return the operations of a graph that an error's text names; often nothing else shows which ones failed.

    For a copy, return the operation that was copied, because only that one knows where it was created.
    """
    made = {op.name: op for op in graph.get_operations()}
    named = [(name, _COPY.sub("", name)) for name in _NODE.findall(text)]
    return [made.get(original, made[name]) for name, original in named if name in made]


def _in_input(error: Any, graph: Graph) -> Sequence[Any]:
    """Return where the input failed: from Python's traceback, or else where the failed operation was created."""
    cause = _cause(error)
    frames = [traceback.FrameSummary(file, int(line), "") for file, line in _PYTHON.findall(cause)]
    if frames:
        return frames
    functions = [getattr(function, "graph", None) for function in graph._functions.values()]
    ops = [op for inner in functions if inner is not None for op in _named_in(cause, inner)]
    return _frames(ops[0]) if len(ops) == 1 else []


def _frames(op: Operation) -> Sequence[Any]:
    """Return where an operation was created; empty for an operation of an imported graph."""
    return [traceback.FrameSummary(call.filename, call.lineno, call.name) for call in op.traceback or ()]


def _lost_ps(cluster: Cluster) -> Sequence[Task]:
    """Return the PS that do not answer; wait briefly, because a PS that was just killed may answer for a moment."""
    deadline = time.monotonic() + _GONE_AFTER_SECS
    while not (absent := rendezvous.missing(cluster, cluster.state_tasks)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return absent
