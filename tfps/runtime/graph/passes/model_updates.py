"""What a model changes itself, beside what its optimizer does: moving averages, counters, states.

TensorFlow 1.x's layers leave such changes in the collection ``UPDATE_OPS``, for the training program to run with each
step. Keras's layers leave them nowhere: a Keras training step would run them. Both are run here. So is what a logged
tensor or a summary changes (``tf.metrics``, counters): how often one is shown must not change what it counts.

With ``--mode=sync``, one update of the parameters is made of a batch of each worker; those on a PS are then the
chief's alone, as one average of one stream of batches. State of a worker's own is each worker's.

No NaN reaches a PS by such a change: what a worker sends for it is looked at before.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import is_in_every_step
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.placement import VARIABLES, ancestors, task_of
from tfps.tf_types import Graph, Operation, Tensor, Variable

_KERAS = "/keras/src/"
_FIRST_WEIGHTS = ("set_weights", "load_weights", "load_own_variables")


def of_step(graph: Graph, on_ps: bool, loss: Tensor | None = None, shown: Sequence[Tensor] = ()) -> Sequence[Operation]:
    """Return the operations that have to run with each step of a model, once its ``model_fn`` has returned.

    Args:
        graph: The training graph.
        on_ps: Whether what changes a PS is among them.
        loss: What each step computes anyway.
        shown: Tensors that are read now and then.
    """
    lasting = side_effects.Lasting(graph)
    changes = _changes(graph, lasting)
    first = _initializers(graph)
    kept = [_operation(update) for update in tf.nest.flatten(graph.get_collection(tf.GraphKeys.UPDATE_OPS))]
    for write, makers in changes.items():
        if write not in first and _is_of_layer(write) and all(maker.type in VARIABLES for maker in makers):
            _read_before(write, lasting.changed(write))
            kept.append(write)
    of_loss = set() if loss is None else set(ancestors([loss]))
    kept += [op for op in ancestors(shown) if op in changes and op not in first and op not in of_loss]
    if on_ps:
        return list(dict.fromkeys(kept))
    changes_ps = {op for op, makers in changes.items() if _on_ps(makers)}
    inner = [before for op in kept for before in [op, *ancestors([op])] if before is op or before in changes]
    return [op for op in dict.fromkeys(inner) if op not in first and changes_ps.isdisjoint(ancestors([op]))]


def changes_ps(graph: Graph, tensor: Tensor) -> bool:
    """Return whether reading a tensor changes something on a PS."""
    lasting = side_effects.Lasting(graph)
    return any(_on_ps(map(lasting.origin, lasting.changed(op))) for op in ancestors([tensor]))


def put_before(
    graph: Graph, updates: Sequence[Operation], made: Sequence[Any], gates: Sequence[Operation], apart: Any
) -> None:
    """Let a model's own updates end before what its optimizer makes of the step, where one would see the other.

    As ``with tf.control_dependencies(update_ops): optimizer.minimize(...)`` does it; but an update that has nothing to
    do with the optimizer, as batch norm's averages, is not waited for. A weight that is clipped, read before an update
    of the optimizer and written after it, would lose that; and so would a learning rate be the one before.

    Args:
        graph: The training graph.
        updates: What ``of_step`` returned.
        made: The operations by which the optimizer computes and applies gradients.
        gates: Those of them that give the gradients, which all that is applied waits for.
        apart: The operation of a run of its own, on the chief, that applies them; ``None`` if the step does.
    """
    lasting = side_effects.Lasting(graph)
    uses = {op: found for op in made if (found := {lasting.origin(h) for h in op.inputs if side_effects.is_handle(h)})}
    changed = set().union(*(found for op, found in uses.items() if side_effects.changes(op)))
    of_gradients = set(ancestors(gates))
    elsewhere = set() if apart is None else set(ancestors([apart])) - of_gradients
    for update in updates:
        own = ancestors([update])
        changes = {lasting.origin(handle) for op in own for handle in lasting.changed(op)}
        seen = {
            lasting.origin(h) for op in own if op not in of_gradients for h in op.inputs if side_effects.is_handle(h)
        }
        readers = [op for op, found in uses.items() if not found.isdisjoint(changes)]
        late = gates if readers or not seen.isdisjoint(changed) else []
        for op in dict.fromkeys([*late, *(op for op in readers if op not in elsewhere)]):
            if op not in own and is_in_every_step(op):
                op._add_control_input(update)


def put_after(graph: Graph, updates: Sequence[Operation], checks: Sequence[Any]) -> None:
    """Let a model's own updates wait until it is known that the step is finite: one that is skipped changes nothing.

    All but what the loss or a gradient itself waits for. To be called after ``put_before``.

    Args:
        graph: The training graph.
        updates: What ``of_step`` returned.
        checks: Operations that fail where the loss or a gradient is not finite.
    """
    lasting, early = side_effects.Lasting(graph), set(ancestors(checks))
    for op in ancestors(updates) if checks else ():
        if op in early or not lasting.changed(op):
            continue
        for first in [op] if is_in_every_step(op) else _ways_in(op):
            if first not in early:
                first._add_control_inputs(checks)


def _ways_in(op: Operation) -> Sequence[Any]:
    """Return by which operations what is in a branch or a loop gets anything from outside: it waits for all of them."""
    ways = [one for one in ancestors([op]) if one.type in ("Switch", "RefSwitch", "Enter", "RefEnter")]
    return [one for one in ways if all(is_in_every_step(tensor.op) for tensor in one.inputs)]


def need_order(graph: Graph, fetches: Sequence[Tensor | Operation], variables: Sequence[Variable]) -> bool:
    """Return whether two steps of a worker at once could lose one of a model's own changes, or some variables' updates.

    So it is where a variable, a row or a table's entry gets a value that was made of the one it had, or where it is one
    of those given. Adding to it loses nothing, and neither does a function that only adds.

    Args:
        graph: The training graph.
        fetches: The loss and the model's own updates.
        variables: Those that an optimizer updates.
    """
    places = {variable.op for variable in variables}
    lasting = side_effects.Lasting(graph)
    for op in ancestors(fetches):
        changed = {lasting.origin(handle) for handle in lasting.changed(op)}
        before = ancestors([op]) if changed and not side_effects.only_adds(op) else []
        is_call = side_effects.is_call(op)
        again = {
            lasting.origin(h)
            for one in before
            if one is not op or is_call
            for h in one.inputs
            if side_effects.is_handle(h)
        }
        if not changed.isdisjoint(places | again):
            return True
    return False


class Exact:
    """Which tensors may lose bits on their way, and which may not: those of what a model changes itself.

    An average to which a little is added each step would stand still.

    Args:
        graph: The training graph, before anything on the wire is changed.
        updates: What ``of_step`` returned.
        trained: The variables that only the optimizer changes.
    """

    def __init__(self, graph: Graph, updates: Sequence[Operation], trained: Sequence[Any]) -> None:
        self._sent = set(ancestors(updates))
        self._read = {one.op for one in trained if not _change(graph, updates, one)}

    def may_be_halved(self, tensor: Tensor) -> bool:
        """Return whether a tensor that crosses is a trained variable's, or goes to the optimizer alone."""
        task = task_of(tensor.op)
        if not task.startswith("ps/"):
            return tensor.op not in self._sent
        there = [op for op in ancestors([tensor]) if task_of(op) == task]
        return all(op in self._read for op in there if op.type in VARIABLES)


