"""Side effects of operations: they change state on the worker, call Python, print, or draw random numbers.

Steps of one run keep the order of these effects. Runs with such state or such calls follow each other.

Only ``reseed`` changes a node. An example of ``Lasting``::

    VarHandleOp "v" --> Identity "i" --> PartitionedCall f        f(x): AssignAddVariableOp(x)
        changed(call) = ["i:0"], the handle that the call gets    origin("i:0") = VarHandleOp "v"
    reseed:  RandomUniform(seed2=5) becomes RandomUniform(seed2=5 + shift)
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from tfps.runtime.graph.graph_editor import function_of, has_function, is_call, is_handle
from tfps.runtime.graph.passes.functions import called_by, leaves_within, nodes_within
from tfps.runtime.graph.placement import ancestors, task_of
from tfps.tf_types import FuncGraph, Graph, NodeDef, Operation, Tensor

_HARMLESS = ("CheckNumerics", "CheckNumericsV2", "Assert", "ConsumeMutexLock", "Placeholder", "Timestamp")
_READS = (
    *("ReadVariableOp", "VarIsInitializedOp", "VariableShape", "ResourceGather", "ResourceGatherNd"),
    *("LookupTableFind", "LookupTableFindV2", "LookupTableSize", "LookupTableSizeV2", "LookupTableExport"),
    *("LookupTableExportV2", "Identity", "IdentityN", "RefIdentity", "IsVariableInitialized"),
    *("IteratorGetNext", "MultiDeviceIteratorGetNextFromShard", "Enter", "RefEnter", "Switch", "RefSwitch"),
    *("Merge", "RefMerge", "Exit", "RefExit", "NextIteration", "RefNextIteration"),
)
_VALUES = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
OF_GENERATORS = ("StatefulRandom", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform", "Rng")
OF_A_STEP = ("TensorArrayV3", "StackV2", "TemporaryVariable")  # their resources end with the step
_ADDS = (
    "AssignAdd",
    "AssignAddVariableOp",
    "AssignSub",
    "AssignSubVariableOp",
    "ResourceCountUpTo",
    "ResourceScatterNdAdd",
    "ResourceScatterNdSub",
    "ScatterAdd",
    "ScatterNdAdd",
    "ScatterNdSub",
    "ScatterSub",
)
_HIDDEN_STATE = ("LearnedUnigramCandidateSampler", "RecordInput", "Skipgram", "ThreadUnsafeUnigramCandidateSampler")
_PLAIN_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOKS_AT_NAN = ("IsNan", "IsFinite")


def identity_of(op: Operation) -> object:
    """Return a key of the resource whose handle an operation creates: equal keys mean one resource.

    Two operations with the same ``shared_name`` on one task create handles of the same resource.
    """
    attrs = op.node_def.attr
    shared_name = attrs["shared_name"].s if "shared_name" in attrs else b""
    return (op.type, attrs["container"].s, shared_name, task_of(op)) if shared_name else op


def acts(op: Operation) -> bool:
    """Return whether an operation acts outside TensorFlow (calls Python, prints), so that its order matters.

    It may do so in a function that it calls.
    """
    if has_function(op.graph, op.type) or (_acts(op.type) and is_call(op)):
        return any(_acts(node.op) for node in leaves_within(op))
    handles = [tensor for tensor in (*op.inputs, *op.outputs) if is_handle(tensor)]
    is_dataset = op.outputs and op.outputs[0].dtype == tf.variant  # it may be stateful, but describes elements only
    return not (handles or is_dataset) and _acts(op.type)


def changes(op: Operation) -> bool:
    """Return whether an operation that uses a variable, a table or the like may change it."""
    return op.type not in _READS


def returns_values(op: Operation) -> bool:
    """Return whether an operation gives values of a variable that it uses to others, or calls a function, which may."""
    return is_call(op) or (op.type in _VALUES and bool(op.outputs[0].consumers()))


def only_adds(op: Operation) -> bool:
    """Return whether an operation only adds to the resources it changes, so that concurrent ones lose nothing."""
    if is_call(op):
        return all(node.op in (*_READS, *_ADDS) for node in leaves_within(op) if _uses_handle(node))
    return op.type in _ADDS


def has_hidden_state(op: Operation) -> bool:
    """Return whether an operation, or one in a function that it calls, keeps state that its copies do not share."""
    return op.type in _HIDDEN_STATE or any(node.op in _HIDDEN_STATE for node in leaves_within(op))


def may_be_nan(tensor: Tensor) -> bool:
    """Return whether the type of a tensor has NaN."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


