"""The updates that the chief keeps running in the background, in the modes that have such: several in a run."""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.base import Step
from tfps.runtime.graph import placement
from tfps.runtime.graph.cancel_safe_iterator import INPUTS
from tfps.runtime.graph.graph_editor import is_in_every_step
from tfps.runtime.graph.passes import side_effects, wire_packing
from tfps.runtime.graph.passes.unrolling import UnrolledStep
from tfps.tf_types import Graph, Operation, Session

_IN_A_RUN = 8
_OF_A_BATCH = (
    "the optimizer needs the batch, for its learning rate perhaps: with --mode=sync an update is made of the gradients "
    "of all workers, and has no batch. Let the rate depend on the step, or keep what it depends on in a variable"
)


class UpdateRunner:
    """Runs an operation again and again, in a thread and a session of its own, until it fails or is ended.

    Args:
        session: On the chief, for this alone; when workers break off a step, the update that has begun goes on.
        update: The operation.
        now: Placeholders that it is run with, and their values.

    Attributes:
        error: Why there are no more updates, if that is an error.
    """

    def __init__(self, session: Session, update: Any, now: Mapping[Any, Any]) -> None:
        self.error: Exception | None = None
        self._session = session
        self._run = functools.partial(session.make_callable(update, list(now)), *now.values())
        threading.Thread(target=self._keep_running, daemon=True, name="updates").start()

    def _keep_running(self) -> None:
        try:
            while True:
                self._run()
        except (tf.errors.CancelledError, RuntimeError):  # the session is closed, or the queue of the updates
            return
        except tf.errors.OpError as error:
            self.error = error

    def end(self) -> None:
        """Close the session: the update that is under way is broken off."""
        self._session.close()


def unrolled(graph: Graph, step: Step, packed: bool) -> Any:
    """Return several updates of a mode as one operation, so that between most of them no Python is waited for.

    Each is a copy. What an update shares with the worker's step, as a learning rate that the model keeps in a variable,
    the step reads when it begins, and the update when that begins: when it has the gradients.

    Args:
        graph: The training graph.
        step: The mode's.
        packed: Whether what crosses tasks travels packed.

    Returns:
        The operation; ``None`` where the mode has no such updates.

    Raises:
        ValueError: If an update would take a batch of its own.
    """
    if step.update is None:
        return None
    if packed:
        wire_packing.pack(graph, [step.update])
    made = placement.ancestors([step.update])
    if any(op.type in INPUTS for op in made):
        raise ValueError(_OF_A_BATCH)
    steps, early = UnrolledStep(graph, [step.update], apart=True), set(placement.ancestors(step.update_starts))
    after = _after(step.update_starts, made)
    late = [op for op in made if op not in early and _uses_ps(op) and (op not in after or not side_effects.changes(op))]
    for number in range(1, _IN_A_RUN + 1):
        copy = steps.copy(number)
        for op in late:
            copy(op)._add_control_inputs([copy(begin) for begin in step.update_starts])
    return copy(step.update)


def _after(begins: Sequence[Operation], ops: Sequence[Operation]) -> set[Any]:
    """Return those of some operations that need others anyway."""
    known, found, todo = set(ops), set(begins), list(begins)
    for op in todo:  # grows while it is read
        users = [user for output in op.outputs for user in output.consumers()] + list(op._control_outputs)
        new = [user for user in dict.fromkeys(users) if user in known and user not in found]
        found.update(new)
        todo += new
    return found


def _uses_ps(op: Operation) -> bool:
    """Return whether an operation uses what a PS holds, and is in no branch and no loop.

    To count something, or to call a function that reads a learning rate, takes no gradient, and would come an update
    early.
    """
    handles = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    return any(placement.task_of(handle).startswith("ps/") for handle in handles) and is_in_every_step(op)
