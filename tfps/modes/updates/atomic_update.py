"""Make an update atomic on each PS: concurrent updates are not lost, and a checkpoint has all of an update or none.

An update changes many variables, each with a separate operation. A reader in the middle of it would see some variables
with the update and others without it. Also, two workers that change a row at the same time may both start from the same
value, and one change is lost. TensorFlow takes no lock (tensorflow/core/kernels/resource_variable_ops.cc). So each PS
has a lock (``MutexLock``, tensorflow/core/kernels/mutex_ops.cc) for its part of an update::

    worker 0:  gradients arrive | lock | begun[0] += 1 | apply, apply | applied[0] += 1, global_step += 1 | unlock
    worker 1:  gradients arrive | lock | begun[1] += 1 | apply, apply | applied[1] += 1, global_step += 1 | unlock
    reader:                       lock | refer to all values                                              | unlock

``global_step`` is raised last, as in ``apply_gradients``: an optimizer that reads it gets the number of earlier steps.
Some optimizers, such as Lookahead, read it after they have changed something on another PS. For these, a separate lock
raises it after all changes are done. Until then its PS does not count the update either.

A PS takes its lock when all inputs of the update have arrived. A part without any, such as a count of updates, waits
until the worker has its gradients: a step that fails before that changes nothing. A PS waits for no other task while it
holds the lock. So locks cannot deadlock, and a lost worker holds none. Some changes on a PS have to follow a change on
another PS, such as Adam's powers of beta with several PS. They form a second critical section on that PS, and the
update counts as applied after it. A reader between the two sections finds that not all PS have the update.

Reads of what the update does not change, such as a learning rate in a variable, run before the locks. Other PS may need
them.

An update that changes something inside ``tf.cond`` or a loop, or several PS in one function, or lets a worker compute
what it assigns from the old value, or a change from a new value, has one section under the locks of all these PS
instead: see ``joint_update``. So has one whose sections would wait for each other, such as ``a.assign_add(b)`` and
``b.assign_add(a)`` with ``a`` and ``b`` on two PS, or would leave out a change, because another task has to act between
it and a later one.

``moments`` has the locks, the part of the reader, and the counts.
"""

from collections.abc import Collection, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates import joint_update, update_ops
from tfps.modes.updates.moments import APPLIED, BEGUN, Moments
from tfps.modes.updates.update_ops import READS, Update, ancestors, descendants, is_writer, leaves, let_wait, place_of
from tfps.runtime.graph.graph_editor import can_wait, is_handle, is_in_control_flow
from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable


def apply(
    optimizer: Optimizer,
    pairs: Sequence[tuple[Gradient, Variable]],
    global_step: Variable,
    moments: Moments,
    worker: int,
) -> Update:
    """Apply gradients and raise ``global_step``, atomically on each PS.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer`` that gets ``global_step`` but does not raise it.
        pairs: Gradients and variables, as its ``compute_gradients`` returns them.
        global_step: int64 resource variable.
        moments: The locks and counts.
        worker: The index of the worker that computed the gradients.

    Returns:
        The update.
    """
    before = set(tf.get_default_graph().get_operations())
    applied = optimizer.apply_gradients(pairs, global_step)
    applied = applied if isinstance(applied, tf.Operation) else applied.op
    made = {op for op in ancestors([applied]) if op not in before}
    gates = [(one.values if isinstance(one, tf.IndexedSlices) else one).op for one, _ in pairs]
    apart = _AtomicUpdate(made, applied, gates, global_step, moments, worker)
    if joint_update.is_needed(made, global_step) or not apart.is_possible():
        update = joint_update.JointUpdate(made, applied, gates, global_step, moments, worker).build()
    else:
        update = apart.build()
    if early := _early_changes(applied, gates):
        let_wait(early, [_ended(gates)])
    return update


def _early_changes(applied: Operation, gates: Sequence[Operation]) -> Sequence[Operation]:
    """Return the changes that no gradient starts: the optimizer's on the worker, or the model's for a learning rate.

    For a change inside a loop, return where its variable enters the loop.
    """
    gated = {*descendants(gates), *ancestors(gates)}
    lasting = side_effects.Lasting(applied.graph)
    changes = [op for op in ancestors([applied]) if op not in gated and lasting.changed(op)]
    entries = ancestors(op for op in changes if not can_wait(op))
    entries = [op for op in entries if op.type in ("Enter", "RefEnter") and any(map(is_handle, op.inputs))]
    return [op for op in dict.fromkeys([*changes, *entries]) if op not in gated and can_wait(op)]


