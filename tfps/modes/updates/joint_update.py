"""Make an update with branches or loops atomic: one critical section, under the locks of all PS that it changes.

An optimizer may apply gradients inside ``tf.cond`` or ``tf.while_loop``, or in a function that changes several PS, or
assign what a worker computes from the old value, as BERT's does: ``w.assign(w - r * g)``. Or it lets the worker compute
from what it has just written, such as an average: ``average.assign_sub(0.1 * (average - w))`` after the step. A lock
cannot be taken inside a branch: if the branch is not taken, nothing would release it. So the update takes the locks
before the branch, and before the first read of what it changes, and releases them after it (``==>`` is a control
edge)::

    before   gradients --> Switch --> [branch: apply on ps/0, apply on ps/1] --> Merge
    after    gradients arrive ==> lock ps/0 ==> lock ps/1 ==> begun += 1 on both
                 ==> Switch --> [branch: apply on ps/0, apply on ps/1] --> Merge
                 ==> applied += 1, global_step += 1 ==> unlock ps/0, unlock ps/1

Control edges start and end only outside all branches and loops, or at their entries. What is there runs in every step,
whichever branch is taken.

All workers take the locks in the same order, so they cannot deadlock. A reader takes one lock at a time, and waits for
nothing while it has one. All inputs of the section arrive before the first lock is taken, and what the optimizer
computes in the section is moved to the PS. So the PS wait for each other while they hold locks, but for no worker.
Exceptions are a function, a call of Python, and local variables: they stay on the worker.
"""

from collections.abc import Collection, Iterable, Sequence

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import DEVICE_OF_STATE
from tfps.modes.updates.moments import APPLIED, BEGUN, Moments
from tfps.modes.updates.update_ops import READS, Update, ancestors, is_constant, is_writer, leaves, let_wait, place_of
from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.graph_editor import is_handle, is_in_control_flow, outermost_context
from tfps.tf_types import Operation, Tensor, Variable

_SWITCHES = ("Switch", "RefSwitch")
_IDENTITIES = ("Identity", "RefIdentity")
_ASSIGNS = (
    *("AssignVariableOp", "ResourceScatterUpdate", "ResourceScatterNdUpdate", "ResourceStridedSliceAssign"),
    *("Assign", "ScatterUpdate", "ScatterNdUpdate", "StridedSliceAssign"),
)
_PLAIN_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_PASS_ON = (
    *(*_SWITCHES, *_IDENTITIES, "Enter", "RefEnter", "Merge", "RefMerge"),
    *("Exit", "RefExit", "NextIteration", "RefNextIteration"),
)


def is_needed(made: Collection[Operation], global_step: Variable) -> bool:
    """Return whether an update needs the locks of all its PS at the same time.

    It does if a branch or a loop uses what it changes, or a function changes what several tasks have, or another task
    computes a change from what must not be the value of another update.

    Args:
        made: The operations of the update.
        global_step: int64 resource variable.
    """
    resources = changed(made, global_step)
    for op in made:
        used = _used(op)
        if resources.isdisjoint(used):
            continue
        if is_in_control_flow(op) and op.type not in _PASS_ON:
            return True
        if graph_editor.is_call(op) and (op.type not in _PLAIN_CALLS or len({place_of(one) for one in used}) > 1):
            return True
        if (op.type in READS or is_change(op)) and _is_used_elsewhere(op, made, resources):
            return True
    return False


def _is_used_elsewhere(source: Operation, made: Collection[Operation], resources: Collection[Operation]) -> bool:
    """Return whether a change of an update is computed on another task from a value that an operation returns.

    Additions of what was computed from an old value lose nothing. So only two kinds count: what is assigned, and what
    is computed from a value that the update itself has changed.

    Args:
        source: Reads or changes a resource.
        made: The operations of the update.
        resources: The creators of the resources on PS that it changes.
    """

    def fed(ops: Iterable[Operation]) -> Sequence[Operation]:
        return graph_editor.reachable(ops, lambda op: [user for user in graph_editor.data_users(op) if user in made])

    used, before = _used(source), ancestors([source], made.__contains__)
    is_new = any(is_change(op) and not used.isdisjoint(_used(op)) for op in before)
    values = fed([source])
    changes = [op for op in values if is_change(op) and not _used(op).isdisjoint(resources)]
    changes = [op for op in changes if is_new or op.type in _ASSIGNS]
    return any(op in fed(one for one in values if place_of(one) != place_of(op)) for op in changes)


