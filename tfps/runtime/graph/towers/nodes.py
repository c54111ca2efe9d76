"""The definitions of copied operations: their edges, frames, seeds, and the functions that they call.

A copy of a step (``passes.unrolling``) and a copy of a model for another device (``copies``) are made from them.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import function_of
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.passes.functions import called_by, references
from tfps.tf_types import Graph, NodeDef, Operation


class NodeCopies:
    """Makes the definitions of copies of some operations.

    Args:
        graph: The graph of the operations.
        ops: The operations. Control edges from others are left out of the copies.
        scope: The beginning of the names of copies, which their number follows: ``tfps/step_``.
        stride: The difference between the seeds of a random operation in two copies.
    """

    def __init__(self, graph: Graph, ops: Sequence[Operation], scope: str, stride: int) -> None:
        self._graph, self._ops, self._scope, self._stride = graph, ops, scope, stride
        self._names = {op.name for op in ops}

    def definition(self, number: int) -> Any:
        """Return the ``tf.GraphDef`` of a copy. It has the functions that the copy needs of its own."""
        wanted = tf.GraphDef(versions=self._graph.graph_def_versions, node=[self._node(op, number) for op in self._ops])
        for node in wanted.node:
            self._reseed_functions(node, number, wanted.library)
        return wanted

    def _node(self, op: Operation, number: int) -> NodeDef:
        """Return the definition of an operation for the copy."""
        node = tf.NodeDef()
        node.CopyFrom(op.node_def)
        inputs = [name for name in node.input if not name.startswith("^") or name[1:] in self._names]
        del node.input[:]
        node.input.extend(inputs)
        if "_class" in node.attr:
            places = node.attr["_class"].list.s
            near = [place for place in places if place.decode().removeprefix("loc:@") in self._names]
            del places[:]
            places.extend(near)
        for name in ("frame_name", "var_name"):  # loops, or temporary variables, with the same name would be one
            if name in node.attr:
                node.attr[name].s += f"/{self._scope.rpartition('/')[-1]}{number}".encode()
        side_effects.reseed(node, number * self._stride)
        return node

    def _reseed_functions(self, node: NodeDef, number: int, library: Any) -> None:
        """Make an operation call copies of its functions if they draw random numbers. Add the copies to a library."""
        if not side_effects.draws(self._graph, node):
            return
        called = called_by(self._graph, node)
        for reference in references(node):
            reference.name = (
                self._copied(reference.name, number, library) if reference.name in called else reference.name
            )
        if node.op in called:
            node.op = self._copied(node.op, number, library)

    def _copied(self, name: str, number: int, library: Any) -> str:
        """Return the name of a copy of a function in a library, which it is added to. It draws other numbers."""
        copied = f"{name}_{self._scope.replace('/', '_')}{number}"
        if all(function.signature.name != copied for function in library.function):
            made = library.function.add()
            made.CopyFrom(function_of(self._graph, name))
            made.signature.name = copied
            for inner in made.node_def:
                side_effects.reseed(inner, number * self._stride)
                self._reseed_functions(inner, number, library)
        return copied
