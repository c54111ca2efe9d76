"""Check that every variable has a first value, and that evaluation and prediction use only trained variables."""

import difflib
import logging
import os
import sys
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.errors import ModelError
from tfps.models.model import Model, where
from tfps.runtime.graph import placement, variable_names
from tfps.runtime.graph.passes import model_updates, side_effects
from tfps.runtime.graph.placement import TABLES, VARIABLES
from tfps.tf_types import Graph, Operation, Variable

_FIX = "create it under the same name for mode='train' too (a Keras layer takes name=...)"
_INITIALIZED = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES)
log = logging.getLogger(__name__)

_NOT_FED = (
    "--model=%s: %s: nothing feeds the placeholder %r: its default counts in evaluation, too. For a rate of dropout, "
    "or for is_training, use mode == 'train'."
)
_OF_INPUT = "make variables in model_fn, or local to each worker, with collections=[tf.GraphKeys.LOCAL_VARIABLES]"
_COLLECT = "leave out collections=[], or add it to tf.GraphKeys.GLOBAL_VARIABLES"


def check(model: Model, mode: str, graph: Graph, trained: Graph) -> None:
    """Check that training has every variable and table that another graph of the same model has.

    Args:
        model: The model.
        mode: The mode for which ``graph`` was built.
        graph: The graph.
        trained: The training graph.

    Raises:
        ModelError: If training lacks one, or has it with another shape or type. The message names it and the line that
            created it.
    """
    mine, theirs = _of(graph, VARIABLES), _of(trained, VARIABLES)
    problems = [(op, _lacks("variable", op, theirs, mine, mode)) for name, op in mine.items() if name not in theirs]
    problems += [
        (
            op,
            f"variable {name!r} is {kind(op)} in mode={mode!r} and {kind(theirs[name])} in mode='train': "
            "make them equal",
        )
        for name, op in mine.items()
        if name in theirs and kind(op) != kind(theirs[name])
    ]
    check_numbers(model, mode, graph, {name: variable_names.shape_of(op) for name, op in theirs.items()})
    _raise(model, variable_names.swapped(mine, theirs, mode)[:1])
    tables, filled = _of(graph, TABLES), _of(trained, TABLES)
    if filled.keys() - tables.keys():  # else evaluation may have a private table, and fill it itself
        problems += [(op, _lacks("table", op, filled, tables, mode)) for n, op in tables.items() if n not in filled]
    _raise(model, problems)


def check_numbers(model: Model, mode: str, graph: Graph, trained: Mapping[str, Sequence[int]]) -> None:
    """Check that the numbers in the names of variables show which trained variables those of a graph are.

    Keras numbers the layers of each graph from the start, and TensorFlow the variables without a name. So a name may be
    that of another layer or variable.

    Args:
        model: The model.
        mode: The mode for which the graph was built.
        graph: The graph.
        trained: The shapes of the trained variables, and of others, such as an optimizer's, by name.

    Raises:
        ModelError: If they do not.
    """
    _raise(model, variable_names.ambiguous(_of(graph, VARIABLES), trained, mode))


def _raise(model: Model, problems: Sequence[tuple[Operation, str]]) -> None:
    if problems:
        raise ModelError([f"--model={model.name}: {_made_at(model, op)}: {problem}." for op, problem in problems])


def check_input(model: Model, global_step: Variable) -> None:
    """Check that the input makes no variable: each worker has its input, and only the chief gives first values.

    Raises:
        ModelError: If it does; see ``check``.
    """
    made = [variable.op for variable in tf.global_variables() if variable is not global_step]
    _raise(model, [(op, f"input_fn makes the variable {op.name!r}: {_OF_INPUT}") for op in made])


