"""Functions that operations call: ``tf.function``, ``Defun``, the branches of an ``If``, the body of a ``While``.

An operation names its functions in attributes (``PartitionedCall``, ``If``, ``While``). A call of a ``Defun`` names its
function by its type::

    PartitionedCall(f="inference_f_12")        f_12(x)
"""

from collections.abc import Iterator
from typing import Any

from tfps.runtime.graph.graph_editor import function_of, has_function
from tfps.tf_types import Graph, NodeDef, Operation


def references(node: NodeDef) -> Iterator[Any]:
    """Yield the references to functions among an operation's attributes."""
    for attr in node.attr.values():
        if attr.HasField("func"):
            yield attr.func
        yield from attr.list.func


def called_by(graph: Graph, node: NodeDef) -> list[str]:
    """Return the names of the functions that an operation calls itself, each once."""
    names = [*(reference.name for reference in references(node)), node.op]
    return [name for name in dict.fromkeys(names) if has_function(graph, name)]


def nodes_within(graph: Graph, node: NodeDef) -> Iterator[NodeDef]:
    """Yield all operations in the functions that an operation calls, directly or indirectly."""
    todo = called_by(graph, node)
    for name in todo:  # grows during the loop
        for inner in function_of(graph, name).node_def:
            yield inner
            todo += [other for other in called_by(graph, inner) if other not in todo]


def leaves_within(op: Operation) -> Iterator[NodeDef]:
    """Yield the ``nodes_within`` an operation that call no functions themselves."""
    for node in nodes_within(op.graph, op.node_def):
        if not called_by(op.graph, node):
            yield node