class Lasting:
    """The effects of a graph's operations on resources that outlast a step: variables, tables and the like.

    It includes the effects of functions that an operation calls, directly or indirectly.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._bodies: dict[str, FuncGraph] = {}

    @functools.cached_property
    def _makers(self) -> dict[object, Operation]:
        """The first operation that creates a handle of each resource, by ``identity_of``."""
        makers = [op for op in self._graph.get_operations() if not op.inputs and any(map(is_handle, op.outputs))]
        return {identity_of(op): op for op in reversed(makers)}

    def changed(self, op: Operation) -> Sequence[Tensor]:
        """Return those handles among an operation's inputs whose resources it may change."""
        return self._used(op, changes)

    def drawn(self, op: Operation) -> Sequence[Tensor]:
        """Return those handles among an operation's inputs from whose states it draws random numbers."""
        return self._used(op, lambda one: bool(one.type.startswith(OF_GENERATORS)))

    def _used(self, op: Operation, uses: Callable[[Operation], bool]) -> Sequence[Tensor]:
        """Return those handles among an operation's inputs that it uses in some way, or a function that it calls."""
        called = self._called(op)
        handles = [one for one in _handles(op) if self.origin(one).type not in OF_A_STEP] if called or uses(op) else []
        if not called or not handles:
            return handles
        found = {handle.name for body in called for handle in self._used_by(op, body, uses)}
        return [handle for handle in handles if handle.name in found]

    def _used_by(self, op: Operation, body: FuncGraph, uses: Callable[[Operation], bool]) -> Iterator[Tensor]:
        """Yield the handles that an operation passes to a called function that uses them."""
        given = _given(op, body)
        for inner in body.get_operations():
            for handle in self._used(inner, uses):
                maker = self.origin(handle)
                if maker in given:
                    yield given[maker]
                elif maker.type == "Placeholder":  # the argument is unknown: it may be any handle
                    yield from _handles(op)

    def origin(self, handle: Tensor) -> Operation:
        """Return the operation that created a handle. Other operations, including functions, may have passed it on.

        If several operations have created handles of one resource, return the same one for all of them.
        """
        op, index = handle.op, handle.value_index
        if body := next((body for body in self._called(op) if index < len(body.outputs)), None):
            inner = self.origin(body.outputs[index])
            outer = _given(op, body).get(inner)
            return inner if outer is None else self.origin(outer)
        passed = [tensor for tensor in op.inputs if is_handle(tensor)]
        if op.type == "IdentityN":
            passed = [op.inputs[index]]
        return self.origin(passed[0]) if passed else self._makers.setdefault(identity_of(op), op)

    def values(self, op: Operation, makers: Collection[Operation]) -> Sequence[Tensor]:
        """Return the float tensors that determine the new values of the resources that an operation changes.

        Args:
            op: The operation. In a called function, only operations that run in each call count, and no value that the
                function itself tests for NaN.
            makers: The operations that created the handles of the changed resources.
        """
        floats = [tensor for tensor in op.inputs if may_be_nan(tensor) and not is_handle(tensor)]
        called = self._called(op)
        if not called:
            return floats
        if op.type not in _PLAIN_CALLS and not has_function(self._graph, op.type):
            return []  # a condition, which takes one branch, or a loop
        used = {before.name for value in self._values_in(op, called[0], makers) for before in _before(value)}
        args = zip(called[0].inputs, op.inputs, strict=True)
        names = {outer.name for inner, outer in args if inner.op.name in used}
        return [tensor for tensor in floats if tensor.name in names]

    def _values_in(self, op: Operation, body: FuncGraph, makers: Collection[Operation]) -> Iterator[Tensor]:
        """Yield the ``values`` in a function that an operation calls."""
        inside = [inner for inner, outer in _given(op, body).items() if self.origin(outer) in makers]
        for inner in body.get_operations():
            if any(self.origin(handle) in inside for handle in self.changed(inner)):
                for value in self.values(inner, inside):
                    if not any(before.type in _LOOKS_AT_NAN for before in _before(value)):
                        yield value

    def _called(self, op: Operation) -> Sequence[FuncGraph]:
        """Return the functions that an operation calls, as graphs. The operation may be a condition or a loop."""
        return [self._body(name) for name in called_by(self._graph, op.node_def)]

    def _body(self, name: str) -> FuncGraph:
        if name not in self._bodies:
            with self._graph.as_default(), tf.device(None):
                self._bodies[name] = function_def_to_graph(function_of(self._graph, name))
        return self._bodies[name]


