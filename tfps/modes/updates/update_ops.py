"""The operations of an update: which of them change something, where they run, and what depends on them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import DEVICE_OF_STATE
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.graph_editor import is_handle
from tfps.tf_types import Operation

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_LOOKS = (*READS, "VarIsInitializedOp", "VariableShape")


@dataclass(frozen=True)
class Update:
    """The operations that apply one worker's gradients.

    Attributes:
        counted: Operation that ends when the part on the PS of ``global_step`` is applied. This part raises the step.
        others: Operations that end when the parts on the other PS are applied.
        counts_last: Whether ``counted`` follows changes on other PS: the PS of ``global_step`` has no part that can
            start before them, or raises the step with a separate lock.
        device: The PS of ``global_step``.
    """

    counted: Operation
    others: Sequence[Operation]
    counts_last: bool
    device: str


def let_wait(ops: Iterable[Operation], before: Sequence[Operation]) -> None:
    """Add control edges directly to operations: ``tf.control_dependencies`` may add them to a constant instead."""
    for op in ops:
        graph_editor.add_control_inputs(op, before)


def is_writer(op: Operation) -> bool:
    """Return whether an operation may change a variable or the like, or passes on its handle."""
    return op.type not in (*_LOOKS, "VarHandleOp") and any(is_handle(tensor) for tensor in op.inputs)


def is_constant(op: Operation) -> bool:
    """Return whether an operation is a constant that waits for nothing."""
    return op.type == "Const" and not op.control_inputs


def place_of(op: Operation) -> str:
    """Return the device of an operation's task. An operation on a resource runs where the resource is."""
    handle = next((tensor.op for tensor in op.inputs if is_handle(tensor)), None)
    if handle is not None:
        return place_of(handle)
    return place_in(op.device)


def place_in(device: str) -> str:
    """Return the device of the task in the name of a device, as ``Cluster.state_devices`` has it; empty if none is."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.replica is not None:
        return DEVICE_OF_STATE
    return f"/job:{spec.job}/task:{spec.task or 0}" if spec.job else ""


def leaves(op: Operation) -> Sequence[Operation]:
    """Return the operations that an operation waits for, looking through groups."""
    return [leaf for other in op.control_inputs for leaf in leaves(other)] if op.type == "NoOp" else [op]


def ancestors(ops: Iterable[Operation], within: Callable[[Operation], bool] = lambda _op: True) -> Sequence[Operation]:
    """Return the operations, and all operations that must run before them.

    Args:
        ops: The operations to start from.
        within: Whether to include another operation and to follow its inputs.
    """

    def before(op: Operation) -> Sequence[Operation]:
        return [one for one in [*(tensor.op for tensor in op.inputs), *op.control_inputs] if within(one)]

    return graph_editor.reachable(ops, before)


def descendants(ops: Iterable[Operation]) -> set[Operation]:
    """Return the operations, and all operations that use them or wait for them."""
    return set(graph_editor.descendants(ops))
