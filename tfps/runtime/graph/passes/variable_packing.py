"""Pack small dense variables on a PS: several live in one variable.

A PS has a cost for each variable that it reads and for each gradient that it applies. For small ones this exceeds the
cost of their bytes. So the small variables of a PS become one variable, and so do their slots. A step reads it once,
and one gradient updates it::

    before   PS: a [2, 3], b [4]               read a, read b            apply to a, apply to b
    after    PS: tfps/packed [10] = a then b   one read, split, reshape  gradients concatenated, one apply

1. The model's variables and their slots get their first values under their names, from initializers or a checkpoint.
2. ``load`` fills the packed variables from them, and frees their memory.
3. A step uses only the packed variables. So does a checkpoint, which saves their parts under the plain names:
   ``places``.
4. ``store`` fills the plain variables again before they are read, for example by an evaluation.

All numbers are the same to the bit, because variables are packed only for optimizers that treat each element
separately. A variable that the model itself changes, reads in parts or constrains stays as it is. So does a large one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import (
    create_slots,
    device,
    flatten,
    order,
    set_control_inputs,
    set_input,
    unflatten,
    uses_locking,
)
from tfps.runtime.graph.passes import wire_packing
from tfps.runtime.graph.passes.loop_hoisting import is_unused
from tfps.runtime.graph.passes.snapshot import Place
from tfps.runtime.graph.placement import task_of, variable_bytes
from tfps.tf_types import Fetch, Gradient, Graph, Operation, Optimizer, Tensor, Variable

_NAME = "tfps/packed"
_NAMED = 3  # packed variables that a message names

_ELEMENTWISE = (
    tf.train.GradientDescentOptimizer,
    tf.train.MomentumOptimizer,
    tf.train.AdamOptimizer,
    tf.train.RMSPropOptimizer,
    tf.train.FtrlOptimizer,
)


def can_pack(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update of an element depends, to the bit, only on that element.

    This is false for TensorFlow's Adagrad, and for FTRL with a non-default power. The last few elements of a tensor,
    which do not fill a vector register, are computed with another approximation. A class of tfps or of a user states it
    with ``elementwise = True`` in its own body. Its subclasses do not inherit that, because they may override methods.
    The result is false if a function replaces a method of the optimizer or of one of its classes: it may do anything.
    """
    kind = type(optimizer)
    stated = kind in _ELEMENTWISE or vars(kind).get("elementwise") is True
    return stated and not _is_patched(optimizer) and getattr(optimizer, "_learning_rate_power", -0.5) == -0.5


def _is_patched(optimizer: Optimizer) -> bool:
    """Return whether a method of an optimizer, or of one of its classes, has been replaced.

    TensorFlow's classes are compared with those at the import of this module. Other classes may be defined later, so
    each method must have the name that ``def`` in the body of its class gives it, and be wrapped by nothing.
    """
    own = any(callable(getattr(type(optimizer), name, None)) for name in vars(optimizer))
    return own or any(_has_changed(kind) for kind in type(optimizer).__mro__[:-1])


def _has_changed(kind: type) -> bool:
    if kind in _AS_THEY_WERE:
        return _members(kind) != _AS_THEY_WERE[kind]
    methods = [value for value in _members(kind).values() if callable(value) or hasattr(value, "__get__")]
    return not all(_is_defined_in(kind, getattr(method, "fget", method)) for method in methods)


def _is_defined_in(kind: type, method: Any) -> bool:
    """Return whether ``def`` in the body of a class made a method."""
    name = str(getattr(method, "__qualname__", ""))
    own_module = getattr(method, "__module__", "") == kind.__module__
    return own_module and name.startswith(f"{kind.__qualname__}.") and not hasattr(method, "__wrapped__")


