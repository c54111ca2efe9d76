"""The order of a model's own updates (``model_updates``) and what an optimizer and a mode do in the same step.

The pass only adds control edges (``==>``)::

    before          update                                   gradients --> gates --> apply
    put_before      update ==> readers, gates --> apply      where one would see the change of the other
                    in sync: mean there ==> update ==> apply, unless a gradient sees the change
    put_after       checks of loss and gradients ==> update  unless these need the update; in sync also
                    mean applied ==> update

With backup workers, an update of the mode may come before the chief's step. Then it can wait for nothing of that step,
and a model is refused whose step changes what it uses.
"""

from collections.abc import Collection, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import Step
from tfps.runtime.graph.graph_editor import (
    add_control_inputs,
    can_wait,
    descendants,
    is_handle,
    is_in_every_step,
    outermost_context,
)
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.placement import TABLES, VARIABLES, ancestors
from tfps.tf_types import Graph, Operation, Tensor, Variable

_SEED_OF_KERAS = "seed_generator_state"


def put_before(
    graph: Graph,
    updates: Sequence[Operation],
    made: Sequence[Operation],
    gates: Sequence[Operation],
    trained: Sequence[Variable],
    step: Step,
) -> Sequence[Operation]:
    """Make a model's own updates end before the work of its optimizer, where one would see the other.

    This is the effect of ``with tf.control_dependencies(update_ops): optimizer.minimize(...)``. But nothing waits for
    an update that is unrelated to the optimizer, such as the averages of batch norm. Without the edges, a clipped
    weight could lose an update of the optimizer, and a learning rate could be the previous one. Nothing can wait for
    what a layer changes in a branch of ``tf.cond``: where the branch is not taken, nothing after it would run.

    Args:
        graph: The training graph.
        updates: The result of ``model_updates.of_step``.
        made: The operations with which the optimizer computes and applies gradients.
        gates: Operations among ``made`` that return the gradients. All operations that apply them wait for these.
        trained: The model's variables that the optimizer changes: in ``made``, packed ones have another name.
        step: The step. It may apply gradients in a separate run on the chief, which then waits for the updates.

    Returns:
        Operations for which the updates should wait, beside others, with ``put_after``.
    """
    lasting, between = _checked(graph, [*gates, *updates], step), list[Operation]()
    uses = {op: found for op in made if (found := {lasting.origin(h) for h in op.inputs if is_handle(h)})}
    changed = {variable.op for variable in trained}.union(*(uses[op] for op in uses if side_effects.changes(op)))
    of_gradients = set(ancestors(gates))
    elsewhere = set() if step.update is None else set(ancestors([step.update])) - of_gradients
    touched = [(op, *_touched(lasting, op)) for op in ancestors(updates) if any(map(is_handle, op.inputs))]
    for update in filter(is_in_every_step, updates):
        readers, seen = _met(touched, set(ancestors([update])), uses, of_gradients)
        late = gates if readers or not seen.isdisjoint(changed) else []
        if late and step.hold is not None and of_gradients.isdisjoint([update, *readers]):
            between.append(update)
            late = []
        _let_wait([*late, *(op for op in readers if op not in elsewhere)], update)
    return [step.hold(between)] if step.hold and between else []


def _checked(graph: Graph, ends: Sequence[Operation], step: Step) -> side_effects.Lasting:
    """Return the lasting effects of a graph. Let a step refuse those of a worker's step that ``Step.update`` uses.

    Args:
        graph: The graph.
        ends: The last operations of the worker's step.
        step: The step of the mode.

    Raises:
        ModelError: If there are such.
    """
    lasting = side_effects.Lasting(graph)
    if step.refuse is None or step.update is None:
        return lasting
    used = {lasting.origin(handle) for op in ancestors([step.update]) for handle in op.inputs if is_handle(handle)}
    if found := [op for op in ancestors(ends) if not used.isdisjoint(map(lasting.origin, lasting.changed(op)))]:
        step.refuse(found)
    return lasting


def _touched(lasting: side_effects.Lasting, op: Operation) -> tuple[set[Operation], set[Operation]]:
    """Return the creators of what an operation changes, and those of all that it uses."""
    changed = {lasting.origin(handle) for handle in lasting.changed(op)}
    return changed, {lasting.origin(handle) for handle in op.inputs if is_handle(handle)}


