"""A model's own updates, beside those of its optimizer: moving averages, counters, states.

TensorFlow 1.x's layers put such updates in the collection ``UPDATE_OPS``, and the training program runs them with each
step. Keras's layers do not collect them; a Keras training step would run them. This module runs both. It also runs the
changes of logged tensors and summaries (``tf.metrics``, counters), so that a counter does not depend on how often it is
shown.

With ``--mode=sync``, one update of the parameters uses a batch of each worker. Then only the chief runs the updates on
a PS, as one average of one stream of batches. Each worker runs the updates of its local state, its calls of Python and
its prints, unless they need an update that only the chief runs.

No NaN reaches a PS by such an update: the worker checks the values before it sends them.

The pass adds checks. ``update_order`` makes the updates wait, and others wait for them::

    before   worker: value --> PS: update
    check    worker: value --> CheckNumerics ==> Identity(value) --> PS: update   (==> is a control edge)
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import (
    can_wait,
    is_call,
    is_handle,
    is_in_every_step,
    set_input,
)
from tfps.runtime.graph.passes import layer_updates, side_effects
from tfps.runtime.graph.placement import VARIABLES, ancestors, holds_state, task_of
from tfps.tf_types import Graph, Operation, Tensor, Variable


def of_step(graph: Graph, on_ps: bool, loss: Tensor | None = None, shown: Sequence[Tensor] = ()) -> Sequence[Operation]:
    """Return the operations to run with each step of a model, after its ``model_fn`` has returned.

    Args:
        graph: The training graph.
        on_ps: Whether to include operations that change a PS, beside those of the loss.
        loss: The loss, which each step computes anyway.
        shown: Tensors that are read in some steps.
    """
    lasting = side_effects.Lasting(graph)
    changes = _changes(graph, lasting)
    first = _initializers(graph)
    kept = [*layer_updates.collected(graph)]
    used = [*shown, *([] if loss is None else [loss])]
    of_loss = set() if loss is None else set(ancestors([loss]))
    for write in layer_updates.of_layers(graph, changes, first, used):
        if can_wait(write):
            is_run = on_ps or write in of_loss or not _on_ps(changes[write])
            layer_updates.keep_order(write, lasting.changed(write), is_run)
            kept.append(write)
    layer_updates.warn_of_ignored(changes, {*kept, *first})
    later = [op for op in ancestors(shown) if op in changes and op not in first and op not in of_loss]
    kept += [op for op in later if can_wait(op)]
    in_loops = {op for op in later if not can_wait(op)}  # nothing but the loop's result can wait for these
    kept += [tensor.op for tensor in shown if not in_loops.isdisjoint(ancestors([tensor]))]
    if on_ps:
        return list(dict.fromkeys(kept))
    changes_ps = {op for op, makers in changes.items() if _on_ps(makers)} - of_loss
    # Nothing can wait for an operation in a loop: it runs with the update that it belongs to.
    outside = [op for op in ancestors(kept) if can_wait(op)]
    own = {op for op in outside if op in changes or (is_in_every_step(op) and side_effects.acts(op))}
    inner = [before for op in kept for before in [op, *ancestors([op])] if before is op or before in own]
    return [op for op in dict.fromkeys(inner) if op not in first and changes_ps.isdisjoint(ancestors([op]))]


def of_layers_in_loops(graph: Graph) -> Sequence[Operation]:
    """Return the changes that Keras's layers make inside loops of TensorFlow 1.x, where no step can run them."""
    changes = _changes(graph, side_effects.Lasting(graph))
    return [write for write in layer_updates.of_layers(graph, changes, _initializers(graph)) if not can_wait(write)]


def changes_ps(graph: Graph, tensor: Tensor, loss: Tensor) -> bool:
    """Return whether reading a tensor changes something on a PS that the loss does not change anyway."""
    lasting, of_loss = side_effects.Lasting(graph), set(ancestors([loss]))
    more = [op for op in ancestors([tensor]) if op not in of_loss]
    return any(_on_ps(map(lasting.origin, lasting.changed(op))) for op in more)


