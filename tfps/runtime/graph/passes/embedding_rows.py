"""Send each row of an embedding table once per step.

Click logs repeat the same few ids. A lookup on a PS would send each row as often as its id occurs. A gradient would be
sent as often, and summed by row on the PS. This pass changes both:

1. The worker makes the ids of a lookup unique, requests those rows from the PS, and gathers them into place.
2. The worker sums the gradient of each row and sends the sums for the requested rows. The PS updates each row once.

::

    before   worker: ids [7, 2, 7] ------------> PS: ResourceGather --3 rows--> worker
             worker: 3 rows of gradient -------> PS: sum by row --> apply to rows 7 and 2
    after    worker: ids --Unique--> [7, 2] ---> PS: ResourceGather --2 rows--> worker: Gather [0, 1, 0]
             worker: sum by row --2 sums-------> PS: apply to rows 7 and 2

Rewrite 2 needs an optimizer that sums gradients by row. All of TensorFlow's do, except plain gradient descent, which
applies them one after another. The order of the sums is TensorFlow's, so the result is the same to the bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import control_users, device, is_in_every_step, replace, set_control_inputs
from tfps.runtime.graph.placement import ancestors, holds_state, task_of
from tfps.tf_types import Fetch, Operation, Tensor


def problem(fetches: Iterable[Fetch]) -> str:
    """Return which table is read as a whole although its rows are looked up, and by which op, or an empty string.

    The PS would copy the whole table in every step, because rows of it change while it is sent.
    """
    ops = ancestors(fetches)
    tables = {op.inputs[0].op for op in ops if op.type == "ResourceGather"}
    for op in ops:
        if op.type == "ReadVariableOp" and op.inputs[0].op in tables:
            user = next(_users(op), op)
            return (
                f"{op.inputs[0].op.name!r} is an embedding table, whose rows are looked up, but {user.name!r} "
                f"({user.type}) reads all of it in each step: leave this table out, or use the looked-up rows. "
                "If it is small, look them up in table.read_value()."
            )
    return ""


def _users(read: Operation) -> Iterator[Operation]:
    """Yield the users of a read, looking through identities."""
    for user in read.outputs[0].consumers():
        yield from _users(user) if user.type == "Identity" else [user]


def make_unique(ops: Sequence[Operation]) -> Mapping[str, Tensor]:
    """Rewrite the lookups of a step, and the sums of gradients by row; ``ops`` are all its operations.

    Returns:
        Maps the name of each tensor of such rows or sums [n, ...] to the worker's unique ids [n] of these rows.
    """
    places: dict[str, tuple[Tensor, Tensor]] = {}
    ids_of: dict[str, Tensor] = {}
    for op in ops:
        if _is_lookup(op):
            ids = op.inputs[1]
            if ids.name not in places:
                with tf.device(device(task_of(ids.op))):
                    places[ids.name] = _unique(ids)
            unique, place = places[ids.name]
            ids_of[_look_up(op, unique, place).name] = unique
    for op in ops:
        if _sums_by_row(op):
            unique, sums = _sum_on_worker(op, places)
            ids_of[sums.name] = unique
    return ids_of


def _is_lookup(op: Operation) -> bool:
    """Return whether an operation looks up rows on a PS for a worker."""
    if op.type != "ResourceGather" or op.get_attr("batch_dims") or not is_in_every_step(op):
        return False
    if not holds_state(op):
        return False
    return not any(holds_state(other) for other in (op.inputs[1].op, *op.outputs[0].consumers()))


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unique ids as a vector, and the position of each id in it, or ``None`` if they are already unique."""
    if ids.op.type == "Unique" and ids.value_index == 0:
        return ids, None
    return tuple(tf.unique(tf.reshape(ids, [-1])))


def _look_up(op: Operation, unique: Tensor, place: Tensor) -> Tensor:
    """Make a lookup use unique ids. Return the rows that the PS sends."""
    ids, found = op.inputs[1], op.outputs[0]
    if place is None:
        return found
    with tf.device(op.device), tf.control_dependencies(op.control_inputs):
        rows = tf.raw_ops.ResourceGather(resource=op.inputs[0], indices=unique, dtype=found.dtype)
    with tf.device(device(task_of(ids.op))):
        every = tf.gather(rows, tf.reshape(place, tf.shape(ids)))
    replace(found, every, lambda _user: True)
    for user in control_users(op):  # such as a change of the rows that comes after the lookup
        set_control_inputs(user, [rows.op if before is op else before for before in user.control_inputs])
    return rows


def _sums_by_row(op: Operation) -> bool:
    """Return whether an operation sums values by unique ids, like TensorFlow's ``_deduplicate_indexed_slices``.

    There, the number of sums is the number of ids. With another number, or other segments, the op belongs to the model.
    """
    place = op.inputs[1] if op.type == "UnsortedSegmentSum" and is_in_every_step(op) else None
    if place is None or place.op.type != "Unique" or place.value_index != 1:
        return False
    count = op.inputs[2].op
    count = count.inputs[0].op if count.type == "StridedSlice" else count
    counted = count.inputs[0] if count.type in ("Shape", "Size") else None
    if counted is None or counted.op is not place.op or counted.value_index != 0:
        return False
    return not any(holds_state(made.op) for made in (op.inputs[0], place.op.inputs[0]))


def _sum_on_worker(op: Operation, places: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make the worker sum. Send the sums for the ids of its lookup if the ids are the same.

    Returns:
        The ids and the sums.
    """
    values, was = op.inputs[0], op.inputs[1].op
    ids = was.inputs[0]
    asked = ids.op.inputs[0] if ids.op.type == "Reshape" else ids
    with tf.device(device(task_of(values.op))):
        unique, place = places.get(asked.name) or tf.unique(ids)
        sums = values if place is None else tf.unsorted_segment_sum(values, place, tf.size(unique))
    replace(was.outputs[0], unique, lambda user: user is not op)
    replace(op.outputs[0], sums, lambda _user: True)
    return unique, sums
