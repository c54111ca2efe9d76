"""Keep NaN and Inf off the parameter servers: a step with a bad loss or gradient fails before any of it is applied.

A worker checks the complete result of a step before it sends any of it. ``CheckNumerics``
(tensorflow/core/kernels/check_numerics_op.cc) fails the run, and nothing of that step is applied. ``find_non_finite``
derives from the error which value was bad, and in which step of a run with several.

Edges marked ``==>`` are control edges::

    before   gradient --> apply (PS)
    after    loss, all gradients --> checks ==> Identity of each gradient ("gate") --> apply (PS)
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.passes.unrolling import copy_number
from tfps.tf_types import Fetch, Gradient, Operation, Optimizer, Tensor, Variable

_MESSAGE = re.compile(r"tfps: ([^\n]*?) : Tensor had (NaN|Inf|Inf and NaN) values\s+\[\[\{\{node ([^}]*)\}")


class CheckedOptimizer(tf.train.Optimizer):  # type: ignore[misc]
    """A ``tf.compat.v1.train.Optimizer`` that applies another one's updates if the loss and all gradients are finite.

    Args:
        optimizer: The other optimizer.
        name_of: Function from a variable to its name in messages.
        room: The gradients must stay finite when multiplied by this factor, because they may be summed or rounded.
        sent: Tensors that are checked elsewhere and must be finite before anything is applied, and operations that must
            succeed before that.
        towers: ``towers.Towers`` of the worker, if it has several devices.
        also: Adds an operation to the graph that is part of each update, and returns it; ``None`` if there is none.

    Attributes:
        gates: Operations that return the gradients; set when these have been computed.
        checks: Operations that fail if the loss or a gradient is not finite; set at the same time.
        updated: The model's variables that the optimizer updates; set when gradients have been computed.
        counts_some_steps: Whether the optimizer raises ``global_step`` in some of the steps only; set
            when gradients have been applied. The mode raises it in each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name_of: Callable[[Variable], str],
        room: float = 1.0,
        sent: Sequence[Fetch] = (),
        towers: Any = None,
        also: Callable[[], Operation | None] | None = None,
    ) -> None:
        super().__init__(graph_editor.uses_locking(optimizer), optimizer.get_name())
        self._optimizer, self._name_of, self._room, self._sent = optimizer, name_of, room, sent
        self._towers, self._also = towers, also or (lambda: None)
        self.gates: Sequence[Operation] = ()
        self.checks: Sequence[Operation] = ()
        self.updated: Sequence[Variable] = ()
        self.counts_some_steps = False
        self._found: Sequence[tuple[Gradient, Variable]] = ()

    @property
    def wrapped(self) -> Optimizer:
        """The other optimizer."""
        return self._optimizer

    def compute_gradients(self, loss: Tensor, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Variable]]:
        """Return pairs of gradient and variable. No gradient is available before all of them are checked."""
        loss, self._found = self._computed(loss, *args, **kwargs)
        pairs = [pair for pair in self._found if pair[0] is not None]
        self.updated = getattr(self._optimizer, "updated", [variable for _, variable in pairs])
        named = [(_reals(gradient), f"the gradient of {self._name_of(variable)}") for gradient, variable in pairs]
        named = [(numbers, name) for numbers, name in named if numbers.dtype.is_floating]
        with tf.name_scope("tfps/finite/"):
            before = [*self._sent, *(self._towers.also(self._sent) if self._towers else ())]
            checks = [tf.check_numerics(loss, "tfps: the loss")] if loss.dtype.is_floating else []
            if named:
                with tf.control_dependencies(checks):  # report the loss rather than its consequences
                    checks.append(_checked(named, self._room))
            self.checks = [check.op for check in checks]
            before += checks
            with tf.control_dependencies(before):
                given = [(_same(gradient), variable) for gradient, variable in pairs]
        self.gates = [_numbers(gradient).op for gradient, _ in given]
        return given

    def _computed(self, loss: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Sequence[tuple[Gradient, Variable]]]:
        """Return the loss and the gradients of a step: with several towers, the mean over these."""
        compute = self._optimizer.compute_gradients
        if self._towers is None:
            return loss, list(compute(loss, *args, **kwargs))
        own: Any = getattr(self._optimizer, "wrapped", self._optimizer)
        overrides = getattr(own.compute_gradients, "__func__", None) is not tf.train.Optimizer.compute_gradients
        found = self._towers.compute_gradients(compute, overrides, loss, *args, **kwargs)
        return self._towers.mean(loss), found

    def apply_gradients(
        self, grads_and_vars: Sequence[tuple[Gradient, Variable]], global_step: Variable = None, name: str | None = None
    ) -> Fetch:
        """Apply the gradients as the other optimizer does, and make the change of ``also`` part of the update."""
        applied = self._applied(grads_and_vars, global_step, name)
        also = self._also()
        return applied if also is None else tf.group(applied, also)

    def _applied(
        self, grads_and_vars: Sequence[tuple[Gradient, Variable]], global_step: Variable, name: str | None
    ) -> Fetch:
        """Apply the gradients as the other optimizer does.

        The other optimizer gets the pairs in the order in which it computed them, whatever the order here. It also gets
        the variables without a gradient, because it may rely on the position of a pair.

        It gets ``global_step`` if it overrides ``apply_gradients``, because it may use the step. But only the mode
        raises the step.

        Raises:
            TypeError: If the optimizer returns no operation.
            ValueError: If the optimizer raises the step in a function, or by another amount than 1.
        """
        pairs = self._in_order(grads_and_vars)
        method = getattr(self._optimizer.apply_gradients, "__func__", None)
        if global_step is None or method is tf.train.Optimizer.apply_gradients:
            return _as_one(self._optimizer.apply_gradients(pairs, None, name))
        graph = tf.get_default_graph()
        known = set(graph.get_operations())
        applied = _as_one(self._optimizer.apply_gradients(pairs, global_step, name))
        made = [op for op in graph.get_operations() if op not in known]
        lasting = side_effects.Lasting(graph)
        raising = _raising(lasting, made, global_step)
        self.counts_some_steps = not all(map(graph_editor.is_in_every_step, raising))
        _read_as_raised(lasting, made, raising, global_step)
        return _without(raising, applied, made)

    def _in_order(self, given: Sequence[tuple[Gradient, Variable]]) -> Sequence[tuple[Gradient, Variable]]:
        """Return pairs in the order of ``compute_gradients``, including those that have no gradient."""
        gradients: dict[object, list[Gradient]] = {}
        for gradient, variable in given:
            gradients.setdefault(variable.ref(), []).append(gradient)
        return [(None if old is None else gradients[one.ref()].pop(0), one) for old, one in self._found]


