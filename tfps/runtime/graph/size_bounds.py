"""The largest size of a tensor whose size may differ from step to step, such as the rows that a batch looks up."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import tensorflow.compat.v1 as tf

from tfps.tf_types import Operation, Tensor


def most_bytes(tensor: Tensor) -> int | None:
    """Return the largest size of a tensor in bytes; ``None`` if no bound is found.

    What is known: a lookup of unique ids gets no more rows than there are ids in the batch, or rows in the table.
    """
    rows = _rows(tensor)
    inner = tensor.shape[1:].num_elements() if tensor.shape.rank else None
    if rows is None or inner is None or tensor.dtype.base_dtype in (tf.string, tf.variant):
        return None
    return int(rows * inner * tensor.dtype.base_dtype.size)


def _rows(tensor: Tensor) -> int | None:
    """Return the largest size of a tensor's first dimension; ``None`` if no bound is found."""
    if not tensor.shape.rank:
        return None
    size = tf.compat.dimension_value(tensor.shape[0])
    if size is not None:
        return int(size)
    bound = _BOUNDS.get(tensor.op.type)
    return bound(tensor) if bound else None


def _of_input(tensor: Tensor) -> int | None:
    return _rows(tensor.op.inputs[0])


def _of_unique(tensor: Tensor) -> int | None:
    """Return the bound of unique ids: there are no more than before, and than rows of a table that they look up."""
    if tensor.value_index != 0:
        return _rows(tensor.op.inputs[0])
    before = tensor.op.inputs[0]
    same = [tensor, before, *(before.op.inputs[:1] if before.op.type == "Reshape" else ())]
    lookups = [user for ids in same for user in _users(ids) if user.type == "ResourceGather"]
    return _least([_rows(before), *(_rows_of_table(lookup.inputs[0]) for lookup in lookups)])


def _users(tensor: Tensor) -> Iterator[Operation]:
    """Yield the users of a tensor, also of its part of what is sent together with others and split again."""
    for user in tensor.consumers():
        yield user
        if user.type == "ConcatV2":
            splits = [split for split in user.outputs[0].consumers() if split.type == "SplitV"]
            for part in (part for split in splits for part in split.outputs if _is(_before_split(part), tensor)):
                yield from part.consumers()


def _is(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.name == other.name


def _before_split(part: Tensor) -> Tensor | None:
    """Return which tensor was sent together with others, and is this part again; ``None`` if none was."""
    sent = part.op.inputs[0].op
    is_of_same = sent.type == "ConcatV2" and len(sent.inputs) - 1 == len(part.op.outputs)
    return sent.inputs[part.value_index] if is_of_same else None


def _of_split(tensor: Tensor) -> int | None:
    whole = _before_split(tensor)
    return None if whole is None else _rows(whole)


def _of_reshape(tensor: Tensor) -> int | None:
    """Return the bound of a vector that has the elements of another one."""
    before = tensor.op.inputs[0]
    return _rows(before) if tensor.shape.rank == before.shape.rank == 1 else None


def _of_lookup(tensor: Tensor) -> int | None:
    ids = tensor.op.inputs[1]
    return _rows(ids) if ids.shape.rank == 1 else None


def _of_sums(tensor: Tensor) -> int | None:
    """Return the bound of the sums of rows by their number: as many as the ids that are counted."""
    number = tensor.op.inputs[2].op
    number = number.inputs[0].op if number.type == "StridedSlice" else number
    counted = number.inputs[0] if number.type in ("Shape", "Size") else None
    return _rows(counted) if counted is not None and counted.shape.rank == 1 else None


def _of_parts(tensor: Tensor) -> int | None:
    *parts, axis = tensor.op.inputs
    rows = [_rows(part) for part in parts] if tf.get_static_value(axis) == 0 else [None]
    return None if None in rows else sum(number or 0 for number in rows)


def _rows_of_table(handle: Tensor) -> int | None:
    shape = tf.TensorShape(handle.op.get_attr("shape") if handle.op.type == "VarHandleOp" else None)
    return tf.compat.dimension_value(shape[0]) if shape.rank else None


def _least(bounds: Iterable[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


_BOUNDS: Mapping[str, Callable[[Tensor], int | None]] = {
    **dict.fromkeys(("Identity", "Cast", "StopGradient", "CheckNumerics", "CheckNumericsV2"), _of_input),
    "Unique": _of_unique,
    "Reshape": _of_reshape,
    "ResourceGather": _of_lookup,
    "UnsortedSegmentSum": _of_sums,
    "ConcatV2": _of_parts,
    "SplitV": _of_split,
}
