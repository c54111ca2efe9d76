"""Copies of variables on the worker, for modes in which a worker trains on its own.

The model, its optimizer and the mode build a step as if it used the variables on the parameter servers. When the graph
is finished, ``use`` makes the step work on the copies, on the worker's device::

    before   PS: w --> read --> worker: gradient --> PS: apply to w
    after    worker: copy of w --> read --> gradient --> apply to the copy of w

So the variables keep their names, first values, checkpoints and evaluation, whatever the mode.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates.update_ops import place_in, place_of
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Operation, Tensor, Variable


class WorkerCopies:
    """A copy of each of some variables on one worker. They last as long as the worker's process.

    Args:
        variables: Resource variables.
        device: The worker.
        prefix: Beginning of the names of the copies.
        shared: Variables on the PS, without copies, that a step changes there.

    Raises:
        ValueError: If one is no resource variable.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        device: str,
        prefix: str = "tfps/copy",
        shared: Sequence[Variable] = (),
    ) -> None:
        self._device, self._shared = device, {one.handle.op for one in shared}
        if old := next((one for one in variables if not hasattr(one, "handle")), None):
            raise ValueError(
                f"{old.op.name} is a variable of the old kind, of which a worker can have no copy: create it with "
                "use_resource=True."
            )
        with _on(self._device):
            self._handles = {one.handle.op: _handle(one, f"{prefix}/{one.op.name}") for one in variables}

    def read(self, variable: Variable) -> Tensor:
        """Add a read of a variable's copy, and return its value."""
        with _on(self._device):
            value = tf.raw_ops.ReadVariableOp(
                resource=self._handles[variable.handle.op], dtype=variable.dtype.base_dtype
            )
            value.set_shape(variable.shape)
            return value

    def assign(self, variable: Variable, value: Tensor) -> Operation:
        """Add an operation that gives a variable's copy a value, and return it."""
        with _on(self._device):
            return tf.raw_ops.AssignVariableOp(resource=self._handles[variable.handle.op], value=value)

    def pull(self, variables: Iterable[Variable]) -> Operation:
        """Add an operation that gives the copies of some variables the values on the PS."""
        return tf.group(*(self.assign(one, one.read_value()) for one in variables))

    def pull_once(self, variables: Iterable[Variable]) -> Operation:
        """Add an operation that gives the copies of some variables the values on the PS, if they have none yet."""

        def pull(one: Variable) -> Operation:
            return self.assign(one, one.read_value())

        return tf.group(*(self._either(one, if_not=functools.partial(pull, one)) for one in variables))

    def give_back(self, variables: Iterable[Variable], to: "WorkerCopies", keep: Tensor) -> Operation:
        """Add an operation that gives other copies of some variables the values of these, and return it.

        Where there are none yet, give both the values on the PS.

        Args:
            variables: The variables.
            to: The other copies.
            keep: Scalar bool: whether the other copies keep their values instead, and these get them.
        """

        def from_ps(one: Variable) -> Operation:
            value = one.read_value()
            return tf.group(self.assign(one, value), to.assign(one, value))

        def from_here(one: Variable) -> Operation:
            value = tf.cond(keep, lambda: to.read(one), lambda: self.read(one))
            return tf.group(self.assign(one, value), to.assign(one, value))

        acts = [(one, functools.partial(from_here, one), functools.partial(from_ps, one)) for one in variables]
        return tf.group(*(self._either(*act) for act in acts))

    def push(self, variables: Iterable[Variable], where: Tensor) -> Operation:
        """Add an operation that gives variables on the PS the values of their copies, where they have one.

        Args:
            variables: The variables.
            where: Scalar bool: whether to do so at all.
        """
        acts = [(one, functools.partial(self._write, one)) for one in variables]
        return tf.group(*(self._either(one, if_made=act, where=where) for one, act in acts))

    def _write(self, variable: Variable) -> Operation:
        return variable.assign(self.read(variable), read_value=False)

    def _either(
        self,
        variable: Variable,
        if_made: Callable[[], Operation] = tf.no_op,
        if_not: Callable[[], Operation] = tf.no_op,
        where: Tensor = True,
    ) -> Operation:
        """Do something if a variable's copy has a value, and ``where``, or something else."""

        def do(act: Callable[[], Operation]) -> Tensor:
            with tf.control_dependencies([act()]), _on(self._device):
                return tf.constant(True)

        with _on(self._device):
            made = tf.raw_ops.VarIsInitializedOp(resource=self._handles[variable.handle.op])
            return tf.cond(made & where, functools.partial(do, if_made), functools.partial(do, if_not)).op

    def use(self, ops: Iterable[Operation]) -> None:
        """Make operations of a step use the copies. Call it once, when all of them have a device.

        What has worked on a PS works on the worker then, unless it uses something that stays on the PS, such as a
        table.

        Raises:
            ValueError: If the step changes a variable of which there is no copy.
        """
        servers = {place_of(maker) for maker in self._handles}
        step = [op for op in ops if not any(map(graph_editor.is_handle, op.outputs)) or op.inputs]
        for op in step:
            for index, tensor in enumerate(op.inputs):
                if tensor.op in self._handles:
                    graph_editor.set_input(op, index, self._handles[tensor.op])
        for op in step:
            stays = any(graph_editor.is_handle(tensor) for tensor in op.inputs) and place_of(op) in servers
            if not stays and place_in(op.device) in servers:
                graph_editor.move(op, self._device)
        for maker in _changed_variables(step):
            if place_of(maker) in servers and maker not in self._shared:
                raise ValueError(
                    f"a step changes {maker.name}, which is not in tf.GraphKeys.GLOBAL_VARIABLES, so a worker has no "
                    "copy of it: add it to the collection."
                )


def _changed_variables(step: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the creators of the variables that a step changes, but for states of random generators."""
    lasting = side_effects.Lasting(tf.get_default_graph())
    for op in step:
        drawn = set(map(lasting.origin, lasting.drawn(op)))
        makers = map(lasting.origin, lasting.changed(op))
        yield from (maker for maker in makers if maker.type == "VarHandleOp" and maker not in drawn)


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Return a context in which new operations are on exactly this device."""
    with tf.device(None), tf.device(device):
        yield


def _handle(variable: Variable, name: str) -> Tensor:
    kind = {"dtype": variable.dtype.base_dtype, "shape": variable.shape}
    return tf.raw_ops.VarHandleOp(**kind, shared_name=name, name=name)
