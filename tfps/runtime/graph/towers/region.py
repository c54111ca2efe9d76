"""Which operations of a model each tower has of its own, and which all towers share.

A tower has its own of what depends on its batch or draws random numbers, of loops that hold such, and of what lives for
one step only. It shares the reads of parameters, so that these cross the wire once, and what is the same in each tower.

The model's own changes of variables and tables are made once, with the first batch, and shared; or once a tower::

    updates of the first    batch 0 --> average --> assign v                    batch 1: makes no average
    updates of all          batch 0 --> average --> assign v  ==>  batch 1 --> average --> assign v
"""

from collections.abc import Collection, Iterable, Sequence

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import op_def_registry

from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.cancel_safe_iterator import INPUTS
from tfps.runtime.graph.graph_editor import is_handle, is_in_every_step
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.passes.unrolling import lasts
from tfps.runtime.graph.placement import ancestors
from tfps.tf_types import Fetch, Graph, Operation, Tensor

_OF_RANDOM_OPS = ("StatefulRandom", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform", "Rng")
_OWN_INPUTS = (*INPUTS, "QueueDequeueV2", "QueueDequeueManyV2", "QueueDequeueUpToV2", "ReaderReadV2")


class Region:
    """The operations of a step that each tower has of its own.

    Args:
        graph: The graph.
        batch: The tensors of the first tower's batch.
        fetches: What the towers compute.
        of_all: Whether each tower makes the model's own changes.

    Attributes:
        ops: The operations, in the order of their creation.
        changes: Those that change what lasts, if each tower has its own; otherwise the changes that the towers share
            although they use the batch of the first.
    """

    def __init__(self, graph: Graph, batch: Iterable[Tensor], fetches: Sequence[Fetch], of_all: bool) -> None:
        self._graph, self._lasting, self._of_all = graph, side_effects.Lasting(graph), of_all
        self._inside = set(ancestors(fetches))
        batch = [*batch]
        self._batch = {tensor.name for tensor in batch}
        self._input = set(ancestors(batch))
        changing = {op for op in self._inside if self._changes(op)}
        self._changed = {self._lasting.origin(handle) for op in changing for handle in self._lasting.changed(op)}
        varying = self._after(self._sources(), changing if not of_all else ())
        self.ops = sorted(varying, key=graph_editor.order)
        of_first = {op for op in changing if any(self._varies(tensor, varying) for tensor in op.inputs)}
        self.changes = changing & varying if of_all else of_first

    def depends(self, fetch: Fetch) -> bool:
        """Return whether a value depends on one of the ``changes``."""
        return not self.changes.isdisjoint(ancestors([fetch]))

    def uses(self, op: Operation) -> Sequence[Operation]:
        """Return the creators of the changed resources that an operation uses."""
        handles = [tensor for tensor in op.inputs if is_handle(tensor)]
        return [maker for maker in {self._lasting.origin(tensor): None for tensor in handles} if maker in self._changed]

    def check(self, of_loss: Sequence[Fetch]) -> None:
        """Check that the towers can be copies.

        Args:
            of_loss: The loss and the gradients.

        Raises:
            ValueError: If a loss would use what another tower's batch has changed, or if an operation cannot be copied.
        """
        hidden = [op for op in self.ops if side_effects.has_hidden_state(op)]
        if hidden:
            raise ValueError(
                f"--devices_per_worker: {hidden[0].name!r} ({hidden[0].type}) keeps state in itself. {_ONE}"
            )
        if self._of_all:
            held = [op for op in self.ops if self.uses(op) and not is_in_every_step(op)]
            if held:
                raise ValueError(
                    f"--tower_updates=all: {held[0].name!r} uses in a branch or a loop what the model changes. {_ONE}"
                )
            return
        inside = set(ancestors(of_loss))
        for op in sorted(self.changes & inside, key=graph_editor.order):
            if self._is_used(op, inside):
                makers = ", ".join(repr(self._lasting.origin(handle).name) for handle in self._lasting.changed(op))
                raise ValueError(
                    f"--devices_per_worker: the model changes {makers} with its batch, and the loss uses the changed "
                    f"value ({op.name!r}): give --tower_updates=all, with which each device's batch makes the change "
                    f"in turn. Or give --devices_per_worker=1."
                )

    def _is_used(self, change: Operation, inside: Collection[Operation]) -> bool:
        """Return whether a loss uses what a change returns, or what it has changed."""
        if not is_in_every_step(change) and graph_editor.while_context(change) is not None:
            return True
        if any(user in inside for user in graph_editor.data_users(change)):
            return True
        makers = {self._lasting.origin(handle) for handle in self._lasting.changed(change)}
        after = graph_editor.descendants([change], within=inside.__contains__)
        users = [op for op in after if op is not change and not makers.isdisjoint(self.uses(op))]
        return any(side_effects.returns_values(op) or "Lookup" in op.type for op in users)

    def _changes(self, op: Operation) -> bool:
        return not op.type.startswith(_OF_RANDOM_OPS) and bool(self._lasting.changed(op))

    def _varies(self, tensor: Tensor, varying: Collection[Operation]) -> bool:
        return tensor.name in self._batch or tensor.op in varying

    def _is_shared(self, op: Operation) -> bool:
        """Return whether an operation is the same in all towers: it lasts, or reads a variable outside of a loop."""
        if lasts(op) or op in self._input:
            return True
        is_read = op.type in ("ReadVariableOp", "VariableShape", "VarIsInitializedOp") and is_in_every_step(op)
        return is_read and not (self._of_all and self.uses(op))

    def _sources(self) -> Sequence[Operation]:
        """Return the operations with which the towers begin to differ."""
        return [op for op in self._inside if not self._is_shared(op) and self._is_source(op)]

    def _is_source(self, op: Operation) -> bool:
        if any(tensor.name in self._batch for tensor in op.inputs):
            return True
        if self._of_all and self.uses(op):
            return True
        if any(is_handle(tensor) for tensor in op.outputs) and not any(is_handle(tensor) for tensor in op.inputs):
            return True  # it lives for one step
        own = op.type in _OWN_INPUTS or op.type.startswith(_OF_RANDOM_OPS) or side_effects.acts(op)
        return own or side_effects.draws(self._graph, op.node_def) or _draws(op) or draws_by_state(op)

    def _after(self, sources: Sequence[Operation], cut: Collection[Operation]) -> set[Operation]:
        """Return operations and all that depend on them, with the whole of each loop."""

        def within(op: Operation) -> bool:
            return op in self._inside and op not in cut and not self._is_shared(op)

        loops: dict[int, list[Operation]] = {}
        for op in self._inside:
            if (loop := graph_editor.outermost_loop(op)) is not None:
                loops.setdefault(id(loop), []).append(op)
        found: set[Operation] = set()
        more = [op for op in sources if op not in cut]
        while more:
            found |= set(graph_editor.descendants([*found, *more], within))
            touched = {id(graph_editor.outermost_loop(op)) for op in found}
            more = [op for key, ops in loops.items() if key in touched for op in ops if op not in found]
        return found


_ONE = "Give --devices_per_worker=1."


def seed_index(op: Operation) -> int | None:
    """Return the index of the input with the seed of an operation that draws without a state of its own."""
    known = op_def_registry.get(op.type) if op.type.startswith("Stateless") else None
    names = [arg.name for arg in known.input_arg] if known is not None else []
    return names.index("seed") if "seed" in names else None


def draws_by_state(op: Operation) -> bool:
    """Return whether an operation draws random numbers by a seed that is another one in each step, for any batch."""
    index = seed_index(op)
    if index is None or tf.get_static_value(op.inputs[index]) is not None:
        return False
    before = ancestors([op.inputs[index]])
    return not any(one.type in INPUTS for one in before) and any(side_effects.has_state(one.node_def) for one in before)


def _draws(op: Operation) -> bool:
    """Return whether an operation draws seeded random numbers itself."""
    known = op_def_registry.get(op.type)
    return known is not None and known.is_stateful and "seed2" in op.node_def.attr
