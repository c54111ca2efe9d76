"""What operations do beside giving tensors: change state of the worker's own, call Python, print, draw random numbers.

Steps of one run follow each other in this, and where there is such state or such a call, one run follows the other.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import op_def_registry

_HARMLESS = ("CheckNumerics", "CheckNumericsV2", "Assert", "ConsumeMutexLock", "Placeholder", "Timestamp")
_READS = (
    "ReadVariableOp",
    "VarIsInitializedOp",
    "VariableShape",
    "ResourceGather",
    "ResourceGatherNd",
    "LookupTableFind",
    "LookupTableFindV2",
    "LookupTableSize",
    "LookupTableSizeV2",
    "LookupTableExport",
    "LookupTableExportV2",
    "Identity",
    "IsVariableInitialized",
    "IteratorGetNext",
    "MultiDeviceIteratorGetNextFromShard",
    "Enter",
    "RefEnter",
    "Switch",
    "RefSwitch",
)


def acts(op: Any) -> bool:
    """Tell whether an operation does something outside TensorFlow, as to call Python or to print, so that order counts.

    It may do so in a function that it calls.
    """
    handles = [tensor for tensor in (*op.inputs, *op.outputs) if _is_handle(tensor)]
    return not handles and _acts(op.type) and (not _is_call(op) or any(_acts(node.op) for node in _nodes(op)))


def changes(op: Any) -> bool:
    """Tell whether an operation that uses a variable, a table or the like may change it."""
    return op.type not in _READS


def draws(graph: Any, name: str) -> bool:
    """Tell whether a function of a graph draws random numbers by a seed, or calls one that does."""
    return any(_seed(node) for node in _nodes_of(graph, name, set()))


def reseed(node: Any, shift: int) -> None:
    """Let an operation that draws random numbers by a seed draw others."""
    if _seed(node):
        node.attr["seed2"].i += shift


def functions_of(node: Any) -> Iterator[Any]:
    """Yield the references to functions among an operation's attributes."""
    for attr in node.attr.values():
        if attr.HasField("func"):
            yield attr.func
        yield from attr.list.func


def _acts(kind: str) -> bool:
    known = op_def_registry.get(kind)
    if known is None or not known.is_stateful or kind in _HARMLESS:
        return False
    return not any(attr.name == "seed" for attr in known.attr)


def _seed(node: Any) -> bool:
    known = op_def_registry.get(node.op)
    drawn = known is not None and known.is_stateful and "seed2" in node.attr
    return bool(drawn and (node.attr["seed"].i or node.attr["seed2"].i))


def _is_handle(tensor: Any) -> bool:
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def _is_call(op: Any) -> bool:
    return any(True for _ in functions_of(op.node_def))


def _nodes(op: Any) -> Iterator[Any]:
    """Yield all that runs in the functions which an operation calls, but for what only calls others."""
    seen: set[str] = set()
    for called in functions_of(op.node_def):
        for node in _nodes_of(op.graph, called.name, seen):
            if not any(True for _ in functions_of(node)):
                yield node


def _nodes_of(graph: Any, name: str, seen: set[str]) -> Iterator[Any]:
    if name in seen:
        return
    seen.add(name)
    for node in graph._get_function(name).definition.node_def:
        yield node
        for called in functions_of(node):
            yield from _nodes_of(graph, called.name, seen)