def is_change(op: Operation) -> bool:
    """Return whether an operation may change a variable or the like."""
    return is_writer(op) and op.type not in _PASS_ON


class JointUpdate:
    """The critical section of an update.

    Args:
        made: The operations of the update.
        applied: The operation that ends when all of them have ended.
        gates: The operations that return the gradients.
        global_step: int64 resource variable.
        moments: The locks and counts.
        worker: The index of the worker.
    """

    def __init__(
        self,
        made: Collection[Operation],
        applied: Operation,
        gates: Sequence[Operation],
        global_step: Variable,
        moments: Moments,
        worker: int,
    ) -> None:
        self._applied, self._gates, self._global_step = applied, gates, global_step
        self._moments, self._worker = moments, worker
        resources = changed(made, global_step)
        places = {place_of(op) for op in resources}
        self._first = place_of(global_step.handle.op)
        self._devices = [device for device in moments.devices if device in places]
        self._section = sorted(_section(made, resources), key=graph_editor.order)

    def build(self) -> Update:
        """Lock the section. Return the operations that end it."""
        _move_to_ps(self._section, self._first)
        with tf.control_dependencies(None):
            arrived = self._arrived()
            locks = self._lock(arrived)
            begun = self._begin(list(locks.values()))
            self._let_section_wait(begun)
            ends = self._end(locks, begun)
        return Update(ends.pop(self._first), list(ends.values()), len(self._devices) > 1, self._first)

    def _arrived(self) -> Sequence[Operation]:
        """Return operations that end when everything that the section needs from elsewhere has arrived on the PS."""
        section = set(self._section)
        inputs: dict[tuple[str, str], Tensor] = {}
        others: dict[Operation, None] = dict.fromkeys(set(self._gates) - set(ancestors(section)))
        for op in self._section:
            place = self._ps_of(op)
            for tensor in op.inputs:
                if not is_handle(tensor) and _may_be_awaited(tensor.op, section):
                    inputs[tensor.name, place] = tensor
            others |= dict.fromkeys(other for other in op.control_inputs if _may_be_awaited(other, section))
        arrived: list[Operation] = []
        for (_, place), tensor in sorted(inputs.items()):
            with tf.device(place):
                arrived.append(tf.identity(tensor).op)
        return [*arrived, *sorted(others, key=graph_editor.order)]

    def _lock(self, arrived: Sequence[Operation]) -> dict[str, Tensor]:
        """Take the lock of each PS, one after another."""
        locks: dict[str, Tensor] = {}
        arrived = [*arrived, *(op for device in self._devices for op in self._moments.awaited(device))]
        for device in self._devices:
            self._moments.updates(device)
            lock = self._moments.lock(device)
            let_wait([lock.op], [*arrived, *(other.op for other in locks.values())])
            locks[device] = lock
        return locks

    def _begin(self, locks: Sequence[Tensor]) -> Sequence[Operation]:
        """Check that no PS has fenced the worker, and then count on each PS that the update begins."""
        checked = [op for device in self._devices for op in self._moments.check(device, self._worker)]
        let_wait(checked, [lock.op for lock in locks])
        begun = [self._moments.raised(BEGUN, device, self._worker) for device in self._devices]
        let_wait(begun, [*(lock.op for lock in locks), *checked])
        return begun

    def _let_section_wait(self, begun: Sequence[Operation]) -> None:
        """Let everything that uses a variable wait until the update has begun on each PS."""
        waiting = [op for op in self._section if op.type in READS or is_writer(op)]
        for device in self._devices:
            with tf.device(device):
                go = tf.no_op()
            let_wait([go], begun)
            own = [op for op in waiting if self._ps_of(op) == device and graph_editor.can_wait(op)]
            let_wait(own, [go])
            for call in filter(graph_editor.is_call, own):
                self._let_inputs_wait(call, go)

    def _let_inputs_wait(self, call: Operation, go: Operation) -> None:
        """Make each input of a call wait. TensorFlow replaces a call by its body, and not all of that waits for it."""
        for index, tensor in enumerate(list(call.inputs)):
            place = tensor.op.device if is_handle(tensor) else self._first
            with tf.device(place), tf.control_dependencies([go]):
                graph_editor.set_input(call, index, tf.identity(tensor))

    def _end(self, locks: dict[str, Tensor], begun: Sequence[Operation]) -> dict[str, Operation]:
        """Count the update on each PS when all of it is done, raise the step, and release the locks."""
        raised = [self._moments.raised(APPLIED, self._first, self._worker), self._raise(self._global_step)]
        let_wait(raised, [*begun, *leaves(self._applied), *self._returned()])
        ends: dict[str, Operation] = {}
        for device, lock in locks.items():
            after = list(raised)
            if device != self._first:
                after = [self._moments.raised(APPLIED, device, self._worker)]
                let_wait(after, raised)
            ends[device] = self._moments.unlock(lock)
            let_wait([ends[device]], after)
        return ends

    def _returned(self) -> Sequence[Operation]:
        """Return operations that end when the calls of the section have returned.

        They wait for the outputs: TensorFlow replaces a call by its body, and not all of that ends before the call.
        """
        calls = [op for op in self._section if graph_editor.is_call(op) and not _may_be_skipped(op)]
        with tf.device(self._first):
            return [tf.identity(tensor).op for op in calls for tensor in op.outputs if not is_handle(tensor)]

    def _raise(self, counter: Variable) -> Operation:
        with tf.device(counter.device):
            return counter.assign_add(1, read_value=False)

    def _ps_of(self, op: Operation) -> str:
        """Return the PS of an operation, among those that are locked; the first for one that is elsewhere."""
        place = place_of(op)
        return place if place in self._devices else self._first


