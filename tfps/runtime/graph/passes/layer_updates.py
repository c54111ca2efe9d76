"""What Keras's layers change when they are called: moving averages, random states. Nothing else would run that.

Keras 3 adds an operation to the graph for each change, and returns the assigned value instead of the operation. So each
step runs the changes that Keras itself makes. Not part of a step are first values, and what ``model_fn`` assigns to a
layer's variable, as TensorFlow 1.x runs no assignment by itself. But ``model_fn`` may put it into ``UPDATE_OPS``.

A change, its reads and calls keep the order in which the model has created them (``==>`` is a control edge)::

    read 1, read 2 ==> write ==> read 3
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.graph_editor import add_control_inputs, descendants, is_in_every_step, order
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.placement import VARIABLES, ancestors
from tfps.tf_types import Graph, Operation, Tensor

_KERAS = "/keras/src/"
_VARIABLES = ("/keras/src/backend/common/variables.py", "/keras/src/backend/tensorflow/core.py")
_PASSES = "tfps/"  # beginning of the names of reads that a pass has created
_FIRST_WEIGHTS = ("set_weights", "load_weights", "load_own_variables", "build_wrapper")  # Layer.build is the last


def of_layers(
    graph: Graph, changes: Mapping[Operation, Sequence[Operation]], first: Collection[Operation]
) -> Iterable[Operation]:
    """Yield the changes of variables that belong to each step because a Keras layer makes them.

    Args:
        graph: The training graph.
        changes: The operations that change something, with the creators of what they change.
        first: Those that give variables their first values.
    """
    asked = _asked(graph)
    for write, makers in changes.items():
        is_later = write not in first and all(maker.type in VARIABLES for maker in makers)
        if is_later and (_is_of_layer(write) or (_frames(write) and any(op in asked for op in _value(write)))):
            yield write


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


def _frames(op: Operation) -> Sequence[tuple[str, str]]:
    """Return file and function of each line of Keras in the stack of an operation's creation."""
    calls = [(call.filename.replace("\\", "/"), call.name) for call in op.traceback or ()]
    return [(filename, name) for filename, name in calls if _KERAS in filename]


def _is_of_layer(op: Operation) -> bool:
    """Return whether Keras decided on a change, and not to set first weights. ``variable.assign`` alone is the user's.

    Besides the call of a layer, this may be the update of a metric or of a random state.
    """
    frames = _frames(op)
    by_keras = any(not filename.endswith(_VARIABLES) for filename, _ in frames)
    return by_keras and not any(name in _FIRST_WEIGHTS for _, name in frames)


def _value(write: Operation) -> Collection[Operation]:
    """Return the operation of an assigned value, also if a check of the value is between."""
    value = write.inputs[-1].op
    return {value, *(tensor.op for tensor in value.inputs if value.type == "Identity")}


def _asked(graph: Graph) -> Collection[Operation]:
    """Return the operations in ``UPDATE_OPS``, and in groups there."""
    updates = tf.nest.flatten(graph.get_collection(tf.GraphKeys.UPDATE_OPS))
    ops = [update if isinstance(update, tf.Operation) else update.op for update in updates]
    return {one for op in ops for one in (op, *(op.control_inputs if op.type == "NoOp" else ()))}
