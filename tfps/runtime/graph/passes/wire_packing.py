"""Pack the tensors that a step sends between a worker and each PS into a few.

TensorFlow sends each tensor that crosses tasks with a separate call (RecvTensor). For small tensors the call costs more
than the bytes. Here the small ones of one direction travel together. They are flattened and concatenated at the source,
sent as one tensor, and split at the target. Neither the model nor the optimizer sees it. The same variables are read
and the same gradients applied, bit for bit unless ``halved`` selects a tensor::

    before   PS: read a --> worker,  read b --> worker                         2 calls
    after    PS: read a, read b --> concat "pull" --> worker: split --> users  1 call

- *pull*: every read of a variable that a step uses on the worker. Reads of one variable become one.
- *push*: every dense tensor of the worker that a step uses on a PS: gradients, a decayed learning rate.
- Constants that only one other task uses are created there.
- An operation that waits for a group on another task waits for the members of the group directly.

A bucket holds tensors of one type, up to ``BUCKET_BYTES`` together, so the transfer of a large model is still spread
over the step. Larger tensors go alone and uncopied. A tensor that depends on another of its bucket is left out, because
sending it would make a cycle.

``embedding_rows`` prepares rows of embedding tables, whose number differs from step to step. They travel together like
other tensors; all of the same kind form one, however large. Their number is known from the ids, which are sent after
their lengths. Only tensors without ids need another tensor with their lengths. Tensors in a branch or a loop
travel alone. But ``loop_hoisting`` has moved the reads of loops before them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates.moments import RUN_ID
from tfps.runtime.graph.graph_editor import (
    control_users,
    descendants,
    device,
    flatten,
    is_in_every_step,
    move,
    order,
    replace,
    set_control_inputs,
    unflatten,
)
from tfps.runtime.graph.passes import embedding_rows
from tfps.runtime.graph.placement import ancestors, holds_state, resource_of, task_of, tensor_bytes
from tfps.tf_types import Fetch, Graph, Operation, Tensor

BUCKET_BYTES = 1 << 20


def pack(graph: Graph, fetches: Sequence[Fetch], halved: Callable[[Tensor], bool] | None = None) -> None:
    """Pack the tensors that cross between tasks when a graph's ``fetches`` are run, in place.

    Args:
        graph: The complete training graph of one worker. Operations added later are not packed.
        fetches: The tensors and operations of one step.
        halved: Selects the float32 tensors, except scalars, to send as bfloat16: half the bytes, 8 of the 24 bits of
            each number's significand. ``None`` selects none.
    """
    is_short = lambda tensor: halved is not None and _can_be_short(tensor) and halved(tensor)  # noqa: E731
    with graph.as_default(), tf.device(None), tf.name_scope("tfps/wire/"):
        _move_constants(graph, ancestors(fetches))
        _wait_directly(ancestors(fetches))
        _merge_reads(ancestors(fetches))
        ids_of = embedding_rows.make_unique(ancestors(fetches))
        for source, target, short, found in _by_route(ancestors(fetches), _pulled, is_short):
            for bucket in buckets(found):
                _send("pull", source, target, bucket, short)
        for source, target, short, found in _by_route(ancestors(fetches), _pushed, is_short):
            for bucket in buckets(_independent(found, target)):
                _send("push", source, target, bucket, short)
        routes = _by_route(ancestors(fetches), _ragged_key, is_short)
        for source, target, short, found in sorted(routes, key=lambda route: _are_ids(route[-1])):
            _send_ragged(source, target, _independent(found, target), short, ids_of)


def _independent(tensors: Sequence[Tensor], target: str) -> Sequence[Tensor]:
    """Return the tensors that do not depend on operations of ``target`` that use another one of them."""
    used_by = [user for tensor in tensors for user in tensor.consumers() if task_of(user) == target]
    after = set(descendants(used_by))
    return [tensor for tensor in tensors if tensor.op not in after]


def _move_constants(graph: Graph, ops: Iterable[Operation]) -> None:
    """Create constants where they are used, but for those with which another operation is colocated."""
    near = {place for op in graph.get_operations() for place in _near(op) if place != _place(op)}
    for op in ops:
        devices = {_device_of(user) for user in op.outputs[0].consumers()} if op.type == "Const" else set()
        if len(devices) == 1 and not op.control_inputs and _place(op) not in near:
            move(op, devices.pop())


def _near(op: Operation) -> Iterable[bytes]:
    """Return the places where an operation is to be.

    ``colocation_groups`` raises an error inside if there are none, which takes long; ``node_def`` copies a constant.
    """
    found: Iterable[bytes] = op.colocation_groups() if op.type == "Const" else op.node_def.attr["_class"].list.s
    return found


def _place(op: Operation) -> bytes:
    """Return the name of the place where an operation is, if it is colocated with no other."""
    return f"loc:@{op.name}".encode()


def _wait_directly(ops: Iterable[Operation]) -> None:
    """Make operations that wait for a group wait for its members instead. Members on the same task cost nothing."""
    for op in ops:
        waited_for = [leaf for other in op.control_inputs for leaf in _leaves(other, task_of(op))]
        if waited_for != list(op.control_inputs):
            set_control_inputs(op, waited_for)


def _leaves(op: Operation, task: str) -> Sequence[Operation]:
    if op.type != "NoOp" or task_of(op) == task:
        return [op]
    return [leaf for other in op.control_inputs for leaf in _leaves(other, task)]


def _device_of(op: Operation) -> str:
    """Return the device of an operation, or that of the resource on which it works."""
    resource = resource_of(op)
    return str((resource is not None and resource.op.device) or op.device)


def _is_read(tensor: Tensor) -> bool:
    """Return whether a tensor is the value of a variable at the start of a step: a read that waits for nothing."""
    op = tensor.op
    return op.type == "ReadVariableOp" and not op.control_inputs and op.inputs[0].op.type == "VarHandleOp"


def _is_of_worker(tensor: Tensor) -> bool:
    is_sent_apart = tensor.op.type == "Const" or tensor.op.name == RUN_ID  # TensorFlow copies the small ones
    return not holds_state(tensor.op) and not is_sent_apart


def _merge_reads(ops: Iterable[Operation]) -> None:
    """Make all uses of a variable's value at the start of a step share one read."""
    first: dict[object, Tensor] = {}
    for op in sorted(ops, key=order):
        if op.outputs and _is_read(op.outputs[0]):
            kept = first.setdefault((op.inputs[0].op.name, op.outputs[0].dtype), op.outputs[0])
            if kept is not op.outputs[0]:
                replace(op.outputs[0], kept, lambda _user: True)
                for user in control_users(op):  # such as a change of the variable that comes after the read
                    set_control_inputs(user, [kept.op if before is op else before for before in user.control_inputs])


