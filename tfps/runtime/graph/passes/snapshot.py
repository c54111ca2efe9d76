"""What a checkpoint holds: all saved variables, on each PS as they are at one moment.

The values are referred to, not copied, while no update runs on that PS (``modes.moments``). Writing them takes
longer; training goes on meanwhile. Packed variables are read as they live, and saved in parts under the names of the
variables that the model made.

Several PS are read at several moments. ``same_updates`` tells whether the same updates are in all of them.
"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import io_ops
from tensorflow.python.ops import variables as variables_lib
from tensorflow.python.training.saver import BulkSaverBuilder
from tensorflow.python.training.saving import saveable_object_util
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from tfps.modes.base import PartialUpdates
from tfps.modes.moments import Moments
from tfps.modes.moments import partial as partial_of
from tfps.runtime.graph.graph_editor import unflat
from tfps.tf_types import Variable

_STEP = "global_step"


@dataclass(frozen=True)
class Place:
    """Where a packed variable lives.

    Attributes:
        whole: The variable that holds it.
        parts: All variables that ``whole`` holds, in order.
        index: Which of them it is.
    """

    whole: Variable
    parts: Sequence[Any]
    index: int


class Snapshot:
    """Reads all saved variables of a graph. Make it while that is the default.

    Args:
        moments: What keeps updates off a PS; ``None`` where none can come while this reads.
        places: By a variable's name, where it lives if it is packed.
        may_be_inf: The names of variables that may hold Inf.
        partial: What is known of updates that are made in part; ``None`` where there are none.

    Attributes:
        saveables: What a ``tf.train.Saver`` is to save and restore.
        step: int64 scalar: ``global_step``; 0 without such a variable.
        same_updates: bool [workers]: whether the same updates of each worker are in the values of all PS; empty where
            there is one PS, or no update can come.
        counts: int64 [PS, 2, workers]: by which counts of updates that is known; empty likewise.
        partial_updates: int64 scalar: how many updates are in some of the values, and not in others.
        broken: By the names of some variables, a bool vector: whether each holds NaN, or Inf that it may not hold.
        reads: Operations that let updates go on as soon as all has been read; run them with whatever uses the values.
    """

    def __init__(
        self,
        moments: Moments | None = None,
        places: Mapping[str, Place] | None = None,
        may_be_inf: Collection[str] = (),
        partial: PartialUpdates | None = None,
    ) -> None:
        self._moments, self._may_be_inf = moments, may_be_inf
        self._values: dict[SaveSpec, Any] = {}
        self._counts: list[Any] = []
        self.saveables = _saveables(places or {})
        self.step: Any = tf.constant(0, tf.int64)
        self.broken: dict[tuple[str, ...], Any] = {}
        self.reads: list[Any] = []
        for device, own in _by_device(self.saveables).items():
            self._read(device, own)
            self._look(device, [spec for saveable in own for spec in saveable.specs])
        self.counts = tf.stack(self._counts) if len(self._counts) > 1 else tf.zeros([0, 2, 0], tf.int64)
        self.same_updates = tf.reduce_all(tf.equal(self.counts, self.counts[:1]), axis=[0, 1])
        self.partial_updates = self._partial(partial)

    def value(self, spec: SaveSpec) -> Any:
        """Return the tensor that is saved for a part of ``saveables``."""
        return self._values[spec]

    def builder(self, after: Sequence[Any] = ()) -> BulkSaverBuilder:
        """Return what makes a ``tf.train.Saver`` write these values, after some operations."""
        return _Builder(self, after)

    def _partial(self, partial: PartialUpdates | None) -> Any:
        """Return how many updates are in the values in part: those that were told, and what the counts tell."""
        if partial is None or not self._counts:
            return tf.constant(0, tf.int64)
        with tf.control_dependencies(self._counts), tf.device(partial.total.device):
            return partial.total.read_value() + tf.reduce_sum(partial_of(self._counts))

    def _read(self, device: str, saveables: Sequence[SaveableObject]) -> None:
        """Refer to all that one PS holds, at one moment."""
        packed = [saveable for saveable in saveables if isinstance(saveable, _Packed)]
        wholes = {saveable.place.whole.ref(): saveable.place for saveable in packed}
        with self._moment(device) as read:
            values = {ref: _value(place.whole.handle, place.whole.dtype) for ref, place in wholes.items()}
            plain = {spec: _tensor(one, spec) for one in saveables if one not in packed for spec in one.specs}
            read += [*values.values(), *plain.values()]
        with tf.device(device):
            parts = {ref: unflat(values[ref], place.parts) for ref, place in wholes.items()}
        self._values |= plain | {one.specs[0]: parts[one.place.whole.ref()][one.place.index] for one in packed}

    @contextlib.contextmanager
    def _moment(self, device: str) -> Iterator[list[Any]]:
        """Add reads to the graph that happen while no update does; the caller tells which they are."""
        moments = self._moments if self._moments and device in self._moments.devices else None
        lock = moments.lock(device) if moments else None
        read: list[Any] = []
        with tf.control_dependencies([] if lock is None else [lock]):
            yield read
            counts = [moments.counts(device)] if moments and moments.is_updated(device) else []
        self._counts += counts
        with tf.control_dependencies([*read, *counts]), tf.device(device):
            self.reads.append(moments.unlock(lock) if moments else tf.no_op())

    def _look(self, device: str, specs: Sequence[SaveSpec]) -> None:
        """Take in the step, if it is here, and look for numbers that are not finite."""
        self.step = next((self._values[spec] for spec in specs if spec.name == _STEP), self.step)
        floats = {spec.name: self._values[spec] for spec in specs if spec.dtype.is_floating or spec.dtype.is_complex}
        if floats:
            with tf.device(device):
                looked = [_is_broken(value, name in self._may_be_inf) for name, value in floats.items()]
                self.broken[tuple(floats)] = tf.stack(looked)


class _Packed(SaveableObject):  # type: ignore[misc]
    """A variable whose value is a part of another one, and that is restored by itself."""

    def __init__(self, variable: Variable, place: Place) -> None:
        self.place, self._variable = place, variable
        part = variable._get_save_slice_info()
        spec = SaveSpec(
            tensor=variable.read_value,
            slice_spec=part.spec if part else "",
            name=saved_name(variable),
            dtype=variable.dtype.base_dtype,
            device=variable.device,
        )
        super().__init__(variable, [spec], variable.op.name)

    def restore(self, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        """Return an operation that gives the variable itself a value."""
        del restored_shapes
        with tf.device(self._variable.device):
            return self._variable.assign(tf.identity(restored_tensors[0]), read_value=False)


class _Builder(BulkSaverBuilder):  # type: ignore[misc]
    """Writes the values of a snapshot, instead of reading the variables once more."""

    def __init__(self, snapshot: Snapshot, after: Sequence[Any]) -> None:
        super().__init__()
        self._snapshot, self._after = snapshot, after

    def save_op(self, filename_tensor: Any, saveables: Sequence[SaveableObject]) -> Any:
        """Return the operation that writes a file."""
        specs = [spec for saveable in saveables for spec in saveable.specs]
        values = [self._snapshot.value(spec) for spec in specs]
        with tf.control_dependencies(self._after):
            names, slices = [spec.name for spec in specs], [spec.slice_spec for spec in specs]
            return io_ops.save_v2(filename_tensor, names, slices, values)


def saved_name(variable: Variable) -> str:
    """Return the name under which a checkpoint has a variable; slices of one share it."""
    part = variable._get_save_slice_info()
    return str(part.full_name if part else variable.op.name)


def _saveables(places: Mapping[str, Place]) -> Sequence[SaveableObject]:
    """Return what a saver of the default graph saves, each under a name of its own: slices share a variable's."""
    packed: list[Any] = []
    plain: list[Any] = []
    for one in variables_lib._all_saveable_objects():
        place = places.get(getattr(one, "name", ""))
        plain.append(one) if place is None else packed.append(_Packed(one, place))
    named = saveable_object_util.op_list_to_dict(plain)
    found: list[Any] = [*saveable_object_util.validate_and_slice_inputs(named), *packed]
    for index, saveable in enumerate(found):
        saveable.name = f"{saveable.name}/{index}"
    return found


