"""Read the variables of a loop once per step, before the loop.

The body of a ``tf.while_loop``, such as a recurrent net, reads a resource variable again in each iteration. That is a
call to its PS, so the PS takes part in the loop and also gets its condition in each iteration
(``tensorflow/core/graph/graph_partition.cc``). Variables that a step only reads are read before the loop instead, as
TensorFlow 1.x's own variables were. The loop then stays on the worker::

    before   handle (PS) --> Enter --> [loop:  ReadVariableOp (PS) --> body]
    after    handle (PS) --> ReadVariableOp (PS) --> Enter --> [loop:  body]

A read in a branch of ``tf.cond`` still happens only where the branch is taken.

The pass runs before there are gradients. Afterwards, their sums would be in another order and differ in the last bit.
"""

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import control_users, data_users, replace, while_context
from tfps.tf_types import Graph, Operation, Tensor

_READS = ("ReadVariableOp", "VarIsInitializedOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def hoist_loop_reads(graph: Graph) -> None:
    """Make loops use values read before them, except values of variables that the graph itself changes.

    The caller's device scope places the new operations other than the reads.
    """
    first = {variable.initializer for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
    values: dict[object, Tensor] = {}
    for read in [op for op in graph.get_operations() if op.type == "ReadVariableOp"]:
        loop = while_context(read)
        handle = _entered(read.inputs[0])
        if loop is None or not _is_only_read(handle.op, first):
            continue
        with tf.control_dependencies(None):
            if handle.ref() not in values:
                with tf.device(handle.op.device):
                    values[handle.ref()] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=read.outputs[0].dtype)
            replace(read.outputs[0], loop.AddValue(values[handle.ref()]), lambda _user: True)


def is_unused(op: Operation) -> bool:
    """Return whether nothing uses what an operation reads or queries of a variable, or brings into a loop, any more."""
    asks = op.type in ("Enter", "ReadVariableOp", "VarIsInitializedOp")
    return asks and not control_users(op) and all(map(is_unused, data_users(op)))


def _entered(tensor: Tensor) -> Tensor:
    """Return the tensor outside the loops that a chain of ``Enter`` operations brings in as this one."""
    while tensor.op.type == "Enter":
        tensor = tensor.op.inputs[0]
    return tensor


def _is_only_read(op: Operation, first: set[Operation]) -> bool:
    """Return whether an operation's output is only read, except by its initializer."""
    if op.type not in ("VarHandleOp", "Enter", "Switch"):
        return op.type in _READS or op in first
    return all(_is_only_read(user, first) for user in data_users(op))