def _members(kind: type) -> Mapping[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


_AS_THEY_WERE = {one: _members(one) for kind in _ELEMENTWISE for one in kind.__mro__[:-1]}  # all but object


class Packing(tf.train.Optimizer):  # type: ignore[misc]
    """A ``tf.compat.v1.train.Optimizer`` that updates packed variables with another optimizer.

    Args:
        optimizer: The model's optimizer, for which ``can_pack`` is true.
        scalars: Whether to pack scalars, too.

    Attributes:
        updated: The model's variables that it updates; set when gradients have been computed.
    """

    def __init__(self, optimizer: Optimizer, scalars: bool) -> None:
        super().__init__(uses_locking(optimizer), optimizer.get_name())
        self._optimizer, self._scalars = optimizer, scalars
        self.updated: Sequence[Variable] = ()
        self._packs: Sequence[_PackedVariable] = ()

    def compute_gradients(self, loss: Tensor, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Variable]]:
        """Return pairs of gradient and variable as any optimizer does. Some of the variables are packed ones."""
        pairs = [pair for pair in self._optimizer.compute_gradients(loss, *args, **kwargs) if pair[0] is not None]
        self.updated = [variable for _, variable in pairs]
        gradients = {variable.ref(): gradient for gradient, variable in pairs}
        self._packs = [_PackedVariable(bucket) for bucket in _buckets(pairs, self._scalars)]
        packed = [(flatten([gradients.pop(v.ref()) for v in pack.variables]), pack.whole) for pack in self._packs]
        return packed + [pair for pair in pairs if pair[1].ref() in gradients]

    def apply_gradients(
        self, grads_and_vars: Sequence[tuple[Gradient, Variable]], global_step: Variable = None, name: str | None = None
    ) -> Fetch:
        """Apply the result of ``compute_gradients``, or means of it. Slots of packed variables are in no collection."""
        del global_step  # no optimizer that can be packed uses it
        with tf.init_scope():
            create_slots(self._optimizer, self.updated)
        with tf.variable_creator_scope(lambda create, **kwargs: create(**{**kwargs, "collections": []})):
            return self._optimizer.apply_gradients(grads_and_vars, None, name)

    def name_of(self, variable: Variable) -> str:
        """Return the name of a variable in messages. For a packed one, return the names of the variables in it."""
        names = next(([v.op.name for v in p.variables] for p in self._packs if p.whole is variable), [variable.op.name])
        return ", ".join(names[:_NAMED]) + (f" or {len(names) - _NAMED} others" if len(names) > _NAMED else "")

    def use_packed_reads(self, ops: Iterable[Operation]) -> None:
        """Make operations of a step use the packed variables instead of the plain ones. Call it once, at the end."""
        places = {v.handle.op: (pack, i) for pack in self._packs for i, v in enumerate(pack.variables)}

        def packed(read: Operation, user: Operation) -> Tensor | None:
            place = places.get(read.inputs[0].op) if read.type == "ReadVariableOp" else None
            return place and place[0].values(read, task_of(user))[place[1]]

        step = sorted(ops, key=order)
        for user in step:  # what a read waits for decides when the packed variables are read for it
            waits = [(before, packed(before, user)) for before in user.control_inputs]
            if any(value is not None for _, value in waits):
                set_control_inputs(user, [before if value is None else value.op for before, value in waits])
        for user in step:
            for index, tensor in enumerate(user.inputs):
                value = packed(tensor.op, user)
                if value is not None:
                    set_input(user, index, value)

    @property
    def wrapped(self) -> Optimizer:
        """The model's optimizer."""
        return self._optimizer

    @property
    def wholes(self) -> Sequence[Variable]:
        """The packed variables."""
        return [pack.whole for pack in self._packs]

    def load(self) -> Operation:
        """Return an operation that fills the packed variables and slots from the plain ones, and frees those."""
        return tf.group(*(pack.load(slot) for pack in self._packs for slot in self._views()))

    def store(self) -> Operation:
        """Return an operation that fills the plain variables and slots from the packed ones."""
        return tf.group(*(pack.store(slot) for pack in self._packs for slot in self._views()))

    def places(self) -> Mapping[str, Place]:
        """Return the place of each packed variable, and of each slot of one, by name."""
        found: dict[str, Place] = {}
        for pack in self._packs:
            for slot in self._views():
                parts = [slot(variable) for variable in pack.variables]
                found |= {part.name: Place(slot(pack.whole), parts, index) for index, part in enumerate(parts)}
        return found

    def _views(self) -> Sequence[Callable[[Variable], Variable]]:
        """Return functions from a variable to itself, and to each of its slots."""
        names = self._optimizer.get_slot_names()
        return [lambda variable: variable] + [lambda v, name=name: self._optimizer.get_slot(v, name) for name in names]