def need_order(graph: Graph, fetches: Sequence[Tensor | Operation], variables: Sequence[Variable]) -> bool:
    """Return whether concurrent steps of a worker could lose a model's own change, or an update of some variables.

    This is so if a variable, a row or a table's entry gets a value computed from its previous value, or if it is one of
    ``variables``. Additions lose nothing, and neither does a function that only adds.

    Args:
        graph: The training graph.
        fetches: The loss and the model's own updates.
        variables: The variables that an optimizer updates.
    """
    places = {variable.op for variable in variables}
    lasting = side_effects.Lasting(graph)
    for op in ancestors(fetches):
        changed = {lasting.origin(handle) for handle in lasting.changed(op)}
        before = ancestors([op]) if changed and not side_effects.only_adds(op) else []
        inside = is_call(op)  # what the function reads
        again = {lasting.origin(h) for one in before if one is not op or inside for h in one.inputs if is_handle(h)}
        if not changed.isdisjoint(places | again):
            return True
    return False


class Exact:
    """Selects the tensors that may lose bits on the wire. Values that the model itself changes may not.

    An average to which each step adds a small amount would stop changing.

    Args:
        graph: The training graph, before any pass changes the transfers.
        updates: The result of ``of_step``.
        trained: The variables that only the optimizer changes.
    """

    def __init__(self, graph: Graph, updates: Sequence[Operation], trained: Sequence[Variable]) -> None:
        self._sent = set(ancestors(updates))
        self._read = {one.op for one in trained if not _change(graph, updates, one)}

    def may_be_halved(self, tensor: Tensor) -> bool:
        """Return whether a transferred tensor comes from a trained variable, or goes only to the optimizer."""
        if not holds_state(tensor.op):
            return tensor.op not in self._sent
        there = [op for op in ancestors([tensor]) if task_of(op) == task_of(tensor.op)]
        return all(op in self._read for op in there if op.type in VARIABLES)


def _change(graph: Graph, updates: Sequence[Operation], variable: Variable) -> bool:
    lasting = side_effects.Lasting(graph)
    return any(lasting.origin(handle) is variable.op for op in ancestors(updates) for handle in lasting.changed(op))


def check(graph: Graph) -> Sequence[tuple[Tensor, str]]:
    """Make the model's own changes of a PS fail if a worker would send NaN for one.

    Returns:
        The sent tensors and what they are for. The optimizer should know that they hold no NaN before it changes
        anything.
    """
    found: dict[str, tuple[Tensor, str]] = {}
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
                set_input(user, index, found[tensor.name][0])
    return list(found.values())


def _without_nan(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor whose evaluation fails if it holds NaN. Inf may be intended."""
    reals = tf.stack([tf.real(tensor), tf.imag(tensor)]) if tensor.dtype.is_complex else tensor
    numbers = tf.where(tf.is_inf(reals), tf.zeros_like(reals), reals)
    with tf.control_dependencies([tf.check_numerics(numbers, f"tfps: {name}")]):
        return tf.identity(tensor)


def _sent(write: Operation, value: Tensor) -> Iterable[tuple[Tensor, Operation, int]]:
    """Yield each float tensor that a worker sends for the value of a write, its user on the PS, and the input index."""
    todo = [(value, write)]
    seen = set()
    for tensor, user in todo:  # grows during the loop
        index = next(index for index, given in enumerate(user.inputs) if given is tensor or given.name == tensor.name)
        if (tensor.name, user) in seen or tensor.dtype == tf.resource:
            continue
        seen.add((tensor.name, user))
        if holds_state(tensor.op):
            todo += [(given, tensor.op) for given in tensor.op.inputs]
        elif side_effects.may_be_nan(tensor) and is_in_every_step(tensor.op) and tensor.op.type != "Const":
            yield tensor, user, index


def _changes(graph: Graph, lasting: side_effects.Lasting) -> Mapping[Operation, Sequence[Operation]]:
    """Return the operations that change a variable, a table or the like, with the creators of the changed resources.

    The place of the creator decides who owns the change: a function that a worker calls may change a resource on a PS.
    """
    found = {op: lasting.changed(op) for op in graph.get_operations()}
    return {op: [lasting.origin(handle) for handle in handles] for op, handles in found.items() if handles}


def _on_ps(makers: Iterable[Operation]) -> Sequence[Operation]:
    return [maker for maker in makers if holds_state(maker)]


def _initializers(graph: Graph) -> Collection[Operation]:
    """Return what gives variables their first values, including what ``init_from_checkpoint`` has replaced."""
    keys = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES)
    made = {f"{op.name}/Assign" for op in graph.get_operations() if op.type in VARIABLES}
    replaced = {op for op in graph.get_operations() if op.name in made}
    return replaced | {variable.initializer for key in keys for variable in graph.get_collection(key)}
