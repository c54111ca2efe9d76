"""A slot on the PS for each worker's gradient: for updates that take some workers' gradients, or more than their sum.

An accumulator adds gradients up as they arrive. It can take none out again, and shows no single one. Here a worker
writes its gradient into its own slots. When all of it has been written, it *arrives* in an accumulator of one number
per worker, which is stamped like a gradient. An update takes the first gradients of its step to have arrived::

    worker/0   gradient --write--> slot 0 --> arrived 1st   \
    worker/1   gradient --write--> slot 1 --> arrived 3rd    >  update of the first 2: slots 0 and 2
    worker/2   gradient --write--> slot 2 --> arrived 2nd   /

So an update has whole gradients, and those of the same workers for each variable. A worker whose gradient was chosen
writes the next one after the update. A worker of an earlier generation writes nothing: it fails. The PS hold as many
copies of the gradients as there are workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.config.converters import INT64_MAX
from tfps.modes.sync import aggregation
from tfps.modes.sync.accumulators import NEVER_STALE, sum_dtype, summed_by_row
from tfps.modes.sync.collector import Collector, Held
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates.moments import FENCED
from tfps.tf_types import Gradient, Operation, Tensor, Variable


class GradientSlots(Collector):
    """The slots of all gradients.

    Args:
        gradients: Pairs as ``compute_gradients`` returns them, without those that have no gradient.
        stamp: int64 scalar: the step at which the gradients are computed.
        worker: The index of the worker that computes them.
        num_workers: The number of workers.
        needed: The number of gradients in an update.
        aggregate: How they are combined: a key of ``aggregation.ELEMENTWISE``, or ``krum``.
        device: The PS where gradients arrive.

    Attributes:
        chosen: int64 [needed]: the workers whose gradients an update has, in ascending order.
    """

    def __init__(
        self,
        gradients: Sequence[tuple[Gradient, Variable]],
        stamp: Tensor,
        worker: int,
        num_workers: int,
        needed: int,
        aggregate: str,
        device: str,
    ) -> None:
        self._aggregate, self._device = aggregate, device
        self._slots = [_Slots(*pair, number, num_workers) for number, pair in enumerate(gradients)]
        self.devices = sorted({slots.variable.device for slots in self._slots})
        self._firsts = {place: _first_stamp(place, number) for number, place in enumerate(self.devices)}
        written = [slots.write(worker, stamp, self._firsts[slots.variable.device]) for slots in self._slots]
        with tf.device(device):
            self._arrivals = _Arrivals(num_workers)
            self.pushes = [self._arrivals.add(worker, stamp, written)]
            self.chosen = self._arrivals.take(needed)
            self.held = [self._arrivals.held()]

    def begin(self, first: Tensor) -> Operation:
        """Let gradients arrive whose stamp is ``first`` or more, and empty the slots."""
        firsts = [variable.assign(first, read_value=False) for variable in self._firsts.values()]
        return tf.group(self._arrivals.begin(first), *firsts, *(slots.initializer for slots in self._slots))

    def arrived(self, device: str) -> Sequence[Operation]:
        """Return an operation that ends when a PS knows which workers' gradients an update has."""
        with tf.device(device):
            return [tf.identity(self.chosen).op]

    def combined(self, starts: Mapping[str, Operation]) -> Sequence[tuple[Gradient, Variable]]:
        """Return the combined gradients, by PS."""
        stacks = [slots.stack(self.chosen, starts[slots.variable.device]) for slots in self._slots]
        if self._aggregate == "krum":
            return self._selected(stacks, starts)
        combine = aggregation.ELEMENTWISE[self._aggregate]
        pairs = []
        for slots, stack in zip(self._slots, stacks, strict=True):
            with tf.device(slots.variable.device):
                pairs.append((slots.gradient(combine(stack.values), stack.rows), slots.variable))
        return pairs

    def _selected(
        self, stacks: Sequence["_Stack"], starts: Mapping[str, Operation]
    ) -> Sequence[tuple[Gradient, Variable]]:
        """Return the gradients of the worker that Krum selects; its distances are over all variables and PS."""
        distances = []
        for slots, stack in zip(self._slots, stacks, strict=True):
            with tf.device(slots.variable.device):
                distances.append(tf.cast(aggregation.squared_distances(stack.values), tf.float64))
        with tf.device(self._device):
            selected = self.chosen[aggregation.krum(tf.add_n(distances))]
        return [(slots.of(selected, starts[slots.variable.device]), slots.variable) for slots in self._slots]


@dataclass(frozen=True)
class _Stack:
    """The chosen gradients of a variable.

    Attributes:
        values: [n, ...]: the gradients; of sparse ones, the rows of ``rows``, 0 where a gradient has not the row.
        rows: [rows]: the indices of all rows of sparse gradients; ``None`` for dense ones.
    """

    values: Tensor
    rows: Tensor | None


