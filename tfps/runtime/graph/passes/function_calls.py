"""Make calls of functions that have side effects wait for all of their inputs.

Like all operations, a call waits for its inputs. But TensorFlow replaces a call by the body of its function if some
other operation waits for the call by a control edge, as other passes make it. An operation of the body then waits only
for the inputs that it uses, and for what the call waits for by control edges (``InlineFunctionBody`` in
tensorflow/core/common_runtime/inline_function_utils.cc). An order that the model gives through an input is lost::

    model         assign v --(control)--> x --> call f: reads v
    TensorFlow    assign v --(control)--> x --> what uses x in f,  and  read v: unordered

So the call also waits by a control edge for the size of each input. An edge from the input itself would not do, because
TensorFlow removes a control edge that is parallel to a data edge::

    after         assign v --(control)--> x --> size of x --(control)--> call f
"""

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import (
    add_control_inputs,
    is_call,
    is_handle,
    is_in_control_flow,
    set_control_inputs,
)
from tfps.tf_types import Graph, Operation


def wait_for_inputs(graph: Graph) -> None:
    """Make the calls of a graph wait for their inputs, except those in a branch or a loop of the graph itself."""
    for op in graph.get_operations():
        if is_call(op) and op.op_def.is_stateful and not is_in_control_flow(op):
            _wait(op)


def _wait(call: Operation) -> None:
    values = list({tensor.ref(): tensor for tensor in call.inputs if not is_handle(tensor)}.values())
    with call.graph.as_default(), tf.device(None), tf.device(call.device), tf.control_dependencies(None):
        sizes = [tf.raw_ops.Size(input=tensor, out_type=tf.int32).op for tensor in values]
    add_control_inputs(call, sizes)


def order_inputs(graph: Graph) -> None:
    """Put the control inputs of loops behind their other inputs, after gradients are built, as TensorFlow wants them.

    The gradient of a loop adds inputs to it (``_WhileGrad`` in tensorflow/python/ops/while_v2.py), behind the control
    inputs that passes have added.
    """
    for op in graph.get_operations():
        if op.type in ("While", "StatelessWhile") and op.control_inputs:
            set_control_inputs(op, op.control_inputs)
