"""What Keras's layers change when they are called: moving averages, random states. Nothing else would run that.

Keras 3 adds an operation to the graph for each change, and returns the assigned value instead of the operation. So each
step runs the changes that Keras itself makes. Not part of a step are first values, and what ``model_fn`` assigns to a
layer's variable, as TensorFlow 1.x runs no assignment by itself. But as there, a step runs an assignment whose result
it uses: in the loss, in what is shown, or in ``UPDATE_OPS``.

A change, its reads and calls keep the order in which the model has created them (``==>`` is a control edge)::

    read 1, read 2 ==> write ==> read 3
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import add_control_inputs, descendants, is_in_every_step, order
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.placement import VARIABLES, ancestors
from tfps.tf_types import Graph, Operation, Tensor

_KERAS = "/keras/src/"
_VARIABLES = ("/keras/src/backend/common/variables.py", "/keras/src/backend/tensorflow/core.py")
_PASSES = "tfps/"  # beginning of the names of reads that a pass has created
_SETTERS = ("set_weights", "load_weights", "load_own_variables")
_BUILD = "build_wrapper"  # Layer.build
_OF_METRIC = "update_state"  # of the model's own subclass of Metric, of which no file of Keras is among the callers

log = logging.getLogger(__name__)


def of_layers(
    graph: Graph,
    changes: Mapping[Operation, Sequence[Operation]],
    first: Collection[Operation],
    used: Sequence[Tensor] = (),
) -> Sequence[Operation]:
    """Return the changes of variables that belong to each step because a Keras layer makes them or a step uses them.

    Args:
        graph: The training graph.
        changes: The operations that change something, with the creators of what they change.
        first: Those that give variables their first values.
        used: The loss and the tensors that are shown.
    """
    later = [op for op in _of_keras(changes) if op not in first and not _sets_first(op)]
    updates = set(ancestors(collected(graph)))
    needed = updates.union(ancestors(used))
    kept = []
    for write in sorted(later, key=order, reverse=True):  # a value is made before it is used
        is_asked = _is_assigned(write) and any(op in updates or (op in needed and _varies(op)) for op in _value(write))
        if is_asked or _is_of_layer(write):
            kept.append(write)
            needed.update(ancestors([write]))
    return kept[::-1]


def warn_of_ignored(changes: Mapping[Operation, Sequence[Operation]], run: Collection[Operation]) -> None:
    """Log which variables a model assigns values that are never used, as far as Keras is asked to assign them.

    Args:
        changes: The operations that change something, with the creators of what they change.
        run: Those that a step runs, and those that give variables their first values.
    """
    ignored = [op for op in _of_keras(changes) if op not in run and _is_by_user(op)]
    for name in dict.fromkeys(maker.name for op in ignored for maker in changes[op]):
        log.warning(
            "no step runs what the model assigns to the Keras variable %r. For a first value, use an initializer, such "
            "as kernel_initializer=tf.constant_initializer(...). To assign it in each step, add the result of "
            "assign() to tf.GraphKeys.UPDATE_OPS.",
            name,
        )


def keep_order(write: Operation, handles: Iterable[Tensor], is_run: bool) -> None:
    """Keep the order of a layer's change of a variable, its reads and calls, in which the model has created them.

    So a layer that is called twice in a step starts from what its first call has left, as in a Keras training step.

    Args:
        write: The change.
        handles: The handles of the variable.
        is_run: Whether this worker's steps run the change.
    """
    users = [user for handle in handles for user in handle.consumers()]
    reads = [op for op in users if op is not write and side_effects.returns_values(op) and is_in_every_step(op)]
    before, after = set(ancestors([write])), set(descendants([write]))
    late = [op for op in reads if order(op) > order(write) and not op.name.startswith(_PASSES) and op not in before]
    if is_run and is_in_every_step(write):
        for op in late:
            add_control_inputs(op, [write])
    add_control_inputs(write, [op for op in reads if op not in late and op not in after])


def _of_keras(changes: Mapping[Operation, Sequence[Operation]]) -> Sequence[Operation]:
    """Return the changes of variables that Keras has added to the graph."""
    return [op for op, makers in changes.items() if all(one.type in VARIABLES for one in makers) and _frames(op)]


def collected(graph: Graph) -> Sequence[Operation]:
    """Return the operations in ``UPDATE_OPS``."""
    updates = tf.nest.flatten(graph.get_collection(tf.GraphKeys.UPDATE_OPS))
    return [update if isinstance(update, tf.Operation) else update.op for update in updates]


def _calls(op: Operation) -> Iterator[tuple[str, str]]:
    """Yield file and function of each line in the stack of an operation's creation, the innermost first."""
    for call in reversed(op.traceback or ()):
        yield call.filename.replace("\\", "/"), call.name


def _frames(op: Operation) -> Sequence[tuple[str, str]]:
    """Return file and function of each line of Keras in the stack of an operation's creation."""
    return [(filename, name) for filename, name in _calls(op) if _KERAS in filename]


def _is_of_layer(op: Operation) -> bool:
    """Return whether Keras decided on a change. ``variable.assign`` alone is the user's.

    Besides the call of a layer, this may be the update of a metric or of a random state.
    """
    by_keras = any(not filename.endswith(_VARIABLES) for filename, _ in _frames(op))
    of_metric = _is_assigned(op) and any(name == _OF_METRIC for _, name in _calls(op))
    return by_keras or of_metric


def _sets_first(op: Operation) -> bool:
    """Return whether Keras sets first weights."""
    return any(name in (*_SETTERS, _BUILD) for _, name in _frames(op))


def _is_assigned(op: Operation) -> bool:
    """Return whether a change is by ``variable.assign``, and not the variable's initializer."""
    return any(name == "assign" for _, name in _frames(op))


def _is_by_user(op: Operation) -> bool:
    """Return whether the model has called ``variable.assign`` or ``set_weights``, and not a layer of Keras."""
    of_variable = dropwhile(lambda call: _KERAS not in call[0], _calls(op))
    caller, _ = next(dropwhile(lambda call: call[0].endswith(_VARIABLES), of_variable), ("", ""))
    return _is_assigned(op) and (_KERAS not in caller or any(name in _SETTERS for _, name in _frames(op)))


def _value(write: Operation) -> Collection[Operation]:
    """Return the operation of an assigned value, also if a check of the value is between."""
    value = write.inputs[-1].op
    return {value, *(tensor.op for tensor in value.inputs if value.type == "Identity")}


def _varies(value: Operation) -> bool:
    """Return whether a value may be another one in each step. A constant is a first value, even if a loss uses it."""
    return any(side_effects.has_state(op.node_def) for op in ancestors([value]))
