"""The content of a checkpoint: all saved variables, those of each PS as they are at one moment.

The snapshot takes references to the values, not copies, while no update runs on that PS (``modes.updates.moments``).
Writing the values takes longer, and training continues during that time. Only a TensorFlow 1.x variable is copied,
because its updates change it in place. A table exports a copy of its entries. Packed variables are read as they live,
and saved in parts under the names of the model's variables::

    before           read variables --> SaveV2
    after, per PS    lock ==> read plain and packed values, counts ==> unlock       (==> is a control edge)
                     plain values, packed values --> split into parts --> SaveV2

Different PS are read at different moments. ``same_updates`` shows whether all of them have the same updates.
"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import io_ops
from tensorflow.python.training.saver import BulkSaverBuilder
from tensorflow.python.training.saving import saveable_object_util
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from tfps.modes.recovery import PartialUpdates
from tfps.modes.updates.moments import Moments
from tfps.modes.updates.moments import partial as partial_of
from tfps.modes.updates.update_ops import place_in
from tfps.runtime.graph.graph_editor import is_handle, saveable_objects, slice_info, unflatten
from tfps.tf_types import DType, Operation, Tensor, Variable

_STEP = "global_step"
_EXPORT = "LookupTableExportV2"


@dataclass(frozen=True)
class Place:
    """The place of a packed variable.

    Attributes:
        whole: The variable that holds it.
        parts: All variables that ``whole`` holds, in order.
        index: The index of this variable in ``parts``.
    """

    whole: Variable
    parts: Sequence[Variable]
    index: int


class Snapshot:
    """Reads all saved variables of a graph. Create it while that graph is the default.

    Args:
        moments: Blocks updates on a PS; ``None`` if no update can arrive during the read.
        places: Maps the name of a packed variable to its place.
        may_be_inf: The names of variables that may hold Inf.
        partial: The known partially applied updates; ``None`` if there are none.

    Attributes:
        saveables: The objects for a ``tf.train.Saver`` to save and restore.
        step: int64 scalar: ``global_step``; 0 without such a variable.
        same_updates: bool [n]: whether all PS have the same value of each count, so that the values have the same
            updates. Empty if there is one PS, or if no update can arrive.
        counts: int64 [PS, 2, n]: the counts of updates, as in ``Moments.counts``. Empty in the same cases.
        counts_partial: Whether the PS count the updates that some of the values have and others lack.
        partial_updates: int64 scalar: the number of these updates; 0 if the PS do not count them.
        broken: Maps the names of some variables to a bool vector: whether each holds NaN, or Inf that it may not hold.
        reads: Operations that let updates continue as soon as all values are read. Run them with every use of the
            values.
    """

    def __init__(
        self,
        moments: Moments | None = None,
        places: Mapping[str, Place] | None = None,
        may_be_inf: Collection[str] = (),
        partial: PartialUpdates | None = None,
    ) -> None:
        self._moments, self._may_be_inf = moments, may_be_inf
        self._values: dict[SaveSpec, Tensor] = {}
        self._counts: list[Tensor] = []
        self.saveables = _saveables(places or {})
        self.step: Tensor = tf.constant(0, tf.int64)
        self.broken: dict[tuple[str, ...], Tensor] = {}
        self.reads: list[Operation] = []
        for device, own in _by_device(self.saveables).items():
            self._read(device, own)
            self._look(device, [spec for saveable in own for spec in saveable.specs])
        self.counts = tf.stack(self._counts) if len(self._counts) > 1 else tf.zeros([0, 2, 0], tf.int64)
        self.same_updates = tf.reduce_all(tf.equal(self.counts, self.counts[:1]), axis=[0, 1])
        self.counts_partial = partial is not None and bool(self._counts)
        self.partial_updates = self._partial(partial)

    def value(self, spec: SaveSpec) -> Tensor:
        """Return the tensor that is saved for a part of ``saveables``."""
        return self._values[spec]

    def builder(self, after: Sequence[Operation] = ()) -> BulkSaverBuilder:
        """Return the builder that makes a ``tf.train.Saver`` write these values, after some operations."""
        return _Builder(self, after)

    def _partial(self, partial: PartialUpdates | None) -> Tensor:
        """Return the number of partially applied updates: those reported, and those that the counts show."""
        if partial is None or self._moments is None or not self._counts:
            return tf.constant(0, tf.int64)
        with tf.control_dependencies(self._counts), tf.device(partial.total.device):
            unreported = partial_of(self._counts, self._moments.num_workers)
            return partial.total.read_value() + tf.reduce_sum(unreported)

    def _read(self, device: str, saveables: Sequence[SaveableObject]) -> None:
        """Take references to all values of one PS, at one moment."""
        packed = [saveable for saveable in saveables if isinstance(saveable, _Packed)]
        wholes = {saveable.place.whole.ref(): saveable.place for saveable in packed}
        with self._moment(device) as read:
            values = {ref: _value(place.whole.handle, place.whole.dtype) for ref, place in wholes.items()}
            plain = {spec: value for one in saveables if one not in packed for spec, value in self._plain(device, one)}
            read += [*values.values(), *plain.values()]
        with tf.device(device):
            parts = {ref: unflatten(values[ref], place.parts) for ref, place in wholes.items()}
        self._values |= plain | {one.specs[0]: parts[one.place.whole.ref()][one.place.index] for one in packed}

    def _plain(self, device: str, saveable: SaveableObject) -> Iterable[tuple[SaveSpec, Tensor]]:
        """Yield each part of a saveable, and its value now."""
        handle = getattr(saveable, "handle_op", None)
        exports: dict[Operation, Sequence[Tensor]] = {}  # keys and values have to be of one export
        for spec in saveable.specs:
            if handle is not None:
                yield spec, _value(handle, spec.dtype)
                continue
            tensor = spec.tensor  # of a custom saveable, this may be a call that reads something
            if tensor.op.type == _EXPORT:
                exports[tensor.op] = exports.get(tensor.op) or _exported(tensor.op)
                tensor = exports[tensor.op][tensor.value_index]
            elif is_handle(tensor) and self._moments_of(device):
                tensor = _copy(tensor.op.outputs[0])
            yield spec, tensor

    def _moments_of(self, device: str) -> Moments | None:
        """Return what blocks updates on a device; ``None`` if none can arrive."""
        return self._moments if self._moments and device in self._moments.devices else None

    @contextlib.contextmanager
    def _moment(self, device: str) -> Iterator[list[Tensor]]:
        """Add reads that run while no update does. The caller appends them to the yielded list."""
        moments = self._moments_of(device)
        lock = moments.lock(device) if moments else None
        read: list[Tensor] = []
        with tf.control_dependencies([] if lock is None else [lock]):
            yield read
            counts = [moments.counts(device)] if moments and moments.is_updated(device) else []
        self._counts += counts
        with tf.control_dependencies([*read, *counts]), tf.device(device):
            self.reads.append(moments.unlock(lock) if moments else tf.no_op())

    def _look(self, device: str, specs: Sequence[SaveSpec]) -> None:
        """Note the step, if it is on this PS, and look for non-finite numbers."""
        self.step = next((self._values[spec] for spec in specs if spec.name == _STEP), self.step)
        floats = {spec.name: self._values[spec] for spec in specs if spec.dtype.is_floating or spec.dtype.is_complex}
        if floats:
            with tf.device(device):
                may_be_inf = [name in self._may_be_inf for name in floats]
                self.broken[tuple(floats)] = _are_broken([_real(value) for value in floats.values()], may_be_inf)


class _Packed(SaveableObject):  # type: ignore[misc]
    """A variable whose value is a part of another variable, and which is restored separately."""

    def __init__(self, variable: Variable, place: Place) -> None:
        self.place, self._variable = place, variable
        part = slice_info(variable)
        spec = SaveSpec(
            tensor=variable.read_value,
            slice_spec=part.spec if part else "",
            name=saved_name(variable),
            dtype=variable.dtype.base_dtype,
            device=variable.device,
        )
        super().__init__(variable, [spec], variable.op.name)

    def restore(self, restored_tensors: Sequence[Tensor], restored_shapes: object) -> Operation:
        """Return an operation that assigns a value to the variable itself."""
        del restored_shapes
        with tf.device(self._variable.device):
            return self._variable.assign(tf.identity(restored_tensors[0]), read_value=False)


class _Builder(BulkSaverBuilder):  # type: ignore[misc]
    """Writes the values of a snapshot instead of reading the variables again."""

    def __init__(self, snapshot: Snapshot, after: Sequence[Operation]) -> None:
        super().__init__()
        self._snapshot, self._after = snapshot, after

    def save_op(self, filename_tensor: Tensor, saveables: Sequence[SaveableObject]) -> Operation:
        """Return the operation that writes a file."""
        specs = [spec for saveable in saveables for spec in saveable.specs]
        values = [self._snapshot.value(spec) for spec in specs]
        with tf.control_dependencies(self._after):
            names, slices = [spec.name for spec in specs], [spec.slice_spec for spec in specs]
            return io_ops.save_v2(filename_tensor, names, slices, values)


def saved_name(variable: Variable) -> str:
    """Return the name of a variable in a checkpoint. Slices of one variable share it."""
    part = slice_info(variable)
    return str(part.full_name if part else variable.op.name)


def _saveables(places: Mapping[str, Place]) -> Sequence[SaveableObject]:
    """Return the objects that a saver of the default graph saves. Each gets a unique name, since slices share one."""
    packed: list[Any] = []
    plain: list[Any] = []
    for one in saveable_objects():
        place = places.get(getattr(one, "name", ""))
        plain.append(one) if place is None else packed.append(_Packed(one, place))
    named = saveable_object_util.op_list_to_dict(plain)
    found: list[Any] = [*saveable_object_util.validate_and_slice_inputs(named), *packed]
    for index, saveable in enumerate(found):
        saveable.name = f"{saveable.name}/{index}"
    return found


def _by_device(saveables: Sequence[SaveableObject]) -> Mapping[str, Sequence[SaveableObject]]:
    """Return saveables by task, or by device where this names no task. A model may have asked for a CPU of a PS."""
    found: dict[str, list[SaveableObject]] = defaultdict(list)
    for saveable in saveables:
        device = saveable.specs[0].device
        found[place_in(device) or device].append(saveable)
    return dict(sorted(found.items()))


def _exported(export: Operation) -> Sequence[Tensor]:
    """Return the keys and values of a table now. The table has created ``export`` at its own creation."""
    key, value = (tensor.dtype for tensor in export.outputs)
    with tf.device(export.device):
        found = tf.raw_ops.LookupTableExportV2(table_handle=export.inputs[0], Tkeys=key, Tvalues=value)
    return found.keys, found.values


def _copy(reference: Tensor) -> Tensor:
    """Return the current value of a variable that is passed by reference, in memory of its own."""
    with tf.device(reference.device):
        return tf.raw_ops.DeepCopy(x=reference)


def _value(handle: Tensor, dtype: DType) -> Tensor:
    """Return the current value of a variable without copying it."""
    with tf.device(handle.device):
        # Sparse access turns on copy-on-read, and a read would copy the whole table.
        unshared = tf.raw_ops.DisableCopyOnRead(resource=handle)
        with tf.control_dependencies([unshared]):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype.base_dtype)


def _real(value: Tensor) -> Tensor:
    """Return the numbers of a float or complex tensor as a float tensor."""
    return tf.stack([tf.real(value), tf.imag(value)]) if value.dtype.is_complex else value


def _are_broken(values: Sequence[Tensor], may_be_inf: Sequence[bool]) -> Tensor:
    """Return for each float tensor whether it holds NaN, or Inf that it may not hold, as a bool vector.

    A sum is fast to compute, and non-finite if a number is. The sum of large numbers may be non-finite, too, so only
    then check each number. One condition for all tensors without Inf keeps the graph small.
    """
    finite = [value for value, may_be in zip(values, may_be_inf, strict=True) if not may_be]
    totals = [tf.cast(tf.reduce_sum(tf.cast(value, _wide(value))), tf.float32) for value in finite]

    def exactly() -> Tensor:
        return tf.stack([tf.reduce_any(~tf.math.is_finite(value)) for value in finite])

    found: list[Tensor] = []
    if finite:
        are_finite = tf.reduce_all(tf.math.is_finite(tf.stack(totals)))
        found = tf.unstack(tf.cond(are_finite, lambda: tf.zeros([len(finite)], tf.bool), exactly), len(finite))
    others, pairs = iter(found), zip(values, may_be_inf, strict=True)
    return tf.stack([tf.reduce_any(tf.math.is_nan(value)) if may_be else next(others) for value, may_be in pairs])


def _wide(value: Tensor) -> DType:
    """Return the type in which to add up the numbers of a float tensor."""
    return tf.float64 if value.dtype.base_dtype == tf.float64 else tf.float32
