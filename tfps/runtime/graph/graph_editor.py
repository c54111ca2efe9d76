"""Edit a finished graph: replace a tensor where it is used."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.placement import task_of
from tfps.tf_types import Operation, Tensor


def device(task: str) -> str:
    """Return the device of a task."""
    job, index = task.split("/")
    return f"/job:{job}/task:{index}"


def is_in_every_step(op: Operation) -> bool:
    """Return whether an operation runs once in each step: it is in no branch of ``tf.cond`` and in no loop."""
    return op._get_control_flow_context() is None and op.type not in ("Switch", "RefSwitch", "Enter", "RefEnter")


def replace(old: Any, new: Any, where: Callable[[Any], bool]) -> None:
    """Make the users of a tensor for which ``where`` is true use another tensor instead."""
    for user in old.consumers():
        if where(user):
            for index, tensor in enumerate(user.inputs):
                if tensor.name == old.name:
                    user._update_input(index, new)


def flat(tensors: Sequence[Tensor], name: str | None = None) -> Any:
    """Return tensors of one type as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0, name=name)


def unflat(vector: Any, like: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of such a vector, with the static shapes of other tensors or variables."""
    parts = tf.split(vector, [int(one.shape.num_elements()) for one in like])
    return [tf.reshape(part, one.shape) for part, one in zip(parts, like, strict=True)]


def independent(tensors: Sequence[Tensor], target: str) -> Sequence[Any]:
    """Return the tensors that do not depend on operations of ``target`` that use another one of them."""
    users = [user for tensor in tensors for user in tensor.consumers() if task_of(user) == target]
    after: set[Any] = set(users)
    for op in (todo := list(after)):  # grows during the loop
        new = [user for output in op.outputs for user in output.consumers()] + list(op._control_outputs)
        todo.extend(user for user in dict.fromkeys(new) if user not in after)
        after.update(new)
    return [tensor for tensor in tensors if tensor.op not in after]