def check_first_values(model: Model, graph: Graph, run: Iterable[Operation]) -> None:
    """Check that each variable used by a step is initialized.

    Args:
        model: The model.
        graph: Its training graph.
        run: The operations of a step.

    Raises:
        ModelError: If a variable is in no collection of variables, and nothing else assigns it; see ``check``.
    """
    used = {op for op in run if not op.name.startswith("tfps/")}  # tfps initializes these elsewhere
    known = {v.op for key in _INITIALIZED for v in graph.get_collection(key)}
    first = {*used, *placement.ancestors(graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS))}
    _raise(
        model,
        [
            (op, f"nothing initializes variable {op.name!r}: {_COLLECT}")
            for op in used
            if op.type in VARIABLES and op not in known and not _is_assigned(op, first)
        ],
    )


def check_trained(model: Model, graph: Graph, variables: Collection[Variable], frozen: Container[Operation]) -> None:
    """Check that each trained variable can be on a PS, where all workers update it, and is not frozen.

    Args:
        model: The model.
        graph: Its training graph.
        variables: The variables that the optimizer updates.
        frozen: The result of ``keras_variables.freeze``.

    Raises:
        ModelError: If one is a local variable of the worker, or of a frozen Keras layer.
    """
    local = {variable.op for variable in graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)}
    text = "the optimizer trains variable {!r}, which is local to each worker: make it global, or not trainable"
    _raise(model, [(v.op, text.format(v.op.name)) for v in variables if v.op in local])
    text = (
        "the optimizer trains variable {!r}, which is frozen in Keras: leave it out of the optimizer's list, or take "
        "the list from tf.trainable_variables() in compute_gradients, which has no frozen one"
    )
    _raise(model, [(v.op, text.format(v.op.name)) for v in variables if v.op in frozen])


def check_global_step(model: Model, global_step: Variable, run: Iterable[Operation]) -> None:
    """Check that the model does not change ``global_step``, which tfps raises by one with each update.

    Args:
        model: The model.
        global_step: The variable.
        run: The operations of a step, before the mode adds its own.

    Raises:
        ModelError: If an operation changes it.
    """
    lasting = side_effects.Lasting(global_step.op.graph)
    changes = [op for op in run if global_step.op in {lasting.origin(handle) for handle in lasting.changed(op)}]
    text = "the model changes global_step, but tfps increments it with each update: leave it out"
    _raise(model, [(op, text) for op in changes[:1]])


def check_counters(model: Model, variables: Iterable[Variable], run: Collection[Operation]) -> None:
    """Check that the model has no counter of steps that only ``minimize(loss, global_step)`` would have raised.

    Args:
        model: The model.
        variables: The model's variables.
        run: The operations of a whole step, those of the optimizer included.

    Raises:
        ModelError: If a step uses an integer that begins at 0 and that nothing changes. A learning rate, say, would
            stay that of step 0.
    """
    counters = [variable.op for variable in variables if _begins_at_zero(variable) and _is_used(variable.op, run)]
    if not counters:
        return
    lasting = side_effects.Lasting(counters[0].graph)
    changed = {lasting.origin(handle) for op in run for handle in lasting.changed(op)}
    text = (
        "nothing changes variable {!r}, so that it is 0 in each step: take "
        "tf.train.get_or_create_global_step() for the step, or tf.constant(0)"
    )
    _raise(model, [(op, text.format(op.name)) for op in counters if op not in changed])


def check_feeds(model: Model, graph: Graph, run: Container[Operation]) -> None:
    """Check that a step needs no queue runner, such as that of ``tf.train.batch``, and no ``feed_dict``: it gets none.

    Args:
        model: The model.
        graph: Its graph.
        run: The operations of a step.

    Raises:
        ModelError: If it does: the step would wait for the queue without end. A placeholder with a default, which
            scripts feed in evaluation, such as that of dropout, is only named in a warning: the default may be right.
    """
    defaults = [op for op in graph.get_operations() if op.type == "PlaceholderWithDefault" and op in run]
    if defaults:
        log.warning(_NOT_FED, model.name, _made_at(model, defaults[0]), defaults[0].name)
    queues = [runner.queue.queue_ref.op for runner in graph.get_collection(tf.GraphKeys.QUEUE_RUNNERS)]
    text = "nothing fills the queue {!r}, as no queue runner is started: return a tf.data.Dataset from input_fn"
    _raise(model, [(op, text.format(op.name)) for op in queues if op in run][:1])