def _change(graph: Graph, updates: Sequence[Operation], variable: Variable) -> bool:
    lasting = side_effects.Lasting(graph)
    return any(lasting.origin(handle) is variable.op for op in ancestors(updates) for handle in lasting.changed(op))


def _read_before(write: Any, handles: Iterable[Any]) -> None:
    """Let a change of a variable wait for what reads it in the same step, as in a Keras training step."""
    after = set(_users_of(write))
    users = [user for handle in handles for user in handle.consumers()]
    reads = [op for op in users if op.type == "ReadVariableOp" and op not in after]
    write._add_control_inputs([op for op in reads if is_in_every_step(op)])


def _users_of(op: Operation) -> Iterable[Any]:
    """Return an operation, and what runs after it."""
    todo = [op]
    for each in todo:  # grows while it is read
        users = [user for output in each.outputs for user in output.consumers()] + list(each._control_outputs)
        todo += [user for user in dict.fromkeys(users) if user not in todo]
    return todo


def check(graph: Graph) -> Sequence[tuple[Any, str]]:
    """Let the changes of a PS that a model makes itself fail where a worker would send NaN for one.

    Returns:
        What is sent, and what it is for: before the optimizer changes anything, it should know that no NaN is in it.
    """
    found: dict[str, tuple[Any, str]] = {}
    lasting, first = side_effects.Lasting(graph), _initializers(graph)
    for write, makers in _changes(graph, lasting).items():
        on_ps = _on_ps(makers)
        if not on_ps or write in first or not is_in_every_step(write):
            continue
        name = f"what the model assigns to {on_ps[0].name}"
        for value in lasting.values(write, on_ps):
            for tensor, user, index in _sent(write, value):
                if tensor.name not in found:
                    with tf.device(tensor.op.device), tf.control_dependencies(None):
                        found[tensor.name] = _without_nan(tensor, name), name
                user._update_input(index, found[tensor.name][0])
    return list(found.values())


