"""Edit a finished graph. The only module that uses the private graph API of TensorFlow.

A release of TensorFlow may change what has no public name. Each such name is used once, here, in a function that says
what tfps needs of it. The module is at the bottom of the layers: it imports nothing of tfps but the names of types and
of tasks, so that placement, the passes and the modes can use it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import variables as variables_lib

from tfps.cluster.spec import DEVICE_OF_STATE, STATE_OF_CHIEF
from tfps.tf_types import FunctionDef, Graph, InputIterator, Operation, Optimizer, Tensor, Variable


def device(task: str) -> str:
    """Return the device of a task, as ``placement.task_of`` names it."""
    job, index = task.split("/")
    return DEVICE_OF_STATE if task == STATE_OF_CHIEF else f"/job:{job}/task:{index}"


def set_device(op: Operation, name: str) -> None:
    """Place an operation on another device, by the exact name and regardless of device scopes."""
    op._set_device(name)


def move(op: Operation, name: str) -> None:
    """Place an operation on another device, and forget that it was to be where another operation is."""
    set_device(op, name)
    if "_class" in op.node_def.attr:
        op._clear_attr("_class")


def set_bool_attr(op: Operation, name: str, value: bool) -> None:
    """Set a bool attribute of an operation."""
    op._set_attr(name, attr_value_pb2.AttrValue(b=value))


def order(op: Operation) -> int:
    """Return the position of an operation in the order in which the operations of its graph were created."""
    return int(op._id)


def add_control_inputs(op: Operation, before: Sequence[Operation]) -> None:
    """Make an operation wait for others: add control edges to exactly this operation.

    ``tf.control_dependencies`` affects only new operations, and may add the edge to a constant instead.
    """
    op._add_control_inputs(before)


def set_control_inputs(op: Operation, before: Iterable[Operation]) -> None:
    """Make an operation wait for exactly some others, each once, beside its inputs."""
    op._remove_all_control_inputs()
    op._add_control_inputs(list(dict.fromkeys(before)))


def set_input(op: Operation, index: int, tensor: Tensor) -> None:
    """Make an operation use another tensor as one of its inputs."""
    op._update_input(index, tensor)


def replace(old: Tensor, new: Tensor, where: Callable[[Operation], bool]) -> None:
    """Make the users of a tensor for which ``where`` is true use another tensor instead."""
    for user in old.consumers():
        if where(user):
            for index, tensor in enumerate(user.inputs):
                if tensor.name == old.name:
                    set_input(user, index, new)


def data_users(op: Operation) -> list[Operation]:
    """Return the operations that use the outputs of an operation, one per output and user."""
    return [user for output in op.outputs for user in output.consumers()]


def control_users(op: Operation) -> list[Operation]:
    """Return the operations that wait for an operation by a control edge."""
    return list(op._control_outputs)


def users(op: Operation) -> list[Operation]:
    """Return the operations that use an output of an operation, and then those that wait for it by a control edge."""
    return data_users(op) + control_users(op)


def descendants(ops: Iterable[Operation], within: Callable[[Operation], bool] = lambda _op: True) -> list[Operation]:
    """Return operations, and all that use them or wait for them, directly or indirectly.

    Args:
        ops: The operations to start from.
        within: Whether to include an operation and to follow its users.
    """
    return reachable(ops, lambda op: [user for user in users(op) if within(user)])


def reachable(ops: Iterable[Operation], neighbors: Callable[[Operation], Iterable[Operation]]) -> list[Operation]:
    """Return operations, and all that can be reached from them by ``neighbors``, each once, in breadth-first order."""
    todo = list(dict.fromkeys(ops))
    seen = set(todo)
    for op in todo:  # grows during the loop
        new = [other for other in dict.fromkeys(neighbors(op)) if other not in seen]
        seen.update(new)
        todo.extend(new)
    return todo


def is_in_control_flow(op: Operation) -> bool:
    """Return whether an operation is in a branch of ``tf.cond`` or in a loop."""
    return op._get_control_flow_context() is not None


def is_in_every_step(op: Operation) -> bool:
    """Return whether an operation gives its result once in each step: it is in no branch of ``tf.cond`` and in no loop.

    The exit of a loop belongs to the loop, but gives its result once, where the loop is.
    """
    context = op._get_control_flow_context()
    if context is not None and op.type in ("Exit", "RefExit"):
        context = context.outer_context
    return context is None and op.type not in ("Switch", "RefSwitch", "Enter", "RefEnter")


def can_wait(op: Operation) -> bool:
    """Return whether an operation may get a control edge from an operation that runs in every step.

    It may if it gets its inputs from outside all loops: in a branch of ``tf.cond``, at the entry of a loop, or outside
    both. Inside a loop, the edge would let the step wait forever::

        before   handle --> Switch --> [branch: assign]       handle --> Enter --> [loop: assign]
        after    handle --> Switch --> [branch: assign]       handle --> Enter --> [loop: assign]
                   gate ====^                                   gate ====^                  (==> is a control edge)
    """
    context = op._get_control_flow_context()
    if context is not None and op.type in ("Enter", "RefEnter"):
        context = context.outer_context
    return not any(one.IsWhileContext() for one in _contexts(context))


@contextlib.contextmanager
def beside(op: Operation) -> Iterator[None]:
    """Return a context in which new operations are on the device and in the branch or loop of another operation.

    They wait for nothing but their inputs.
    """
    with tf.control_dependencies(None), tf.device(op.device):
        op.graph._set_control_flow_context(op._get_control_flow_context())
        yield


def outermost_context(op: Operation) -> Any:
    """Return the outermost branch or loop around an operation, as an object that only it has; ``None`` without one."""
    return next(reversed(list(_contexts(op._get_control_flow_context()))), None)


def _contexts(context: Any) -> Iterator[Any]:
    """Yield a control flow context, and those around it."""
    while context is not None:
        yield context
        context = context.outer_context


def outermost_loop(op: Operation) -> Any:
    """Return the outermost loop around an operation, as an object that only it has; ``None`` without one."""
    context = op._get_control_flow_context()
    return next((one for one in reversed(list(_contexts(context))) if one.IsWhileContext()), None)


def while_context(op: Operation) -> Any:
    """Return the ``WhileContext`` of the innermost loop around an operation; ``None`` if a branch is, or nothing."""
    context = op._get_control_flow_context()
    return context if context is not None and context.IsWhileContext() else None


def is_call(op: Operation) -> bool:
    """Return whether an operation calls functions: by name, as a condition, or as a loop."""
    attrs = op.node_def.attr.values()
    return any(attr.HasField("func") or attr.list.func for attr in attrs) or has_function(op.graph, op.type)


def has_function(graph: Graph, name: str) -> bool:
    """Return whether a graph has a function of that name."""
    return bool(graph._is_function(name))


def function_of(graph: Graph, name: str) -> FunctionDef:
    """Return the definition of a function of a graph."""
    return graph._get_function(name).definition


def is_handle(tensor: Tensor) -> bool:
    """Return whether a tensor refers to a resource that outlasts a step: a variable, table, iterator or the like."""
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def may_be_slice(value: object) -> bool:
    """Return whether a value is a variable, which may be a slice of a larger one."""
    return hasattr(value, "_get_save_slice_info")


def slice_info(variable: Variable) -> Any:
    """Return the ``SaveSliceInfo`` of a variable that is a slice of a larger one; ``None`` if it is whole."""
    return variable._get_save_slice_info()


def saveable_objects() -> Sequence[Any]:
    """Return what a ``tf.train.Saver`` of the default graph saves: variables and ``SaveableObject``."""
    found: Sequence[Any] = variables_lib._all_saveable_objects()
    return found


def iterator_resource(iterator: InputIterator) -> Tensor:
    """Return the resource of a ``tf.data`` iterator."""
    return iterator._iterator_resource


def uses_locking(optimizer: Optimizer) -> bool:
    """Return the ``use_locking`` with which an optimizer was created."""
    return bool(optimizer._use_locking)


def create_slots(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Create the slots of an optimizer for some variables, before it applies gradients."""
    optimizer._create_slots(variables)


def flatten(tensors: Sequence[Tensor], name: str | None = None) -> Tensor:
    """Return tensors of one type as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0, name=name)


def unflatten(vector: Tensor, like: Sequence[Tensor | Variable]) -> Sequence[Tensor]:
    """Return the parts of such a vector, with the static shapes of other tensors or variables."""
    parts = tf.split(vector, [int(one.shape.num_elements()) for one in like])
    return [tf.reshape(part, one.shape) for part, one in zip(parts, like, strict=True)]
