"""Staleness-aware learning rate: divide the rate of an update by the staleness of its gradient.

Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning"::

    rate of the update = rate of the optimizer / max(1, staleness)

The staleness is that of the update on one PS: the number of other updates that the PS has made between the moment
before it reads the first parameter for the step and this update. Each PS counts for itself::

    worker                                   PS, which has a counter of its updates
    1. starts a step                         seen = counter ==> reads of parameters          (==> is a control edge)
    2. computes gradients, sends them
    3.                                       lock, staleness = counter - seen
    4.                                       apply with rate / max(1, staleness) ==> counter += 1, unlock

``seen`` is read before any parameter, and the counter is raised after them. So an update that is not in the parameters
always counts. One that the PS makes while it reads them counts, too.

The rate is the ``lr`` of TensorFlow's kernels. Sparse updates of some optimizers add a change that is proportional to
the rate: there the change is divided. The division by 1 is exact, so an update without staleness is that of plain async
to the bit. An optimizer whose change of the parameters is not proportional to the rate is refused.
"""

from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.staleness import reads
from tfps.modes.updates.update_ops import ancestors, leaves, let_wait, place_of
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable

_PROPORTIONAL = (
    tf.train.GradientDescentOptimizer,
    tf.train.MomentumOptimizer,
    tf.train.AdagradOptimizer,
    tf.train.AdadeltaOptimizer,
    tf.train.AdamOptimizer,
    tf.train.RMSPropOptimizer,
)
_KERNELS = ("GradientDescent", "Momentum", "Adagrad", "AdagradV2", "Adadelta", "Adam", "RMSProp", "CenteredRMSProp")
_PREFIXES = ("ResourceApply", "ResourceSparseApply")
_RATES = ("lr", "alpha")  # the names of the rate in the kernels
_ADDITIONS = {"AssignAddVariableOp": 1, "AssignSubVariableOp": 1, "ResourceScatterAdd": 2, "ResourceScatterSub": 2}


class StalenessRate:
    """Applies gradients with an optimizer, whose rate it divides by their staleness.

    Args:
        optimizer: Applies the gradients.
        pairs: Gradients and variables, as ``compute_gradients`` returns them.

    Attributes:
        init: Operation that gives the counters their first values.
    """

    def __init__(self, optimizer: Optimizer, pairs: Sequence[tuple[Gradient, Variable]]) -> None:
        self._optimizer = optimizer
        self._variables = {variable.handle.op: variable for _, variable in pairs}
        self._times = [variable.handle.op for _, variable in pairs]
        self._counters = {place: _counter(place) for place in sorted({place_of(op) for op in self._variables})}
        self._seen = {place: _value(counter, place) for place, counter in self._counters.items()}
        self.init = tf.group(*(counter.initializer for counter in self._counters.values()))

    def apply_gradients(self, pairs: Sequence[tuple[Gradient, Variable]], global_step: Variable) -> Operation:
        """Apply gradients, as the optimizer does.

        Raises:
            ValueError: If it changes a variable in a way that is not known to be proportional to the rate.
        """
        known = set(tf.get_default_graph().get_operations())
        applied = self._optimizer.apply_gradients(pairs, global_step)
        applied = applied if isinstance(applied, tf.Operation) else applied.op
        changes = self._changes([op for op in ancestors([applied]) if op not in known])
        is_branched = any(map(graph_editor.is_in_control_flow, changes))
        raised = []
        for place, counter in self._counters.items():
            own = [op for op in changes if place_of(changes[op]) == place]
            now = _value(counter, place)
            with tf.control_dependencies(None), tf.device(place):
                staleness = tf.maximum(now - self._seen[place], 1)
                for op in own:
                    _divide_rate(op, staleness, place)
                raised.append(counter.assign_add(1, read_value=False))
            let_wait(raised[-1:], [now.op, *(leaves(applied) if is_branched else own)])
        return tf.group(applied, *raised)

    def finish(self, gates: Sequence[Operation]) -> None:
        """Make the reads of parameters follow those of the counters. Call this when all graph passes are done.

        Args:
            gates: The operations that return the gradients.
        """
        for maker, found in reads.of_gradients(gates, self._variables.values()).items():
            reads.begin_after(found, self._seen[place_of(maker)].op)

    def _changes(self, made: Sequence[Operation]) -> Mapping[Operation, Operation]:
        """Return the operations that change variables, each with the creator of the variable's handle."""
        lasting = side_effects.Lasting(tf.get_default_graph())
        makers = {lasting.origin(variable.handle): op for op, variable in self._variables.items()}
        found: dict[Operation, Operation] = {}
        for op in sorted(made, key=graph_editor.order):
            for maker in {lasting.origin(handle) for handle in lasting.changed(op)} & set(makers):
                found[op] = makers[maker]
        for op, maker in found.items():
            if not _can_divide(op):
                raise ValueError(f"{_REFUSED}: the optimizer changes {maker.name} with {op.type}, {_UNKNOWN}")
            if list(found.values()).count(maker) > self._times.count(maker):
                raise ValueError(f"{_REFUSED}: the optimizer changes {maker.name} several times in an update, {_DECAY}")
        return found


_REFUSED = "--staleness_lr divides the learning rate of an update"
_UNKNOWN = "which is not known to be proportional to the rate. Use another optimizer, or leave the flag out."
_DECAY = "perhaps for a weight decay without the rate. Use another optimizer, or leave the flag out."


def check(optimizer: Optimizer) -> None:
    """Check that the change of the parameters by a model's optimizer is proportional to its rate.

    An optimizer's class states it with ``proportional_to_rate = True`` in its own body, which subclasses do not
    inherit.

    Raises:
        ValueError: If it is not known to be.
    """
    while "wrapped" in vars(type(optimizer)):  # tfps's own checks and packing
        optimizer = optimizer.wrapped
    for kind in type(optimizer).__mro__:
        if kind is tf.train.Optimizer:
            return
        if kind not in _PROPORTIONAL and vars(kind).get("proportional_to_rate") is not True:
            raise ValueError(
                f"{_REFUSED}, and the change of the parameters by {kind.__name__} is not known to be proportional to "
                "its rate. Use another optimizer, leave the flag out, or write proportional_to_rate = True in the body "
                "of your own class."
            )


def _counter(place: str) -> Variable:
    """Return the int64 variable that counts the updates of a PS."""
    name = f"tfps/updates_{tf.DeviceSpec.from_string(place).task}"
    with tf.control_dependencies(None), tf.device(place):
        return tf.Variable(
            lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name=name
        )


def _value(counter: Variable, place: str) -> Tensor:
    with tf.control_dependencies(None), tf.device(place):
        return counter.read_value()


def _can_divide(op: Operation) -> bool:
    """Return whether an operation takes a rate, or adds a change, and is in no loop and no function."""
    kernel = next((op.type.removeprefix(prefix) for prefix in _PREFIXES if op.type.startswith(prefix)), "")
    return (kernel in _KERNELS or op.type in _ADDITIONS) and graph_editor.can_wait(op)


def _divide_rate(op: Operation, staleness: Tensor, place: str) -> None:
    """Divide the rate that an operation takes, or the change that it adds."""
    names = [arg.name for arg in op.op_def.input_arg]
    index = _ADDITIONS.get(op.type) or next(index for index, name in enumerate(names) if name in _RATES)
    with graph_editor.beside(op), tf.device(place):
        divided = op.inputs[index] / tf.cast(staleness, op.inputs[index].dtype)
    graph_editor.set_input(op, index, divided)