def _as_one(applied: Any) -> Fetch:
    """Return the update of an optimizer as one operation or tensor. It may be several, as for ``Session.run``."""
    one = tf.group(applied) if isinstance(applied, (list, tuple, dict)) else applied
    if isinstance(one, tf.Operation) or hasattr(one, "op"):
        return one
    raise TypeError(f"the optimizer's apply_gradients returned {applied!r}: return the operation that applies them.")


def _raising(lasting: side_effects.Lasting, made: Sequence[Operation], global_step: Variable) -> set[Operation]:
    """Return the operations of an optimizer that raise ``global_step``.

    Raises:
        ValueError: If one is a call, or if a step may change ``global_step`` by another amount than 1.
    """
    raising = [op for op in made if any(lasting.origin(h) is global_step.op for h in lasting.changed(op))]
    if any(graph_editor.is_call(op) for op in raising):
        raise ValueError("the optimizer increments global_step in a tf.function or a condition: do it outside.")
    by_one = all(_adds_one(lasting, op, global_step) and graph_editor.can_wait(op) for op in raising)
    if not by_one or sum(map(graph_editor.is_in_every_step, raising)) > 1:
        raise ValueError("the optimizer changes global_step by another amount than 1, by which each update raises it.")
    return set(raising)


def _adds_one(lasting: side_effects.Lasting, op: Operation, global_step: Variable) -> bool:
    """Return whether an operation that changes ``global_step`` adds 1: ``assign_add(1)`` or ``assign(step + 1)``."""
    value = op.inputs[1]
    if "AssignAdd" in op.type:
        return bool(tf.get_static_value(value) == 1)
    if op.type != "AssignVariableOp" or value.op.type not in ("Add", "AddV2"):
        return False
    others = [tensor.op for tensor in value.op.inputs if tf.get_static_value(tensor) != 1]
    reads = [one.inputs[0].op if one.type == "Identity" else one for one in others]
    origins = [lasting.origin(one.inputs[0]) if one.type == "ReadVariableOp" else None for one in reads]
    return origins == [global_step.op]