def _pulled(tensor: Tensor) -> object:
    return _fixed_shape_key(tensor) if _is_read(tensor) else None


def _pushed(tensor: Tensor) -> object:
    return _fixed_shape_key(tensor) if _is_of_worker(tensor) else None


def _fixed_shape_key(tensor: Tensor) -> object:
    """Return the common key of fixed-shape tensors that travel together, or ``None``."""
    return (tensor.dtype, tensor.shape.rank == 0) if tensor_bytes(tensor.shape, tensor.dtype) else None


def _ragged_key(tensor: Tensor) -> object:
    """Return the common key of tensors of unknown length that travel together, or ``None``."""
    shape = tensor.shape
    alike = shape.rank and shape[0].value is None and shape[1:].is_fully_defined()
    return (tensor.dtype, tuple(shape[1:].as_list())) if alike else None


def _by_route(
    ops: Sequence[Operation], kind: Callable[[Tensor], object], is_short: Callable[[Tensor], bool]
) -> Iterable[tuple[str, str, bool, Sequence[Tensor]]]:
    """Yield source, target, whether to send as bfloat16, and the tensors that cross tasks on this route.

    Each item has tensors of one kind. Tensors without a kind are left out.
    """
    routes: dict[tuple[str, str, bool, object], dict[object, Tensor]] = {}
    for op in sorted(ops, key=order):
        for tensor in op.inputs:
            source, target, alike = task_of(tensor.op), task_of(op), kind(tensor)
            if source != target and alike is not None and is_in_every_step(tensor.op):
                routes.setdefault((source, target, is_short(tensor), alike), {})[tensor.ref()] = tensor
    for (source, target, short, _), found in routes.items():
        yield source, target, short, list(found.values())


