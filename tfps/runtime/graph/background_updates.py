"""The updates that the chief repeats in the background, in the modes that have them: several per run."""

import functools
import threading
from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import Step
from tfps.runtime.graph import placement
from tfps.runtime.graph.cancel_safe_iterator import INPUTS
from tfps.runtime.graph.graph_editor import (
    add_control_inputs,
    can_wait,
    descendants,
    is_handle,
    is_in_control_flow,
    order,
    reachable,
)
from tfps.runtime.graph.passes import side_effects, wire_packing
from tfps.runtime.graph.passes.unrolling import UnrolledStep
from tfps.tf_types import Graph, Operation, Session, Tensor

_IN_A_RUN = 8
_OF_A_BATCH = (
    "the optimizer needs the batch, perhaps for its learning rate: with --mode=sync an update combines the gradients "
    "of all workers and has no batch. Make the rate depend on the step, or keep its input in a variable"
)
_OF_A_STEP = (
    "the optimizer needs the change of {}, which each step makes because log_tensors, a summary or UPDATE_OPS has it: "
    "with --mode=sync an update is no part of a worker's step. Put the change in UPDATE_OPS alone, and let the "
    "optimizer and log_tensors read the variable"
)


class UpdateRunner:
    """Runs an operation repeatedly, in a separate thread and session, until it fails or ``end`` is called.

    Args:
        session: A session on the chief, used only here. When workers interrupt a step, the update in progress
            continues.
        update: The operation.
        now: Placeholders to feed, and their values.

    Attributes:
        error: The error that ended the updates, or ``None``.
    """

    def __init__(self, session: Session, update: Operation, now: Mapping[Tensor, object]) -> None:
        self.error: Exception | None = None
        self._session = session
        self._run = functools.partial(session.make_callable(update, list(now)), *now.values())
        threading.Thread(target=self._keep_running, daemon=True, name="updates").start()

    def _keep_running(self) -> None:
        try:
            while True:
                self._run()
        except (tf.errors.CancelledError, RuntimeError):  # the session, or the queue of the updates, was closed
            return
        except tf.errors.OpError as error:
            self.error = error

    def end(self) -> None:
        """Close the session, which interrupts the update in progress."""
        self._session.close()


def unrolled(graph: Graph, step: Step, packed: bool) -> Operation | None:
    """Return several updates of a mode as one operation, so that most of them do not wait for Python.

    Each update is a copy. An update and a worker's step may share a value, such as a learning rate that the model keeps
    in a variable. The step reads it when it starts. The update reads it when the update starts: when it has the
    gradients. What an update changes is there before any worker has the token for the next gradient. Only what acts
    outside TensorFlow needs an order of its own. There is only one update if copies would not keep that order: a print
    in a branch that is not taken would stop those after it.

    Args:
        graph: The training graph.
        step: The step of the mode.
        packed: Whether tensors that cross tasks are packed.

    Returns:
        The operation, or ``None`` if the mode has no such updates.

    Raises:
        ValueError: If an update would read a batch from the input, or wait for one.
    """
    if step.update is None:
        return None
    if packed:
        wire_packing.pack(graph, [step.update])
    made = placement.ancestors([step.update])
    if any(op.type in INPUTS for op in made):
        raise ValueError(_why_with_batch(step.update))
    steps, early = UnrolledStep(graph, [step.update], apart=True), set(placement.ancestors(step.update_starts))
    after = set(descendants(step.update_starts, within=set(made).__contains__))
    late = [op for op in made if op not in early and _waits(op) and (op not in after or not side_effects.changes(op))]
    for number in range(1, (1 if any(map(_acts_apart, made)) else _IN_A_RUN) + 1):
        copy = steps.copy(number)
        for op in late:
            add_control_inputs(copy(op), [copy(begin) for begin in step.update_starts])
    # The last copy runs the copies before it: it waits for them through the resources that all of them use.
    return copy(step.update)


def use_worker_state(step: Step) -> bool:
    """Return whether the updates of a mode use a variable of the chief's worker, or call Python there.

    The chief's steps may change what such an update uses, so none may be ahead of it.
    """
    if step.update is None:
        return False
    late = set(placement.ancestors([step.update])) - set(placement.ancestors(step.update_starts))
    return any(side_effects.acts(op) or any(not _is_on_ps(handle) for handle in _handles(op)) for op in late)


def _why_with_batch(update: Operation) -> str:
    """Return why an update would read a batch. It may only use a change that waits for one: ``inputs.only_with``."""

    def needs(op: Operation) -> Sequence[Operation]:
        built_with = [one for one in op.control_inputs if one.type not in INPUTS and order(one) < order(op)]
        return [*(tensor.op for tensor in op.inputs), *built_with]  # without the edges that passes have added

    made = reachable([update], needs)
    with_batch = [op for op in made if any(one.type in INPUTS for one in op.control_inputs)]
    changed = [handle.op.name for op in with_batch if side_effects.changes(op) for handle in _handles(op)]
    return _OF_A_BATCH if not changed or any(op.type in INPUTS for op in made) else _OF_A_STEP.format(changed[0])


def _waits(op: Operation) -> bool:
    """Return whether an operation uses a resource, takes it into a branch or a loop, calls Python or prints.

    Operations that count something, or call a function that reads a learning rate, take no gradient. Without a control
    edge they would run one update too early. What is in a loop waits for the entry of the loop.
    """
    return can_wait(op) and (bool(_handles(op)) or side_effects.acts(op))


def _acts_apart(op: Operation) -> bool:
    """Return whether an operation acts outside TensorFlow in a branch or loop, or has state that no copy shares."""
    is_inside = is_in_control_flow(op) or op.type in ("If", "Case", "While")
    return side_effects.has_hidden_state(op) or (is_inside and side_effects.acts(op))


def _handles(op: Operation) -> Sequence[Tensor]:
    """Return the resources among an operation's inputs, without those that end with the update."""
    return [tensor for tensor in op.inputs if is_handle(tensor) and tensor.op.type not in side_effects.OF_A_STEP]


def _is_on_ps(handle: Tensor) -> bool:
    return placement.holds_state(handle.op)
