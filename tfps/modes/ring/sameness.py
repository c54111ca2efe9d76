"""Whether each worker computes the same update: its copies of the variables must stay equal, bit by bit."""

from collections.abc import Collection, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.ring.own_changes import differs
from tfps.modes.updates.update_ops import ancestors, is_writer
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.graph_editor import is_handle
from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Fetch, Operation, Variable

_DIFFERS = (
    "the optimizer uses the batch, random numbers or Python ({}): with --mode=allreduce, each worker would make "
    "another update. Use --mode=sync, or a learning rate that depends on the step."
)
_ELSEWHERE = (
    "the optimizer uses {}, of which each worker has its own value: with --mode=allreduce, each would make another "
    "update. Use --mode=sync, or a variable in tf.GraphKeys.GLOBAL_VARIABLES."
)


class Sameness:
    """What the update of each worker is computed from.

    Args:
        copied: The variables that are the same on all workers.
        mean: Operations that return the mean gradients.
        applied: The update.
    """

    def __init__(self, copied: Sequence[Variable], mean: Sequence[Operation], applied: Fetch) -> None:
        self._graph, self._mean = tf.get_default_graph(), set(mean)
        self._copied = {variable.op for variable in copied}
        self._applied = applied if isinstance(applied, tf.Operation) else applied.op

    def check(self) -> None:
        """Check the finished graph of the chief.

        Raises:
            ValueError: If the update may differ between the workers.
        """
        lasting = side_effects.Lasting(self._graph)
        for op in self._used():
            if differs(op):
                raise ValueError(_DIFFERS.format(op.name))
            for maker in (lasting.origin(tensor) for tensor in op.inputs if is_handle(tensor)):
                if maker.type == "VarHandleOp" and maker not in self._copied:
                    raise ValueError(_ELSEWHERE.format(maker.name))

    def _used(self) -> Collection[Operation]:
        """Return the operations that the update gets tensors from, without those that make the mean."""
        of_mean = set(ancestors(self._mean))
        made = [op for op in ancestors([self._applied]) if is_writer(op) and op not in of_mean]
        return graph_editor.reachable(
            made, lambda op: [tensor.op for tensor in op.inputs if tensor.op not in self._mean]
        )