def changed(made: Collection[Operation], global_step: Variable) -> set[Operation]:
    """Return the creators of the resources on PS that an update changes. The mode changes the step.

    Args:
        made: The operations of the update.
        global_step: int64 resource variable.
    """
    found = {one for op in made if is_change(op) for one in _used(op)}
    return {one for one in found if _is_ps(place_of(one))} | {global_step.handle.op}


def reads(op: Operation, makers: Collection[Operation]) -> bool:
    """Return whether an operation reads one of some variables.

    Args:
        op: The operation.
        makers: The creators of the variables' handles.
    """
    return op.type in READS and not _used(op).isdisjoint(makers)


def _used(op: Operation) -> set[Operation]:
    """Return the creators of the resources that an operation uses."""
    return {_origin(tensor) for tensor in op.inputs if is_handle(tensor)}


def _origin(handle: Tensor) -> Operation:
    """Return the operation that created a handle, which others have brought into branches and loops."""
    passed = next((tensor for tensor in handle.op.inputs if is_handle(tensor)), None)
    return handle.op if passed is None else _origin(passed)


def _section(made: Collection[Operation], resources: Collection[Operation]) -> set[Operation]:
    """Return the part of an update from the first use of what it changes, with all of each branch or loop in it."""
    uses = [op for op in made if (op.type in READS or is_writer(op)) and not _used(op).isdisjoint(resources)]
    section = set(graph_editor.descendants(uses, within=made.__contains__))
    while True:
        given = {one for op in section for one in [*(t.op for t in op.inputs), *op.control_inputs]} - section
        found = {op for op in given if op in made and _may_be_skipped(op)}
        if not found:
            return section
        around = {id(context) for op in found if (context := outermost_context(op)) is not None}
        found |= {op for op in made if id(outermost_context(op)) in around}
        section |= set(graph_editor.descendants(found, within=made.__contains__))


def _may_be_skipped(op: Operation) -> bool:
    """Return whether a step may skip an operation: it is in a branch or a loop, or decides which branch is taken."""
    switch = op.inputs[0].op if op.type in _IDENTITIES else op
    return is_in_control_flow(op) or switch.type in _SWITCHES


def _may_be_awaited(op: Operation, section: Collection[Operation]) -> bool:
    return op not in section and not is_constant(op) and not _may_be_skipped(op)


def _move_to_ps(section: Sequence[Operation], first: str) -> None:
    """Move what an update computes between its first and its last change to the PS that uses it."""
    own = set(section)
    for op in reversed(section):
        if _is_ps(place_of(op)) or any(is_handle(t) for t in op.inputs):
            continue
        if op.op_def.is_stateful or graph_editor.is_call(op):
            continue
        places = {place_of(user) for user in graph_editor.users(op) if user in own}
        only = places.pop() if len(places) == 1 else first
        graph_editor.move(op, only if _is_ps(only) else first)


def _is_ps(place: str) -> bool:
    return place == DEVICE_OF_STATE or place.startswith("/job:ps/")