def _by_device(saveables: Sequence[SaveableObject]) -> Mapping[str, Sequence[SaveableObject]]:
    found: dict[str, list[SaveableObject]] = defaultdict(list)
    for saveable in saveables:
        found[saveable.specs[0].device].append(saveable)
    return dict(sorted(found.items()))


def _tensor(saveable: SaveableObject, spec: SaveSpec) -> Any:
    """Return what is saved for a part of a saveable: a variable's value now, not one that some step has read."""
    handle = getattr(saveable, "handle_op", None)
    return spec.tensor if handle is None else _value(handle, spec.dtype)


def _value(handle: Any, dtype: Any) -> Any:
    """Return a variable's value as it is now, without a copy of it."""
    with tf.device(handle.device):
        unshared = tf.raw_ops.DisableCopyOnRead(resource=handle)
        with tf.control_dependencies([unshared]):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype.base_dtype)


def _is_broken(value: Any, may_be_inf: bool) -> Any:
    """Return whether a tensor of floats holds NaN, or Inf that it may not hold.

    Its sum is quick to have, and not finite where a number is not. Large numbers may have such a sum, too: only then
    each number is looked at.
    """
    value = tf.stack([tf.real(value), tf.imag(value)]) if value.dtype.is_complex else value
    wide = tf.float64 if value.dtype.base_dtype == tf.float64 else tf.float32
    total = tf.reduce_sum(tf.cast(value, wide))

    def exactly() -> Any:
        number = tf.math.is_nan(tf.cast(value, wide)) if may_be_inf else ~tf.math.is_finite(tf.cast(value, wide))
        return tf.reduce_any(number)

    return tf.cond(tf.math.is_finite(total), lambda: tf.constant(False), exactly)