def _without(raising: Collection[Operation], applied: Fetch, made: Sequence[Operation]) -> Fetch:
    """Return ``applied`` without the operations that raise the step, and remove control edges from these."""

    def before(op: Operation) -> list[Operation]:
        if op not in raising:
            return [op]
        return [leaf for other in [*op.control_inputs, *(t.op for t in op.inputs)] for leaf in before(other)]

    for op in made:
        if any(other in raising for other in op.control_inputs):
            waits = [leaf for other in op.control_inputs for leaf in before(other)]
            graph_editor.set_control_inputs(op, waits)
    done = applied if isinstance(applied, tf.Operation) else applied.op
    return tf.group(*before(done)) if done in raising else applied


def _read_as_raised(
    lasting: side_effects.Lasting, made: Sequence[Operation], raising: Collection[Operation], global_step: Variable
) -> None:
    """Make reads after the optimizer has raised ``global_step`` return the raised value: the mode raises it later."""
    after = set(graph_editor.descendants(raising))
    for op in [op for op in made if op in after and op not in raising]:
        if global_step.op not in {lasting.origin(tensor) for tensor in op.inputs if graph_editor.is_handle(tensor)}:
            continue
        if graph_editor.is_call(op):
            raise ValueError("the optimizer reads global_step in a tf.function, after it has raised it: do it outside.")
        if op.type == "ReadVariableOp":
            readers = set(op.outputs[0].consumers())
            with graph_editor.beside(op):
                raised = op.outputs[0] + tf.raw_ops.OnesLike(x=op.outputs[0])
            graph_editor.replace(op.outputs[0], raised, readers.__contains__)


def _checked(named: Sequence[tuple[Tensor, str]], room: float) -> Tensor:
    """Return a tensor whose evaluation fails unless some tensors are finite.

    Sum their squares first, which is fast. Large numbers may also overflow the sum, so check each number only if the
    sum is not finite.
    """
    squares = tf.add_n([tf.cast(tf.nn.l2_loss(numbers), tf.float32) for numbers, _ in named])

    def exactly() -> Tensor:
        checks = [tf.check_numerics(_with_room(numbers, room), f"tfps: {name}") for numbers, name in named]
        with tf.control_dependencies(checks):
            return tf.constant(True)

    return tf.cond(tf.is_finite(squares), lambda: tf.constant(True), exactly)


def _with_room(numbers: Tensor, room: float) -> Tensor:
    """Return numbers as large as their sum may become. Types of 16 bits are summed as float32 and need no room."""
    return numbers * room if room > 1 and numbers.dtype.size > 2 else numbers


def _numbers(gradient: Gradient) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _reals(gradient: Gradient) -> Tensor:
    """Return the numbers of a gradient. A complex number counts as two real ones."""
    numbers = _numbers(gradient)
    return tf.stack([tf.real(numbers), tf.imag(numbers)]) if numbers.dtype.is_complex else numbers


def _same(gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


@dataclass(frozen=True)
class NonFiniteValue:
    """A non-finite value in readable form, and the index of its step within the run, starting at 0."""

    what: str
    index: int


def find_non_finite(error: Any) -> NonFiniteValue | None:
    """Return the non-finite value that an error of a run reports; ``None`` if the error is about something else.

    The error may be of any class: errors of operations cancelled because of it are reported with it, sometimes first.
    """
    match = _MESSAGE.search(error.message)
    if match is None:
        return None
    what, kind, node = match.groups()
    value = kind.lower().replace("inf and nan", "nan")
    what = f"the loss is {value}" if what == "the loss" else f"{what} holds {kind}"
    return NonFiniteValue(what, copy_number(node))