class _Slots:
    """The slots of one variable's gradients, on its PS. A sparse gradient has a slot for values and one for indices.

    Args:
        gradient: This worker's gradient.
        variable: The variable.
        number: The number of the gradient among all of a step.
        num_workers: The number of slots.
    """

    def __init__(self, gradient: Gradient, variable: Variable, number: int, num_workers: int) -> None:
        self.variable, self._dtype = variable, gradient.dtype
        self._is_sparse = isinstance(gradient, tf.IndexedSlices)
        self._gradient = summed_by_row(gradient) if self._is_sparse else gradient
        self._num_workers = num_workers
        shape, name = variable.shape.as_list(), f"tfps/gradient_{number}"
        dtype = sum_dtype(gradient.dtype)
        with tf.device(variable.device):
            if not self._is_sparse:
                self._values = [shared_variable(f"{name}_{index}", shape, dtype) for index in range(num_workers)]
                self._rows: Sequence[Variable] = []
            else:
                rows = [None, *shape[1:]]
                self._values = [shared_variable(f"{name}_values_{index}", rows, dtype) for index in range(num_workers)]
                kind = gradient.indices.dtype
                self._rows = [shared_variable(f"{name}_rows_{index}", [None], kind) for index in range(num_workers)]
            self.initializer = tf.group(*(slot.initializer for slot in [*self._values, *self._rows]))

    def write(self, worker: int, stamp: Tensor, first: Variable) -> Operation:
        """Return an operation that writes this worker's gradient. It fails if the stamp is less than ``first``.

        A worker that was taken for lost, but is not, may write to the slots of its successor.
        """
        gradient = self._gradient
        parts = [gradient.values, gradient.indices] if self._is_sparse else [gradient]
        slots = [self._values[worker], *([self._rows[worker]] if self._is_sparse else [])]
        with tf.device(self.variable.device):
            arrived = [tf.identity(part) for part in parts]
            with tf.control_dependencies(arrived):
                checked = tf.raw_ops.Assert(condition=stamp >= first.read_value(), data=[FENCED])
            with tf.control_dependencies([checked]):
                pairs = zip(slots, arrived, strict=True)
                return tf.group(*(slot.assign(tf.cast(part, slot.dtype), read_value=False) for slot, part in pairs))

    def stack(self, chosen: Tensor, start: Operation) -> _Stack:
        """Return the gradients of the chosen workers, read after ``start``."""
        with tf.device(self.variable.device), tf.control_dependencies([start]):
            if not self._is_sparse:
                return _Stack(_picked([slot.read_value() for slot in self._values], chosen), None)
            values, rows = self._of(chosen)
            union, places = tf.unique(tf.concat(rows, axis=0))
            split = tf.split(places, [tf.size(own) for own in rows])
            parts = zip(values, split, strict=True)
            dense = [tf.math.unsorted_segment_sum(value, place, tf.size(union)) for value, place in parts]
            return _Stack(_picked(dense, chosen), union)

    def of(self, worker: Tensor, start: Operation) -> Gradient:
        """Return the gradient of one worker, read after ``start``; a sparse one has that worker's rows only."""
        with tf.device(self.variable.device), tf.control_dependencies([start]):
            if not self._is_sparse:
                return self.gradient(_picked([slot.read_value() for slot in self._values], worker[None])[0], None)
            values, rows = self._of(worker[None])
            return self.gradient(tf.concat(values, axis=0), tf.concat(rows, axis=0))

    def _of(self, workers: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the values and the rows of each worker's sparse gradient, without any of those not in ``workers``."""
        is_one = tf.reduce_any(tf.equal(workers[:, None], tf.range(self._num_workers, dtype=tf.int64)), axis=0)
        slots = zip(self._values, self._rows, strict=True)
        read = [[_if(is_one[index], slot.read_value()) for slot in both] for index, both in enumerate(slots)]
        return [values for values, _ in read], [rows for _, rows in read]

    def gradient(self, value: Tensor, rows: Tensor | None) -> Gradient:
        """Return a gradient of the variable, in the form of the workers' gradients."""
        value = tf.cast(value, self._dtype)
        if rows is None:
            return tf.reshape(value, self.variable.shape)
        shape = self.variable.shape.as_list()
        return tf.IndexedSlices(tf.reshape(value, [-1, *shape[1:]]), rows, tf.constant(shape, tf.int64))


def _first_stamp(device: str, number: int) -> Variable:
    """Return the int64 variable of a PS that holds the least stamp with which a gradient is written there."""
    with tf.device(device):
        return shared_variable(f"tfps/first_stamp_{number}")


def _picked(values: Sequence[Tensor], chosen: Tensor) -> Tensor:
    """Return the values of the chosen workers: [n, ...]."""
    if int(chosen.shape[0]) == len(values):
        return tf.stack(values)
    return tf.gather(tf.stack(values), chosen)


def _if(condition: Tensor, value: Tensor) -> Tensor:
    """Return a tensor, or nothing of it."""
    return value[: tf.shape(value)[0] * tf.cast(condition, tf.int32)]


class _Arrivals:
    """Which workers' gradients of a step have arrived, and in which order. Create it on the device of its operations.

    Args:
        num_workers: The number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._places = tf.ConditionalAccumulator(
            tf.float64, [num_workers], shared_name="tfps/arrivals", reduction_type="SUM"
        )
        self._count = shared_variable("tfps/places")

    def begin(self, first: Tensor) -> Operation:
        return tf.group(self._places.set_global_step(first), self._count.initializer)

    def add(self, worker: int, stamp: Tensor, written: Sequence[Operation]) -> Operation:
        """Return an operation with which a gradient arrives when it is written, unless it comes too late."""
        with tf.control_dependencies(written):
            place = tf.raw_ops.ResourceCountUpTo(resource=self._count.handle, limit=INT64_MAX, T=tf.int64)
        one = tf.one_hot(worker, self._num_workers, dtype=tf.float64)
        return self._places.apply_grad(one * tf.cast(place + 1, tf.float64), stamp)

    def take(self, needed: int) -> Tensor:
        """Return the workers whose gradients have arrived first, as soon as they are enough: int64 [needed]."""
        places = self._places.take_grad(needed)
        missing = tf.constant([INT64_MAX] * self._num_workers, tf.float64)
        order = tf.argsort(tf.where(places > 0, places, missing), stable=True)
        return tf.reshape(tf.sort(tf.cast(order[:needed], tf.int64)), [needed])

    def held(self) -> Held:
        nothing = self._places.apply_grad(tf.zeros([self._num_workers], tf.float64), NEVER_STALE)
        return Held(self._places.num_accumulated(), nothing, self._places.take_grad(1).op)
