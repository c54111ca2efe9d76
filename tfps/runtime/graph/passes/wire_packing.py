"""The wire: what a step sends between a worker and each PS, packed into few tensors.

TensorFlow sends every tensor that crosses tasks by a call of its own (RecvTensor), which costs more than its bytes as
long as these are few. Here the small ones of one direction travel together: they are flattened and concatenated where
they are made, sent as one tensor, and split where they are used. Neither the model nor the optimizer sees it: the same
variables are read, the same gradients applied, bit for bit.

- *pull*: every read of a variable that a step uses on the worker. Reads of one variable become one.
- *push*: every dense tensor of the worker that a step uses on a PS: gradients, a decayed learning rate.
- Constants that only one other task uses are made there.
- What waits for operations on several tasks waits for each of them, not for a third task that has waited for all.

A bucket holds tensors of one type, of up to ``BUCKET_BYTES`` together: the transfer of a large model is still spread
over the step. What is larger goes alone, uncopied. What would make a circle, sending a tensor that depends on another
of its bucket, is left out.

Rows of embedding tables, of which there are more or fewer in each step, are prepared by ``embedding_rows``, and travel
together like other tensors, all that are alike in one, however large. Their number is known from the ids, which begin
with it; only what is of no ids is sent with another tensor of its lengths. What is in a branch or a loop travels by
itself, but ``loop_hoisting`` has let what a loop reads be read before it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import device, flat, independent, is_in_every_step, replace, unflat
from tfps.runtime.graph.passes import embedding_rows
from tfps.runtime.graph.placement import ancestors, resource_of, task_of, tensor_bytes
from tfps.tf_types import Graph, Operation, Tensor

BUCKET_BYTES = 1 << 20


def pack(graph: Graph, fetches: Sequence[Any], halved: Callable[[Any], bool] | None = None) -> None:
    """Pack what crosses between tasks when a graph's ``fetches`` are run, in place.

    Args:
        graph: The training graph of one worker, whole: what is added later is not packed.
        fetches: The tensors and operations of one step.
        halved: Which float32 tensors, but scalars, to send as bfloat16, if any: half the bytes, 8 bits of each number's
            24.
    """
    is_short = lambda tensor: halved is not None and _can_be_short(tensor) and halved(tensor)  # noqa: E731
    with graph.as_default(), tf.device(None), tf.name_scope("tfps/wire/"):
        _move_constants(ancestors(fetches))
        _wait_directly(ancestors(fetches))
        _merge_reads(ancestors(fetches))
        ids_of = embedding_rows.make_unique(ancestors(fetches))
        for source, target, short, found in _by_route(ancestors(fetches), _pulled, is_short):
            for bucket in buckets(found):
                _send("pull", source, target, bucket, short)
        for source, target, short, found in _by_route(ancestors(fetches), _pushed, is_short):
            for bucket in buckets(independent(found, target)):
                _send("push", source, target, bucket, short)
        routes = _by_route(ancestors(fetches), _unfixed, is_short)
        for source, target, short, found in sorted(routes, key=lambda route: _are_ids(route[-1])):
            _send_unfixed(source, target, independent(found, target), short, ids_of)


def _move_constants(ops: Iterable[Operation]) -> None:
    for op in ops:
        users = {_device_of(user) for user in op.outputs[0].consumers()} if op.type == "Const" else set()
        if len(users) == 1 and not op.control_inputs:
            op._set_device(users.pop())


def _wait_directly(ops: Iterable[Operation]) -> None:
    """Let what waits for a group of operations wait for these themselves: those on its own task cost nothing."""
    for op in ops:
        waited_for = [leaf for other in op.control_inputs for leaf in _leaves(other, task_of(op))]
        if waited_for != list(op.control_inputs):
            op._remove_all_control_inputs()
            op._add_control_inputs(list(dict.fromkeys(waited_for)))


def _leaves(op: Operation, task: str) -> Sequence[Any]:
    if op.type != "NoOp" or task_of(op) == task:
        return [op]
    return [leaf for other in op.control_inputs for leaf in _leaves(other, task)]


def _device_of(op: Operation) -> str:
    """Return the device of an operation, or that of the resource that it works on."""
    resource = resource_of(op)
    return str((resource is not None and resource.op.device) or op.device)


def _is_read(tensor: Tensor) -> bool:
    """Return whether a tensor is a variable's value as the step begins: a read that waits for nothing."""
    op = tensor.op
    return op.type == "ReadVariableOp" and not op.control_inputs and op.inputs[0].op.type == "VarHandleOp"


def _is_of_worker(tensor: Tensor) -> bool:
    return task_of(tensor.op).startswith("worker/") and tensor.op.type != "Const"  # TensorFlow copies small ones


def _merge_reads(ops: Iterable[Operation]) -> None:
    """Let all that use a variable's value as the step begins use one read of it."""
    first: dict[Any, Any] = {}
    for op in sorted(ops, key=lambda op: op._id):
        if op.outputs and _is_read(op.outputs[0]):
            kept = first.setdefault((op.inputs[0].op.name, op.outputs[0].dtype), op.outputs[0])
            if kept is not op.outputs[0]:
                replace(op.outputs[0], kept, lambda _user: True)