def _met(
    touched: Sequence[tuple[Operation, Collection[Operation], Collection[Operation]]],
    own: Collection[Operation],
    uses: Mapping[Operation, Collection[Operation]],
    of_gradients: Collection[Operation],
) -> tuple[Sequence[Operation], set[Operation]]:
    """Return which of the optimizer's operations use what an update changes, and what the update itself uses.

    Args:
        touched: Operations of all updates, each with its ``_touched``.
        own: The operations of the update.
        uses: Those of the optimizer, each with the creators of what it uses.
        of_gradients: The operations of the gradients.
    """
    changes = {maker for op, changed, _ in touched if op in own for maker in changed}
    seen = {maker for op, _, used in touched if op in own and op not in of_gradients for maker in used}
    return [op for op, found in uses.items() if not changes.isdisjoint(found)], seen


def _let_wait(ops: Sequence[Operation], update: Operation) -> None:
    """Make operations wait for an update, unless it waits for them."""
    own = ancestors([update])
    for op in dict.fromkeys(ops):
        if op not in own and can_wait(op):
            add_control_inputs(op, [update])


def put_after(graph: Graph, updates: Sequence[Operation], checks: Sequence[Operation]) -> None:
    """Make a model's own updates wait until it is certain that the step counts, so that no other step changes anything.

    An update waits for each check that does not wait for the update itself, nor for the loop that the update is in: a
    turn of a loop begins only when that of ten turns before has ended. Call this after ``put_before``.

    Args:
        graph: The training graph.
        updates: The result of ``model_updates.of_step``.
        checks: Operations that end only if the step counts, such as those that fail if a gradient is not finite.
    """
    lasting = side_effects.Lasting(graph)
    waits: dict[Operation, list[Operation]] = {}
    changes = [op for op in ancestors(updates) if lasting.changed(op)]
    for check in checks:
        early = set(ancestors([check]))
        around = {id(outermost_context(op)) for op in early}
        for op in changes:
            is_in_its_loop = not can_wait(op) and id(outermost_context(op)) in around
            for first in [op] if can_wait(op) else [] if is_in_its_loop else _ways_in(op):
                if op not in early and first not in early and check not in waits.setdefault(first, []):
                    waits[first].append(check)
    ends: dict[tuple[Operation, ...], Operation] = {}
    for first, before in waits.items():
        key = tuple(before)
        ends[key] = ends.get(key) or _ended(key)
        add_control_inputs(first, [ends[key]])


def early_changes(graph: Graph, used: Sequence[Tensor | Operation], checks: Sequence[Operation]) -> Sequence[Operation]:
    """Return the creators of the variables and tables that a model changes before it is certain that the step counts.

    Call this after ``put_after``. The states of random generators do not count: steps need not draw the same numbers.

    Args:
        graph: The training graph.
        used: The loss and the model's own updates.
        checks: See ``put_after``.
    """
    lasting = side_effects.Lasting(graph)
    after = [set(descendants([check])) for check in checks]
    early = [op for op in ancestors(used) if not all(op in found for found in after)]
    early = [op for op in early if not op.type.startswith(side_effects.OF_GENERATORS)]
    makers = dict.fromkeys(lasting.origin(handle) for op in early for handle in lasting.changed(op))
    return [one for one in makers if one.type in (*VARIABLES, *TABLES) and _SEED_OF_KERAS not in one.name]


def _ended(checks: Sequence[Operation]) -> Operation:
    """Return an operation that ends after some checks. For a group of them, an edge from each would cross the wire."""
    if len(checks) == 1:
        return checks[0]
    with tf.control_dependencies(None), tf.device(checks[0].device), tf.control_dependencies(checks):
        return tf.constant(True, name="tfps/counts").op


def _ways_in(op: Operation) -> Sequence[Operation]:
    """Return the ops through which a loop around ``op`` gets its inputs. ``op`` waits for all of them."""
    ways = [one for one in ancestors([op]) if one.type in ("Switch", "RefSwitch", "Enter", "RefEnter")]
    return [one for one in ways if all(is_in_every_step(tensor.op) for tensor in one.inputs)]
