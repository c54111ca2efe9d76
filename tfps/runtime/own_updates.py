"""What a model changes itself, beside what its optimizer does: moving averages, counters, states.

TensorFlow 1.x's layers leave such changes in the collection ``UPDATE_OPS``, for the training program to run with each
step. Keras's layers leave them nowhere: a Keras training step would run them. Both are run here.

With ``--mode=sync``, one update of the parameters is made of a batch of each worker; those on a PS are then the
chief's alone, as one average of one stream of batches. State of a worker's own is each worker's.

No NaN reaches a PS by such a change: what a worker sends for it is looked at before.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.placement import needed, task_of
from tfps.runtime.rewiring import is_in_every_step

_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_ROW_WRITES = ("ResourceScatterUpdate", "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdUpdate")
_KERAS = "/keras/src/"


def of_step(graph: Any, on_ps: bool) -> Sequence[Any]:
    """Return the operations that have to run with each step of a model, once its ``model_fn`` has returned.

    Args:
        graph: The training graph.
        on_ps: Whether what changes a PS is among them.
    """
    kept = [_operation(update) for update in graph.get_collection(tf.GraphKeys.UPDATE_OPS)]
    for write in [op for op in _writes(graph) if _is_of_keras(op)]:
        _read_before(write)
        kept.append(write)
    return [op for op in dict.fromkeys(kept) if on_ps or not _changes_ps(op)]


def _read_before(write: Any) -> None:
    """Let a change of a variable wait for what reads it in the same step, as in a Keras training step."""
    after = set(_users_of(write))
    reads = [op for op in write.inputs[0].consumers() if op.type == "ReadVariableOp" and op not in after]
    write._add_control_inputs([op for op in reads if is_in_every_step(op)])


def _users_of(op: Any) -> Iterable[Any]:
    """Return an operation, and what runs after it."""
    todo = [op]
    for each in todo:  # grows while it is read
        users = [user for output in each.outputs for user in output.consumers()] + list(each._control_outputs)
        todo += [user for user in dict.fromkeys(users) if user not in todo]
    return todo


def check(graph: Any) -> Sequence[tuple[Any, str]]:
    """Let the changes of a PS that a model makes itself fail where a worker would send NaN for one.

    Returns:
        What is sent, and what it is for: before the optimizer changes anything, it should know that no NaN is in it.
    """
    found: dict[str, tuple[Any, str]] = {}
    for write in _writes(graph):
        value = write.inputs[2 if write.type in _ROW_WRITES else 1]
        if value.dtype.is_floating and task_of(write).startswith("ps/") and is_in_every_step(write):
            name = f"what the model assigns to {write.inputs[0].op.name}"
            for tensor, user, index in _sent(write, value):
                if tensor.name not in found:
                    with tf.device(tensor.op.device), tf.control_dependencies(None):
                        found[tensor.name] = _without_nan(tensor, name), name
                user._update_input(index, found[tensor.name][0])
    return list(found.values())


def _without_nan(tensor: Any, name: str) -> Any:
    """Return a tensor that can be had if it holds no NaN; Inf may be meant."""
    numbers = tf.where(tf.is_inf(tensor), tf.zeros_like(tensor), tensor)
    with tf.control_dependencies([tf.check_numerics(numbers, f"tfps: {name}")]):
        return tf.identity(tensor)


def _sent(write: Any, value: Any) -> Iterable[tuple[Any, Any, int]]:
    """Yield each tensor of floats that a worker sends for the value of a write, its user on the PS, and which input."""
    todo = [(value, write)]
    seen = set()
    for tensor, user in todo:  # grows while it is read
        index = next(index for index, given in enumerate(user.inputs) if given is tensor or given.name == tensor.name)
        if (tensor.name, user) in seen or tensor.dtype == tf.resource:
            continue
        seen.add((tensor.name, user))
        if task_of(tensor.op).startswith("ps/"):
            todo += [(given, tensor.op) for given in tensor.op.inputs]
        elif tensor.dtype.is_floating and is_in_every_step(tensor.op) and tensor.op.type != "Const":
            yield tensor, user, index


def _writes(graph: Any) -> Sequence[Any]:
    """Return what changes variables, but for what gives them their first values."""
    first = _initializers(graph)
    return [op for op in graph.get_operations() if op.type in (*_WRITES, *_ROW_WRITES) and op not in first]


def _initializers(graph: Any) -> Collection[Any]:
    keys = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES)
    return {variable.initializer for key in keys for variable in graph.get_collection(key)}


def _is_of_keras(op: Any) -> bool:
    return any(_KERAS in call.filename.replace("\\", "/") for call in op.traceback)


def _changes_ps(update: Any) -> bool:
    """Tell whether a PS is changed for an update; of what it only reads, or what other steps change, it is not."""
    return any(op.type in (*_WRITES, *_ROW_WRITES) and task_of(op).startswith("ps/") for op in needed([update]))


def _operation(update: Any) -> Any:
    return update if isinstance(update, tf.Operation) else update.op