def _without_nan(tensor: Tensor, name: str) -> Any:
    """Return a tensor that can be had if it holds no NaN; Inf may be meant."""
    reals = tf.stack([tf.real(tensor), tf.imag(tensor)]) if tensor.dtype.is_complex else tensor
    numbers = tf.where(tf.is_inf(reals), tf.zeros_like(reals), reals)
    with tf.control_dependencies([tf.check_numerics(numbers, f"tfps: {name}")]):
        return tf.identity(tensor)


def _sent(write: Any, value: Any) -> Iterable[tuple[Any, Any, int]]:
    """Yield each tensor of floats that a worker sends for the value of a write, its user on the PS, and which input."""
    todo = [(value, write)]
    seen = set()
    for tensor, user in todo:  # grows while it is read
        index = next(index for index, given in enumerate(user.inputs) if given is tensor or given.name == tensor.name)
        if (tensor.name, user) in seen or tensor.dtype == tf.resource:
            continue
        seen.add((tensor.name, user))
        if task_of(tensor.op).startswith("ps/"):
            todo += [(given, tensor.op) for given in tensor.op.inputs]
        elif side_effects.may_be_nan(tensor) and is_in_every_step(tensor.op) and tensor.op.type != "Const":
            yield tensor, user, index


def _changes(graph: Graph, lasting: side_effects.Lasting) -> Mapping[Any, Sequence[Any]]:
    """Return by each operation that changes a variable, a table or the like, what has made those that it changes.

    Where that is decides whose the change is: a function that a worker calls may change what is on a PS.
    """
    found = {op: lasting.changed(op) for op in graph.get_operations()}
    return {op: [lasting.origin(handle) for handle in handles] for op, handles in found.items() if handles}


def _on_ps(makers: Iterable[Any]) -> Sequence[Any]:
    return [maker for maker in makers if task_of(maker).startswith("ps/")]


def _initializers(graph: Graph) -> Collection[Any]:
    keys = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES)
    return {variable.initializer for key in keys for variable in graph.get_collection(key)}


def _is_of_layer(op: Operation) -> bool:
    """Return whether an operation was made by Keras as a layer was called, and not to give it its first weights."""
    calls = [call for call in op.traceback or () if _KERAS in call.filename.replace("\\", "/")]
    return bool(calls) and not any(call.name in _FIRST_WEIGHTS for call in calls)


def _operation(update: Any) -> Any:
    return update if isinstance(update, tf.Operation) else update.op