def _pulled(tensor: Tensor) -> Any:
    return _fixed(tensor) if _is_read(tensor) else None


def _pushed(tensor: Tensor) -> Any:
    return _fixed(tensor) if _is_of_worker(tensor) else None


def _fixed(tensor: Tensor) -> Any:
    """Return what tensors of fixed shape that travel together have in common, or ``None``."""
    return (tensor.dtype, tensor.shape.rank == 0) if tensor_bytes(tensor.shape, tensor.dtype) else None


def _unfixed(tensor: Tensor) -> Any:
    """Return what tensors of unknown length that travel together have in common, or ``None``."""
    shape = tensor.shape
    alike = shape.rank and shape[0].value is None and shape[1:].is_fully_defined()
    return (tensor.dtype, tuple(shape[1:].as_list())) if alike else None


def _by_route(
    ops: Sequence[Operation], kind: Callable[[Any], Any], is_short: Callable[[Any], bool]
) -> Iterable[tuple[str, str, bool, Sequence[Any]]]:
    """Yield the tensors that cross from one task to another, by source, target and kind; not those without a kind.

    And between these, whether they are to be sent as bfloat16.
    """
    routes: dict[tuple[str, str, bool, Any], dict[Any, Any]] = {}
    for op in sorted(ops, key=lambda op: op._id):
        for tensor in op.inputs:
            source, target, alike = task_of(tensor.op), task_of(op), kind(tensor)
            if source != target and alike is not None and is_in_every_step(tensor.op):
                routes.setdefault((source, target, is_short(tensor), alike), {})[tensor.ref()] = tensor
    for (source, target, short, _), found in routes.items():
        yield source, target, short, list(found.values())


def _send(name: str, source: str, target: str, tensors: Sequence[Tensor], short: bool) -> None:
    """Send tensors of fixed shape as one, flattened."""
    if _go_as_they_are(tensors, short):
        return
    with tf.device(device(source)):
        packed = flat(tensors, name)
    packed = _across(packed, source, target, short)
    with tf.device(device(target)):
        _arrive(target, tensors, unflat(packed, tensors))


def _send_unfixed(source: str, target: str, tensors: Sequence[Tensor], short: bool, ids_of: Mapping[str, Any]) -> None:
    """Send tensors of unknown length as one, one after another; ids last, so that all that uses them gets them so."""
    if _go_as_they_are(tensors, short):
        return
    if _are_ids(tensors):
        parts = _sent_with_lengths(source, target, tensors)
    else:
        parts = _sent_as_rows(source, target, tensors, short, [ids_of.get(tensor.name) for tensor in tensors])
    _arrive(target, tensors, parts)


def _sent_with_lengths(source: str, target: str, ids: Sequence[Any]) -> Any:
    """Return what the target gets of several vectors; their lengths go before them."""
    count = len(ids)
    with tf.device(device(source)):
        packed = tf.concat([tf.cast(_lengths(ids), ids[0].dtype), *ids], 0, name="ids")
    with tf.device(device(target)):
        return tf.split(packed, tf.concat([[count], packed[:count]], 0), num=count + 1)[1:]


def _sent_as_rows(source: str, target: str, tensors: Sequence[Tensor], short: bool, ids: Sequence[Any]) -> Any:
    """Return what the target gets of several tensors; it knows how many rows each has if both sides have their ids."""
    with tf.device(device(source)):
        lengths = _lengths(tensors) if None in ids else None
        packed = tf.concat(tensors, 0, name="rows")
    packed = _across(packed, source, target, short)
    with tf.device(device(target)):
        return tf.split(packed, _lengths(ids) if lengths is None else lengths, num=len(tensors))


def _lengths(tensors: Sequence[Tensor]) -> Any:
    alike = len({tensor.dtype for tensor in tensors}) == 1
    return tf.stack(tf.shape_n(tensors) if alike else [tf.shape(tensor) for tensor in tensors])[:, 0]


def _are_ids(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and tensors[0].dtype in (tf.int32, tf.int64) and tensors[0].shape.rank == 1


def _can_be_short(tensor: Tensor) -> bool:
    return bool(tensor.dtype == tf.float32 and tensor.shape.rank)


def _go_as_they_are(tensors: Sequence[Tensor], short: bool) -> bool:
    return not tensors or (len(tensors) == 1 and not short)


def _across(packed: Any, source: str, target: str, short: bool) -> Any:
    """Return what the target gets of a tensor: itself, or what bfloat16 leaves of it."""
    if not short:
        return packed
    with tf.device(device(source)):
        halved = tf.cast(packed, tf.bfloat16)
    with tf.device(device(target)):
        return tf.cast(halved, tf.float32)


def _arrive(target: str, tensors: Sequence[Tensor], parts: Sequence[Any]) -> None:
    """Let all of the target's operations use what has arrived."""
    for tensor, part in zip(tensors, parts, strict=True):
        part.set_shape(tensor.shape)
        replace(tensor, part, lambda user: task_of(user) == target)


def buckets(tensors: Sequence[Tensor]) -> Iterable[Sequence[Any]]:
    """Yield tensors that travel together; what is larger than half a bucket does alone."""
    bucket: list[Any] = []
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