def check_layers(model: Model, graph: Graph, run: Container[Operation]) -> None:
    """Check that the changes that Keras's layers make can run with a step, and that the layers are of Keras 3.

    Args:
        model: The model.
        graph: Its training graph.
        run: The operations of a step, which the model itself may have made wait for such a change.

    Raises:
        ModelError: If a layer changes a variable in a loop: nothing outside can wait for the change. If one is of
            Keras 2, of whose changes tfps knows nothing, as of the averages of batch norm.
    """
    old = [op for op in _of(graph, VARIABLES).values() if _is_of_keras_2(op)]
    text = (
        "variable {!r} is of tf_keras (Keras 2), whose updates would not run: take Keras 3, unset TF_USE_LEGACY_KERAS"
    )
    _raise(model, [(op, text.format(op.name)) for op in old[:1]])
    lost = [op for op in model_updates.of_layers_in_loops(graph) if op not in run]
    text = "a Keras layer changes a variable in a loop (tf.map_fn, tf.while_loop), where the change would not be made"
    _raise(model, [(op, f"{text}: call the layer outside the loop, or with training=False") for op in lost[:1]])


def _is_of_keras_2(variable: Operation) -> bool:
    keras = getattr(sys.modules.get("tf_keras"), "__file__", None)
    home = os.path.join(os.path.dirname(keras), "") if keras else None
    return home is not None and any(frame[0].startswith(home) for frame in variable.traceback or [])


def _is_assigned(variable: Variable, run: Container[Operation]) -> bool:
    """Return whether operations assign a variable. A function that gets the variable may do so."""
    users = [user for tensor in variable.outputs for user in tensor.consumers()]
    return any(user in run and user.type not in ("ReadVariableOp", "VarIsInitializedOp", "Identity") for user in users)


def _begins_at_zero(variable: Variable) -> bool:
    """Return whether the first value of a variable is the integer 0, and does not come from a file, say."""
    first = variable.initial_value
    is_integer = variable.dtype.is_integer and variable.shape.rank == 0 and first is not None
    return is_integer and tf.get_static_value(first) == 0


def _is_used(variable: Operation, run: Container[Operation]) -> bool:
    """Return whether operations use a variable for more than to see whether it is initialized."""
    users = [user for tensor in variable.outputs for user in tensor.consumers() if user in run]
    return any(user.type not in ("VarIsInitializedOp", "IsVariableInitialized") for user in users)


def _lacks(kind: str, op: Operation, theirs: Iterable[str], mine: Iterable[str], mode: str) -> str:
    close = difflib.get_close_matches(op.name, set(theirs) - set(mine), n=1)
    rest = f", which has {close[0]!r} instead" if close else ""
    return (
        f"{kind} {op.name!r} of mode={mode!r} does not exist in mode='train'{rest}, so it has no trained value: {_FIX}"
    )


def _of(graph: Graph, types: Iterable[str]) -> Mapping[str, Operation]:
    """Return a graph's operations of some types by name, without the local variables of a task."""
    local = {variable.op.name for variable in graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)}
    return {op.name: op for op in graph.get_operations() if op.type in types and op.name not in local}


def kind(op: Operation) -> str:
    """Return the type and shape of a variable, in readable form, from the operation that creates it."""
    return f"{op.get_attr('dtype').name} of shape {tf.TensorShape(op.get_attr('shape'))}"


def _made_at(model: Model, op: Operation) -> str:
    return where(model, op.traceback or []) or model.line_of("model_fn")