def has_state(node: NodeDef) -> bool:
    """Return whether an operation may return something else each time it gets the same inputs."""
    known = op_def_registry.get(node.op)
    return known is None or bool(known.is_stateful)


def draws(graph: Graph, node: NodeDef) -> bool:
    """Return whether a function that an operation calls draws seeded random numbers, directly or indirectly."""
    return any(_seed(inner) for inner in nodes_within(graph, node))


def draws_from_state(graph: Graph, node: NodeDef) -> bool:
    """Return whether an operation draws random numbers from a state in a variable, perhaps in a function."""
    return any(one.op.startswith(OF_GENERATORS) for one in (node, *nodes_within(graph, node)))


def needs_inlining(fetches: Sequence[Tensor | Operation]) -> bool:
    """Return whether TensorFlow has to inline what the functions of a step call: see ``session.config_of``.

    So it is with seeded random numbers, and with lambdas in nested calls, for which nodes cannot be named.
    """
    calls = [op for op in ancestors(fetches) if is_call(op)]
    called = {(op.graph, name) for op in calls for name in called_by(op.graph, op.node_def)}
    nested = [(graph, name, node) for graph, name in called for node in function_of(graph, name).node_def]
    inner = [(name, one) for graph, name, node in nested for one in called_by(graph, node)]
    return any(draws(graph, node) for graph, _, node in nested) or any("<" in name for pair in inner for name in pair)


def reseed(node: NodeDef, shift: int) -> None:
    """Make an operation that draws seeded random numbers draw other numbers."""
    if _seed(node):
        node.attr["seed2"].i += shift


def _acts(kind: str) -> bool:
    known = op_def_registry.get(kind)
    if known is None or not known.is_stateful or kind in _HARMLESS:
        return False
    args = (*known.input_arg, *known.output_arg)
    on_resource = any(arg.is_ref or arg.type == tf.resource.as_datatype_enum for arg in args)
    return not on_resource and not any(attr.name == "seed" for attr in known.attr)


def _uses_handle(node: NodeDef) -> bool:
    known = op_def_registry.get(node.op)
    return known is None or any(arg.is_ref or arg.type == tf.resource.as_datatype_enum for arg in known.input_arg)


def _seed(node: NodeDef) -> bool:
    known = op_def_registry.get(node.op)
    drawn = known is not None and known.is_stateful and "seed2" in node.attr
    return bool(drawn and (node.attr["seed"].i or node.attr["seed2"].i))


def _before(value: Tensor) -> Collection[Operation]:
    """Return the operations that compute a tensor."""
    todo = [value.op]
    seen = set(todo)
    for op in todo:  # grows during the loop
        new = [parent for parent in dict.fromkeys(tensor.op for tensor in op.inputs) if parent not in seen]
        seen.update(new)
        todo += new
    return seen


def _handles(op: Operation) -> Sequence[Tensor]:
    """Return the handles among an operation's inputs, without TensorFlow 1.x variables that are passed by value."""
    found = [(index, tensor) for index, tensor in enumerate(op.inputs) if is_handle(tensor)]
    known = op_def_registry.get(op.type) if found else None
    args = [] if known is None else known.input_arg
    by_value = [index for index, arg in enumerate(args) if not arg.is_ref] if len(args) == len(op.inputs) else []
    return [tensor for index, tensor in found if tensor.dtype == tf.resource or index not in by_value]


def _given(op: Operation, body: FuncGraph) -> Mapping[Operation, Tensor]:
    """Return a mapping from a function's arguments, as operations, to the handles that the call passes for them.

    Handles keep their order, whatever other arguments come between them. If their numbers differ, return an empty
    mapping.
    """
    outer = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
    inner = [tensor.op for tensor in body.inputs if tensor.dtype == tf.resource]
    return dict(zip(inner, outer, strict=True)) if len(inner) == len(outer) else {}
