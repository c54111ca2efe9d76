"""What a model itself changes beside its optimizer, and whether copies on several workers stay equal then."""

from collections.abc import Collection, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates.update_ops import ancestors, is_writer
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.graph_editor import is_handle
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.passes.functions import nodes_within
from tfps.tf_types import Fetch, Operation, Variable

_EARLY = (
    "the model changes {} before the gradient is complete, and a step that is interrupted would make the change twice: "
    "with --mode=allreduce, put it in UPDATE_OPS, and let nothing of the loss wait for it. Or use --mode=sync."
)
_OWN = (
    "the step uses {}, which the model changes by its batch, or at random: with --mode=allreduce, each worker would "
    "have another value. Use --mode=sync."
)


class OwnChanges:
    """The model's own changes of some variables.

    Args:
        variables: The variables, without those of a random generator.
        sent: Operations of the gradients' way to the other workers.
        applied: The update.
    """

    def __init__(self, variables: Sequence[Variable], sent: Sequence[Operation], applied: Fetch) -> None:
        self._graph, self._sent = tf.get_default_graph(), sent
        self._applied = applied if isinstance(applied, tf.Operation) else applied.op
        self._first = {variable.initializer for variable in variables}
        self._names = {variable.op: variable.op.name for variable in variables}

    def check(self) -> None:
        """Check the finished graph of the chief.

        Raises:
            ValueError: If a change comes too early, or would let the copies differ.
        """
        lasting = side_effects.Lasting(self._graph)
        before, applying = set(ancestors(self._sent)), set(ancestors([self._applied]))
        made = _data_of([op for op in before | applying if is_writer(op)])  # what only checks read changes no value
        used = {lasting.origin(tensor) for op in made for tensor in op.inputs if is_handle(tensor)}
        for op in self._graph.get_operations():
            makers = [maker for maker in map(lasting.origin, lasting.changed(op)) if maker in self._names]
            if not makers or op in self._first:
                continue
            if op in before:
                raise ValueError(_EARLY.format(self._names[makers[0]]))
            shared = [maker for maker in makers if maker in used]
            if shared and op not in applying and _is_of_batch(op):
                raise ValueError(_OWN.format(self._names[shared[0]]))


def _is_of_batch(op: Operation) -> bool:
    """Return whether what an operation changes depends on the batch, on random numbers, or on Python."""
    return any(map(differs, _data_of([op])))


def differs(op: Operation) -> bool:
    """Return whether an operation may return something else on another worker: of its batch, at random, by Python."""
    nodes = (op.node_def, *nodes_within(op.graph, op.node_def))
    is_random = any("seed2" in node.attr and side_effects.has_state(node) for node in nodes)
    drawn = is_random or side_effects.draws_from_state(op.graph, op.node_def)
    return drawn or "IteratorGetNext" in op.type or side_effects.acts(op)


def _data_of(ops: Sequence[Operation]) -> Collection[Operation]:
    """Return some operations, and those that they get tensors from, directly or not."""
    return graph_editor.reachable(ops, lambda one: [tensor.op for tensor in one.inputs])