class _PackedVariable:
    """Variables of one PS and type, packed into one variable, ``whole``."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.variables = variables
        first, size = variables[0], sum(int(variable.shape.num_elements()) for variable in variables)
        with tf.device(first.device):
            self.whole = tf.Variable(
                lambda: tf.zeros([size], first.dtype.base_dtype),
                trainable=False,
                collections=[],
                use_resource=True,
                name=_NAME,
            )
        self._values: dict[object, Sequence[Tensor]] = {}

    def values(self, read: Operation, task: str) -> Sequence[Tensor]:
        """Return the values of the variables on a task at the time of a read of one of them: one read of ``whole``."""
        when = task, tuple(op.name for op in read.control_inputs)
        if when not in self._values:
            with tf.control_dependencies(None), tf.control_dependencies(read.control_inputs), tf.device(device(task)):
                self._values[when] = unflatten(self.whole.read_value(), self.variables)
        return self._values[when]

    def load(self, slot: Callable[[Variable], Variable]) -> Operation:
        with tf.device(self.whole.device):
            filled = slot(self.whole).assign(flatten([slot(v).read_value() for v in self.variables]), read_value=False)
            with tf.control_dependencies([filled]):
                return tf.group(*(tf.raw_ops.DestroyResourceOp(resource=slot(v).handle) for v in self.variables))

    def store(self, slot: Callable[[Variable], Variable]) -> Operation:
        with tf.device(self.whole.device):
            parts = unflatten(slot(self.whole).read_value(), self.variables)
            made = [slot(v).assign(part, read_value=False) for v, part in zip(self.variables, parts, strict=True)]
            return tf.group(*made)


def sizes(graph: Graph) -> Counter[int]:
    """Return the size in bytes of a graph's packed variables and their slots, by PS index."""
    found: Counter[int] = Counter()
    for op in graph.get_operations():
        if op.type == "VarHandleOp" and _NAME in op.name:
            found[tf.DeviceSpec.from_string(op.device).task or 0] += variable_bytes(op)
    return found


def _buckets(pairs: Sequence[tuple[Gradient, Variable]], scalars: bool) -> Iterable[Sequence[Variable]]:
    """Yield groups of at least two variables that can live together: of one PS and type, with dense gradients.

    They are sorted by name, so that every worker packs them the same way, in whatever order its model creates them.
    """
    routes: dict[tuple[str, str], list[Variable]] = {}
    times = Counter(variable.ref() for _, variable in pairs)  # a variable may have several gradients
    for gradient, variable in sorted(pairs, key=lambda pair: str(pair[1].name)):
        alike = isinstance(gradient, tf.Tensor) and gradient.dtype == variable.dtype.base_dtype
        once = times[variable.ref()] == 1
        if alike and once and (scalars or variable.shape.rank) and _is_only_read(variable):
            routes.setdefault((variable.device, gradient.dtype.name), []).append(variable)
    for _, found in sorted(routes.items()):
        yield from (bucket for bucket in wire_packing.buckets(found) if len(bucket) > 1)


def _is_only_read(variable: Variable) -> bool:
    """Return whether a variable is only read as a whole, apart from its initialization."""
    handle = getattr(variable, "handle", None)
    if handle is None or variable.constraint is not None or not variable.shape.is_fully_defined():
        return False
    return all(
        user.type == "ReadVariableOp" or user is variable.initializer or is_unused(user) for user in handle.consumers()
    )
