"""Copy the operations of the first tower for the others, after the gradients are built.

So the model is built once, with one set of variables, layers and tables. Its gradients are built once, too: those of
loops, of ``tf.custom_gradient`` and of optimizers with an own ``compute_gradients`` need no second time. Each copy has
another batch and other random numbers, and is on another device of the worker.
"""

from collections.abc import Callable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.graph_editor import is_handle, is_in_every_step
from tfps.runtime.graph.passes.unrolling import lasts
from tfps.runtime.graph.placement import ancestors, task_of
from tfps.runtime.graph.towers.nodes import NodeCopies
from tfps.runtime.graph.towers.region import Region, draws_by_state, seed_index
from tfps.tf_types import Fetch, Graph, Operation, Tensor

_SCOPE = "tfps/tower_"
_SEED_STRIDE = 73_856_093


class Copies:
    """The copies of the first tower's operations.

    Args:
        graph: The graph.
        region: The operations to copy.
        batches: The tensors of each tower's batch; the first is that of the operations.
        devices: The device of each tower.
    """

    def __init__(
        self, graph: Graph, region: Region, batches: Sequence[Sequence[Tensor]], devices: Sequence[str]
    ) -> None:
        self._graph, self._region, self._devices = graph, region, devices
        self._ops = {op.name: op for op in region.ops}
        self._made: list[Mapping[str, Operation]] = [self._ops]
        self._nodes = NodeCopies(graph, region.ops, _SCOPE, _SEED_STRIDE)
        for number, batch in enumerate(batches[1:], 1):
            self._add(number, dict(zip((tensor.name for tensor in batches[0]), batch, strict=True)))

    @property
    def ops(self) -> set[Operation]:
        """The operations of all towers but the first."""
        return {op for copy in self._made[1:] for op in copy.values()}

    def varies(self, of: Fetch) -> bool:
        """Return whether the towers have their own of an operation or a tensor."""
        return (of if isinstance(of, tf.Operation) else of.op).name in self._ops

    def copy(self, number: int) -> Callable[[Fetch], Fetch]:
        """Return a function from an operation or a tensor of the first tower to that of another one."""
        made = self._made[number]

        def find(of: Fetch) -> Fetch:
            if isinstance(of, tf.Operation):
                return made.get(of.name, of)
            return made[of.op.name].outputs[of.value_index] if of.op.name in made else of

        return find

    def _add(self, number: int, batch: Mapping[str, Tensor]) -> None:
        wanted = self._nodes.definition(number)
        for node in wanted.node:
            node.device = self._device(self._ops[node.name], number)
        ops = list(self._ops.values())
        given = {t.name: batch.get(t.name, t) for op in ops for t in op.inputs if t.op.name not in self._ops}
        with self._graph.as_default(), tf.device(None), tf.control_dependencies(None):
            names = [op.name for op in ops]
            made = tf.import_graph_def(wanted, given, names, name=f"{_SCOPE}{number}")
        copy = dict(zip(names, made, strict=True))
        self._made.append(copy)
        for op in ops:
            outer = [one for one in op.control_inputs if one.name not in self._ops and is_in_every_step(one)]
            graph_editor.add_control_inputs(copy[op.name], outer)
            if draws_by_state(op):
                self._reseed(copy[op.name], number)
        self._put_after(copy, self._made[-2])

    def _device(self, op: Operation, number: int) -> str:
        """Return the device of a copy: that of its tower, unless the operation has a place of its own."""
        own = tf.DeviceSpec.from_string(op.device)
        on_worker = task_of(op).startswith("worker/")
        lasting = any(is_handle(tensor) and lasts(tensor.op) for tensor in op.inputs)
        if not on_worker or lasting or own.device_type == "CPU" or (own.device_index or 0) != 0:
            return str(op.device)
        return self._devices[number]

    def _reseed(self, op: Operation, number: int) -> None:
        """Make an operation whose seed is a tensor draw other numbers than that of the first tower."""
        index = seed_index(op)
        assert index is not None
        seed = op.inputs[index]
        with self._graph.as_default(), tf.device(None), tf.device(op.device), tf.control_dependencies(None):
            with tf.control_dependencies([seed.op]):
                shift = tf.cast(tf.constant([number * _SEED_STRIDE % (2**31 - 1), 0], tf.int64), seed.dtype)
            graph_editor.set_input(op, index, seed + shift)

    def _put_after(self, copy: Mapping[str, Operation], before: Mapping[str, Operation]) -> None:
        """Make each use of what the model changes wait for all uses in the tower before."""
        users: dict[Operation, list[str]] = {}
        for op in self._region.ops:
            for maker in self._region.uses(op):
                users.setdefault(maker, []).append(op.name)
        for names in users.values():
            for name in names:
                own = set(ancestors([before[other] for other in names]))
                if copy[name] not in own:
                    graph_editor.add_control_inputs(copy[name], [before[other] for other in names])