class _AtomicUpdate:
    """The critical sections of an update.

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
        self._made, self._applied, self._gates = made, applied, gates
        self._global_step = global_step
        self._moments = moments
        self._worker = worker
        changed = joint_update.changed(made, global_step)
        self._sections = {device: _section(made, device, changed) for device in moments.devices}
        self._tails = {device: _tail(made, device) for device in moments.devices}
        self._guarded = set().union(*self._sections.values(), *self._tails.values())
        self._first = place_of(global_step.handle.op)
        apart = set(made) - set(self._sections[self._first])
        self._early = _reads(global_step, apart)
        late_reads = (op for op in apart if _is_read_of(global_step, op) and op not in self._early)
        self._is_raised_apart = bool(self._sections[self._first]) and any(late_reads)

    def is_possible(self) -> bool:
        """Return whether the critical sections have all changes on PS and can start."""
        changes = {op for op in self._made if joint_update.is_change(op) and place_of(op) in self._moments.devices}
        return changes <= self._guarded and not self._waits_for_itself()

    def _waits_for_itself(self) -> bool:
        """Return whether critical sections need each other's results, in a cycle, so that they could never start."""
        parts = [each for found in (self._sections, self._tails) for each in found.items() if each[1]]
        before = [self._needed(device, part) for device, part in parts]
        left = set(range(len(parts)))
        while ready := {i for i in left if all(before[i].isdisjoint(parts[j][1]) for j in left - {i})}:
            left -= ready
        return bool(left)

    def _needed(self, device: str, part: Collection[Operation]) -> set[Operation]:
        """Return the operations of the update that a section or tail waits for, with its own."""
        first = [*part, *self._sections[device], *(self._early if device == self._first else ())]
        return set(ancestors(first, self._made.__contains__))

    def build(self) -> Update:
        """Lock all sections. Return the operations that end them."""
        ends: dict[str, Operation] = {}
        for device in self._moments.devices:
            if self._sections[device] or self._tails[device] or device == self._first:
                self._moments.updates(device)
                with tf.control_dependencies(None), tf.device(device):
                    ends[device] = self._lock(device)
        late = [op for op in leaves(self._applied) if op not in self._guarded]
        if self._is_raised_apart:
            ends[self._first] = self._raise_apart([*ends.values(), *late])
        counts_last = self._is_raised_apart or not self._sections[self._first]
        return Update(ends.pop(self._first), [*ends.values(), *late], counts_last, self._first)

    def _lock(self, device: str) -> Operation:
        """Lock the part of a PS, in one critical section or in two. Return the operation that ends the last."""
        begun = self._moments.raised(BEGUN, device, self._worker)
        raised = self._raised(device)
        section = self._sections[device]
        tail = self._tails[device]
        arrived = self._awaited(device)
        if not section:
            section, tail = tail, set()
        lock = self._moments.lock(device)
        checked = self._moments.check(device, self._worker)
        end = _locked(lock, arrived, [begun], section, [] if tail else raised, checked)
        if not tail:
            return end
        arrived = [*_arrived(tail), end]
        return _locked(self._moments.lock(device), arrived, [], tail, raised)

    def _raised(self, device: str) -> Sequence[Operation]:
        """Return operations that count the part of a PS when it has been applied."""
        if device != self._first:
            return [self._moments.raised(APPLIED, device, self._worker)]
        return [] if self._is_raised_apart else self._raised_steps()

    def _raised_steps(self) -> Sequence[Operation]:
        """Return operations that count the update on the PS of ``global_step``, and raise that."""
        applied = self._moments.raised(APPLIED, self._first, self._worker)
        return [applied, self._global_step.assign_add(1, read_value=False)]

    def _awaited(self, device: str) -> Sequence[Operation]:
        """Return the operations that the lock of a PS waits for."""
        part = self._sections[device] or self._tails[device]
        arrived = _arrived(part) if part else [self._applied]
        arrived = [*arrived, *self._moments.awaited(device), *(self._early if device == self._first else ())]
        return [*arrived, _ended(self._gates)] if set(self._gates).isdisjoint(ancestors(arrived)) else arrived

    def _raise_apart(self, before: Sequence[Operation]) -> Operation:
        """Raise ``global_step`` with a separate lock, after all changes are done."""
        with tf.control_dependencies(None), tf.device(self._first):
            before = [*before, *self._moments.awaited(self._first)]
            return _locked(self._moments.lock(self._first), before, [], (), self._raised_steps())


