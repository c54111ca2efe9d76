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

Rows of embedding tables, of which there are more or fewer in each step, are prepared by ``rows`` and then travel
together like other tensors, all that are alike in one, however large, with the number of each in another. What is in
a branch or a loop travels by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime import rows
from tfps.runtime.placement import needed, task_of, tensor_bytes
from tfps.runtime.rewiring import device, flat, independent, is_in_every_step, replace, unflat

BUCKET_BYTES = 1 << 20


def pack(graph: Any, fetches: Sequence[Any], narrow: bool = False) -> None:
    """Pack what crosses between tasks when a graph's ``fetches`` are run, in place.

    Args:
        graph: The training graph of one worker, whole: what is added later is not packed.
        fetches: The tensors and operations of one step.
        narrow: Send float32 tensors, but scalars, as bfloat16: half the bytes, 8 bits of each number's 24.
    """
    with graph.as_default(), tf.device(None), tf.name_scope("tfps/wire/"):
        _move_constants(needed(fetches))
        _wait_directly(needed(fetches))
        _merge_reads(needed(fetches))
        rows.make_unique(needed(fetches))
        for source, target, found in _by_route(needed(fetches), _pulled):
            for bucket in buckets(found):
                _send("pull", source, target, bucket, narrow)
        for source, target, found in _by_route(needed(fetches), _pushed):
            for bucket in buckets(independent(found, target)):
                _send("push", source, target, bucket, narrow)
        for source, target, found in _by_route(needed(fetches), _rows):
            _send("rows", source, target, independent(found, target), narrow)


def _move_constants(ops: Iterable[Any]) -> None:
    for op in ops:
        users = {_device_of(user) for user in op.outputs[0].consumers()} if op.type == "Const" else set()
        if len(users) == 1 and not op.control_inputs:
            op._set_device(users.pop())


def _wait_directly(ops: Iterable[Any]) -> None:
    """Let what waits for a group of operations wait for these themselves: those on its own task cost nothing."""
    for op in ops:
        waited_for = [leaf for other in op.control_inputs for leaf in _leaves(other, task_of(op))]
        if waited_for != list(op.control_inputs):
            op._remove_all_control_inputs()
            op._add_control_inputs(list(dict.fromkeys(waited_for)))


def _leaves(op: Any, task: str) -> Sequence[Any]:
    if op.type != "NoOp" or task_of(op) == task:
        return [op]
    return [leaf for other in op.control_inputs for leaf in _leaves(other, task)]


def _device_of(op: Any) -> str:
    """Return the device of an operation, or that of the resource that it works on."""
    resource = next((t.op.device for t in op.inputs if t.dtype == tf.resource), "")
    return str(resource or op.device)


def _is_read(tensor: Any) -> bool:
    """Tell whether a tensor is a variable's value as the step begins: a read that waits for nothing."""
    op = tensor.op
    return op.type == "ReadVariableOp" and not op.control_inputs and op.inputs[0].op.type == "VarHandleOp"


def _is_of_worker(tensor: Any) -> bool:
    return task_of(tensor.op).startswith("worker/") and tensor.op.type != "Const"  # TensorFlow copies small ones


def _merge_reads(ops: Iterable[Any]) -> None:
    """Let all that use a variable's value as the step begins use one read of it."""
    first: dict[Any, Any] = {}
    for op in sorted(ops, key=lambda op: op._id):
        if op.outputs and _is_read(op.outputs[0]):
            kept = first.setdefault((op.inputs[0].op.name, op.outputs[0].dtype), op.outputs[0])
            if kept is not op.outputs[0]:
                replace(op.outputs[0], kept, lambda _user: True)


def _pulled(tensor: Any) -> Any:
    return _fixed(tensor) if _is_read(tensor) else None


def _pushed(tensor: Any) -> Any:
    return _fixed(tensor) if _is_of_worker(tensor) else None


def _fixed(tensor: Any) -> Any:
    """Return what tensors of fixed shape that travel together have in common, or ``None``."""
    return (tensor.dtype, tensor.shape.rank == 0) if tensor_bytes(tensor.shape, tensor.dtype) else None


def _rows(tensor: Any) -> Any:
    """Return what tensors of unknown length that travel together have in common, or ``None``."""
    shape = tensor.shape
    alike = shape.rank and shape[0].value is None and shape[1:].is_fully_defined()
    return (tensor.dtype, tuple(shape[1:].as_list())) if alike else None


def _by_route(ops: Sequence[Any], kind: Callable[[Any], Any]) -> Iterable[tuple[str, str, Sequence[Any]]]:
    """Yield the tensors that cross from one task to another, by source, target and kind; not those without a kind."""
    routes: dict[tuple[str, str, Any], dict[Any, Any]] = {}
    for op in sorted(ops, key=lambda op: op._id):
        for tensor in op.inputs:
            source, target, alike = task_of(tensor.op), task_of(op), kind(tensor)
            if source != target and alike is not None and is_in_every_step(tensor.op):
                routes.setdefault((source, target, alike), {})[tensor.ref()] = tensor
    for (source, target, _), found in routes.items():
        yield source, target, list(found.values())


def _send(name: str, source: str, target: str, tensors: Sequence[Any], narrow: bool) -> None:
    """Send tensors as one: those of fixed shape flattened, those of unknown length one after another."""
    if not tensors:
        return
    fixed = tensors[0].shape.is_fully_defined()
    short = narrow and tensors[0].dtype == tf.float32 and tensors[0].shape.rank > 0
    if len(tensors) == 1 and not short:
        return
    with tf.device(device(source)):
        sizes = None if fixed else tf.stack(tf.shape_n(tensors))[:, 0]
        packed = flat(tensors, name) if fixed else tf.concat(tensors, 0, name=name)
        packed = tf.cast(packed, tf.bfloat16) if short else packed
    with tf.device(device(target)):
        packed = tf.cast(packed, tf.float32) if short else packed
        parts = unflat(packed, tensors) if fixed else tf.split(packed, sizes, num=len(tensors))
    for tensor, part in zip(tensors, parts, strict=True):
        part.set_shape(tensor.shape)
        replace(tensor, part, lambda user: task_of(user) == target)


def buckets(tensors: Sequence[Any]) -> Iterable[Sequence[Any]]:
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
