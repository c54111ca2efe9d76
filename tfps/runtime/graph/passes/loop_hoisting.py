"""Variables that a loop reads: once a step, before the loop.

In the body of a ``tf.while_loop``, of a recurrent net for one, a resource variable is read anew in each turn: a call to
its PS, which thus takes part in the loop and is sent its condition in each turn, too (``tensorflow/core/graph/
graph_partition.cc``). What a step does nothing but read is read before the loop instead, as TensorFlow 1.x's own
variables were: the loop stays on the worker. In a branch of ``tf.cond`` it is read only where that is taken, as ever.

It is done before there are gradients: their sums would be in another order after it, and the last bit another.
"""

from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import replace
from tfps.tf_types import Graph, Operation, Tensor

_READS = ("ReadVariableOp", "VarIsInitializedOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def hoist_loop_reads(graph: Graph) -> None:
    """Let the loops of a graph use values read before them; not of variables that the graph itself changes.

    What that takes beside the reads is placed by the device scope of the caller.
    """
    first = {variable.initializer for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
    values: dict[Any, Any] = {}
    for read in [op for op in graph.get_operations() if op.type == "ReadVariableOp"]:
        loop, handle = read._get_control_flow_context(), _entered(read.inputs[0])
        if loop is None or not loop.IsWhileContext() or not _is_only_read(handle.op, first):
            continue
        with tf.control_dependencies(None):
            if handle.ref() not in values:
                with tf.device(handle.op.device):
                    values[handle.ref()] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=read.outputs[0].dtype)
            replace(read.outputs[0], loop.AddValue(values[handle.ref()]), lambda _user: True)


def is_unused(op: Operation) -> bool:
    """Return whether nothing uses (any more) what an operation reads, or asks, of a variable, or brings into a loop."""
    users = [user for output in op.outputs for user in output.consumers()]
    asks = op.type in ("Enter", "ReadVariableOp", "VarIsInitializedOp")
    return asks and not op._control_outputs and all(map(is_unused, users))


def _entered(tensor: Tensor) -> Any:
    """Return the tensor that is brought into the loops in which this one is used."""
    while tensor.op.type == "Enter":
        tensor = tensor.op.inputs[0]
    return tensor


def _is_only_read(op: Operation, first: set[Any]) -> bool:
    """Return whether all that is done to what an operation brings, beside giving it its first value, is to read it."""
    if op.type not in ("VarHandleOp", "Enter", "Switch"):
        return op.type in _READS or op in first
    return all(_is_only_read(user, first) for output in op.outputs for user in output.consumers())
