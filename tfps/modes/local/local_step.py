"""The step of a worker on its own copy of the variables, between two exchanges."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext
from tfps.modes.copies import WorkerCopies
from tfps.modes.local.round import Round
from tfps.modes.local.state import State
from tfps.modes.sync import step as sync_step
from tfps.tf_types import Operation, Optimizer, Tensor, Variable

_R = TypeVar("_R", bound=Round)


@dataclass(frozen=True)
class LocalStep(Generic[_R]):
    """One local step.

    Attributes:
        state: The variables that it changes, and how they are exchanged.
        copies: The worker's copies of them.
        progress: How far the worker is in its round.
        taken: Takes the step.
    """

    state: State
    copies: WorkerCopies
    progress: _R
    taken: Operation


def build(
    optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext, kind: type[_R]
) -> LocalStep[_R]:
    """Build one step; see ``Mode.build_step``.

    Args:
        optimizer: The model's optimizer.
        loss: Scalar.
        global_step: The variable of the global step.
        context: The job and the worker.
        kind: The kind of rounds.

    Raises:
        ValueError: If the loss depends on no variable, or a variable is no resource variable.
    """
    known = tf.global_variables()
    pairs = sync_step.gradients(optimizer, loss)
    applied = optimizer.apply_gradients(pairs, global_step)
    state = State.of(tf.get_default_graph(), [variable for _, variable in pairs], known, global_step)
    copies = WorkerCopies(state.all, context.task.device)
    progress = kind(copies, global_step, context)
    with tf.control_dependencies([applied]):
        taken = tf.group(global_step.assign_add(1, read_value=False), progress.count_examples())
    return LocalStep(state, copies, progress, taken)
