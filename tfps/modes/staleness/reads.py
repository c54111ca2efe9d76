"""How a step reads the parameters: the operations, found when all graph passes are done."""

from collections.abc import Collection, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates.update_ops import ancestors, let_wait
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.graph_editor import is_handle
from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Operation, Variable

_NO_READS = ("VarIsInitializedOp", "VariableShape")


def of_gradients(
    gates: Collection[Operation], variables: Collection[Variable]
) -> Mapping[Operation, Sequence[Operation]]:
    """Return the operations that read variables for the gradients of a step, by the creator of the variable's handle.

    Args:
        gates: The operations that return the gradients.
        variables: Resource variables.
    """
    lasting = side_effects.Lasting(tf.get_default_graph())
    found: dict[Operation, list[Operation]] = {lasting.origin(variable.handle): [] for variable in variables}
    for op in sorted(ancestors(gates), key=graph_editor.order):
        for maker in {lasting.origin(tensor) for tensor in op.inputs if is_handle(tensor)} & set(found):
            if op.type not in _NO_READS:
                found[maker].append(op)
    return {variable.handle.op: found[lasting.origin(variable.handle)] for variable in variables}


def begin_after(reads: Sequence[Operation], before: Operation) -> None:
    """Make reads wait for an operation on the same PS. In a loop, the entry of the variable waits."""
    for op in filter(graph_editor.can_wait, reads):
        let_wait([op], [before])
        if graph_editor.is_call(op):  # TensorFlow replaces a call by its body, and not all of that waits for it
            _let_handles_wait(op, before)


def _let_handles_wait(call: Operation, before: Operation) -> None:
    for index, tensor in enumerate(list(call.inputs)):
        if is_handle(tensor):
            with graph_editor.beside(call), tf.device(tensor.op.device), tf.control_dependencies([before]):
                graph_editor.set_input(call, index, tf.identity(tensor))