def _send(name: str, source: str, target: str, tensors: Sequence[Tensor], short: bool) -> None:
    """Send tensors of fixed shape as one, flattened."""
    if _is_unpacked(tensors, short):
        return
    with tf.device(device(source)):
        packed = flatten(tensors, name)
    packed = _transfer(packed, source, target, short)
    with tf.device(device(target)):
        _replace_on_target(target, tensors, unflatten(packed, tensors))


def _send_ragged(
    source: str, target: str, tensors: Sequence[Tensor], short: bool, ids_of: Mapping[str, Tensor]
) -> None:
    """Send tensors of unknown length as one, concatenated. Ids come last, so that all their users get the sent ids."""
    if _is_unpacked(tensors, short):
        return
    if _are_ids(tensors):
        parts = _sent_with_lengths(source, target, tensors)
    else:
        parts = _sent_as_rows(source, target, tensors, short, [ids_of.get(tensor.name) for tensor in tensors])
    _replace_on_target(target, tensors, parts)


def _sent_with_lengths(source: str, target: str, ids: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return several vectors on the target. The source sends their lengths in front of them."""
    count = len(ids)
    with tf.device(device(source)):
        packed = tf.concat([tf.cast(_lengths(ids), ids[0].dtype), *ids], 0, name="ids")
    with tf.device(device(target)):
        parts: Sequence[Tensor] = tf.split(packed, tf.concat([[count], packed[:count]], 0), num=count + 1)
        return parts[1:]


def _sent_as_rows(
    source: str, target: str, tensors: Sequence[Tensor], short: bool, ids: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return several tensors on the target. It knows their numbers of rows if both sides have the ids."""
    with tf.device(device(source)):
        lengths = _lengths(tensors) if None in ids else None
        packed = tf.concat(tensors, 0, name="rows")
    packed = _transfer(packed, source, target, short)
    with tf.device(device(target)):
        parts: Sequence[Tensor] = tf.split(packed, _lengths(ids) if lengths is None else lengths, num=len(tensors))
        return parts


def _lengths(tensors: Sequence[Tensor]) -> Tensor:
    alike = len({tensor.dtype for tensor in tensors}) == 1
    return tf.stack(tf.shape_n(tensors) if alike else [tf.shape(tensor) for tensor in tensors])[:, 0]


def _are_ids(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and tensors[0].dtype in (tf.int32, tf.int64) and tensors[0].shape.rank == 1


def _can_be_short(tensor: Tensor) -> bool:
    return bool(tensor.dtype == tf.float32 and tensor.shape.rank)


def _is_unpacked(tensors: Sequence[Tensor], short: bool) -> bool:
    return not tensors or (len(tensors) == 1 and not short)


def _transfer(packed: Tensor, source: str, target: str, short: bool) -> Tensor:
    """Return a tensor on the target: unchanged, or as rounded by bfloat16."""
    if not short:
        return packed
    with tf.device(device(source)):
        halved = tf.cast(packed, tf.bfloat16)
    with tf.device(device(target)):
        return tf.cast(halved, tf.float32)


def _replace_on_target(target: str, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Make all operations of the target use the received tensors."""
    for tensor, part in zip(tensors, parts, strict=True):
        part.set_shape(tensor.shape)
        replace(tensor, part, lambda user: task_of(user) == target)


def buckets(tensors: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Yield tensors that travel together. A tensor larger than half a bucket is alone."""
    bucket: list[Tensor] = []
    room = BUCKET_BYTES
    for tensor in tensors:
        size = tensor_bytes(tensor.shape, tensor.dtype) or 0
        if size > BUCKET_BYTES // 2:
            yield [tensor]
            continue
        if size > room:
            yield bucket
            bucket, room = [], BUCKET_BYTES
        bucket.append(tensor)
        room -= size
    if bucket:
        yield bucket