def _section(made: Collection[Operation], device: str, changed: Collection[Operation]) -> set[Operation]:
    """Return the part of an update on one PS, from its first read to its last change, that waits for no other task.

    Return an empty set if the update changes nothing there.

    Args:
        made: The operations of the update.
        device: The PS.
        changed: The creators of what the update changes. Reads of something else come before the section.
    """
    elsewhere = [op for op in made if is_writer(op) and place_of(op) != device]
    late = descendants(elsewhere)
    found = {op for op in made if place_of(op) == device and op not in late and not is_in_control_flow(op)}
    given = [one for op in found for one in [*(t.op for t in op.inputs if not is_handle(t)), *op.control_inputs]]
    found -= set(ancestors(op for op in given if op in made and op not in found))
    # Ops on gradients alone run before the lock. Ops that wait for a write in the section belong to it, even constants.
    begun = descendants(op for op in found if is_writer(op) or joint_update.reads(op, changed))
    found = {op for op in found if op in begun or is_writer(op)}
    return found if any(is_writer(op) for op in found) else set()


def _tail(made: Collection[Operation], device: str) -> set[Operation]:
    """Return the part of an update on one PS that follows a change on another PS, and waits for no other PS again.

    Return an empty set if there is no such change.
    """
    late = descendants(op for op in made if is_writer(op) and place_of(op) != device)
    found = {op for op in late & set(made) if place_of(op) == device and not is_in_control_flow(op)}
    begun = descendants(op for op in found if op.type in READS or is_writer(op))
    found &= begun
    back = descendants(op for op in begun - found if op in made and place_of(op) not in ("", device))
    writes = any(is_writer(op) for op in found)
    return found if writes and not back & found else set()


def _arrived(section: Collection[Operation]) -> Sequence[Operation]:
    """Return what a section waits for. Inputs are identities, so that graph passes see that they are used."""
    inputs = {t.name: t for op in section for t in op.inputs if t.op not in section and not is_handle(t)}
    inputs = {name: tensor for name, tensor in inputs.items() if not update_ops.is_constant(tensor.op)}
    before = {op.name: op for each in section for op in each.control_inputs if op not in section}
    arrived = [tf.identity(tensor).op for _, tensor in sorted(inputs.items())]
    return [*arrived, *(op for _, op in sorted(before.items()))]


def _ended(gates: Sequence[Operation]) -> Operation:
    """Return an operation that ends when all gradients are known. For a group, each of its members would be sent."""
    with tf.control_dependencies(None), tf.device(gates[0].device), tf.control_dependencies(gates):
        return tf.constant(True, name="tfps/gradients").op


def _reads(variable: Variable, ops: Collection[Operation]) -> Sequence[Operation]:
    """Return the operations that read a variable before any of the operations changes something."""
    changed = descendants(op for op in ops if is_writer(op))
    return [op for op in ops if _is_read_of(variable, op) and op not in changed]


def _is_read_of(variable: Variable, op: Operation) -> bool:
    return op.type in READS and op.inputs[0].name == variable.handle.name


def _locked(
    lock: Tensor,
    arrived: Sequence[Operation],
    counted: Sequence[Operation],
    section: Collection[Operation],
    raised: Sequence[Operation],
    checked: Sequence[Operation] = (),
) -> Operation:
    """Make a section wait for a lock, which is taken when all inputs have arrived. Return the operation that unlocks.

    Args:
        lock: The lock.
        arrived: The operations that the lock waits for.
        counted: Operations that raise counters before all other changes.
        section: Operations.
        raised: Operations that raise counters last.
        checked: Operations that run before any change, and may fail.
    """
    end = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    let_wait([lock.op], arrived)
    let_wait(checked, [lock.op])
    let_wait(counted, [lock.op, *checked])
    parts = [op for op in section if op.type in READS or is_writer(op)]
    let_wait(parts, [lock.op, *counted])
    let_wait(raised, [lock.op, *counted, *parts])
    let_wait([end], [*counted, *parts, *raised])
    return end
