"""One update as one moment on each PS: no update is lost to another, and a checkpoint holds all of one or none of it.

An update changes many variables, each by an operation of its own. A reader in the middle of it would see some variables
with the update and others without it. And two workers that change one row at the same time may both begin with the
same value: one change is lost (TensorFlow takes no lock, tensorflow/core/kernels/resource_variable_ops.cc). So each PS
has a lock (``MutexLock``, tensorflow/core/kernels/mutex_ops.cc) for what an update does there::

    worker 0:  gradients arrive | lock | begun[0] += 1 | apply, apply | applied[0] += 1, global_step += 1 | unlock
    worker 1:  gradients arrive | lock | begun[1] += 1 | apply, apply | applied[1] += 1, global_step += 1 | unlock
    reader:                       lock | refer to all values                                              | unlock

``global_step`` is raised last, as ``apply_gradients`` does it: an optimizer that reads it finds the steps before. One
that reads it after it has changed something on another PS, as Lookahead does, has it raised when all of that is done,
by a lock of its own; until then its PS has not counted the update, either.

A PS takes its lock when all that the update needs is there, and waits for no other task while it holds it, so locks
never wait for each other in a circle, and a lost worker holds none. What one PS changes only after another has changed
something (Adam's powers of beta, with several PS) is therefore a second moment there, and the update is counted as
applied after that: who reads in between finds that not all PS have it.

``moments`` has the locks, what a reader does, and the counts.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.modes.moments import APPLIED, BEGUN, Moments
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_LOOKS = (*_READS, "VarIsInitializedOp", "VariableShape")


@dataclass(frozen=True)
class Update:
    """The operations that apply one worker's gradients.

    Attributes:
        counted: Operation that ends when its part on the PS of ``global_step``, which it raises, has been applied.
        others: Operations that end when its parts on the other PS have been applied.
        counts_last: Whether the PS of ``global_step`` has nothing else to change: it counts when the others are done.
        device: The PS of ``global_step``.
    """

    counted: Any
    others: Sequence[Any]
    counts_last: bool
    device: str


def apply(
    optimizer: Optimizer,
    pairs: Sequence[tuple[Gradient, Variable]],
    global_step: Variable,
    moments: Moments,
    worker: int,
) -> Update:
    """Apply gradients and raise ``global_step``, in one moment on each PS.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer`` that does not raise ``global_step``, though it is given.
        pairs: Gradients and variables, as its ``compute_gradients`` returns them.
        global_step: int64 resource variable.
        moments: The locks and counts.
        worker: The index of the worker that has computed the gradients.

    Returns:
        The update.
    """
    before = set(tf.get_default_graph().get_operations())
    applied = optimizer.apply_gradients(pairs, global_step)
    applied = applied if isinstance(applied, tf.Operation) else applied.op
    made = {op for op in _ancestors([applied]) if op not in before}
    sections = {device: _section(made, device) for device in moments.devices}
    tails = {device: _tail(made, device) for device in moments.devices}
    first = _place(global_step.handle.op)
    apart = made - set(sections[first])
    early = _reads(global_step, apart)
    read_late = bool(sections[first]) and any(_is_read_of(global_step, op) and op not in early for op in apart)
    ends = {}
    for device in [name for name in moments.devices if sections[name] or tails[name] or name == first]:
        moments.updates(device)
        begun, ended = (moments.counter(kind, device, worker) for kind in (BEGUN, APPLIED))
        raised = [ended] if device != first else [] if read_late else [ended, global_step]
        section, tail = sections[device], tails[device]
        with tf.control_dependencies(None), tf.device(device):
            arrived = _arrived(section) if section else _awaited(tail) if tail else [applied]
            arrived = [*arrived, *early] if device == first else arrived
            first_part, second_part = (section, tail) if section else (tail, set())
            lock = moments.lock(device)
            checked = moments.check(device, worker)
            ends[device] = _locked(lock, arrived, [begun], first_part, [] if second_part else raised, checked)
            if second_part:
                arrived = [*_awaited(second_part), ends[device]]
                ends[device] = _locked(moments.lock(device), arrived, [], second_part, raised)
    locked = set().union(*sections.values(), *tails.values())
    late = [op for op in leaves(applied) if op not in locked]
    if read_late:
        with tf.control_dependencies(None), tf.device(first):
            raised = [moments.counter(APPLIED, first, worker), global_step]
            ends[first] = _locked(moments.lock(first), [*ends.values(), *late], [], (), raised)
    return Update(ends.pop(first), [*ends.values(), *late], read_late or not sections[first], first)


def _section(made: Collection[Any], device: str) -> Collection[Any]:
    """Return what an update does on one PS, from its first read to its last change, without waiting for another task.

    Empty, if it changes nothing there.
    """
    elsewhere = [op for op in made if _is_writer(op) and _place(op) != device]
    late = _descendants(elsewhere)
    found = {op for op in made if _place(op) == device and op not in late and not op._get_control_flow_context()}
    asked = [t.op for op in found for t in op.inputs if t.op in made and t.op not in found and t.dtype != tf.resource]
    found -= set(_ancestors(asked))
    # What is made of gradients alone comes before; what waits for a write of the section is of it, as a constant may.
    begun = _descendants(op for op in found if op.type in _READS or _is_writer(op))
    found = {op for op in found if op in begun or _is_writer(op)}
    return found if any(_is_writer(op) for op in found) else set()


def _tail(made: Collection[Any], device: str) -> Collection[Any]:
    """Return what an update does on one PS after another PS has changed something, without waiting for one again.

    Empty, if it changes nothing there then.
    """
    late = _descendants(op for op in made if _is_writer(op) and _place(op) != device)
    found = {op for op in late & set(made) if _place(op) == device and not op._get_control_flow_context()}
    begun = _descendants(op for op in found if op.type in _READS or _is_writer(op))
    found &= begun
    back = _descendants(op for op in begun - found if op in made and _place(op) not in ("", device))
    writes = any(_is_writer(op) for op in found)
    return found if writes and not back & found else set()


def _awaited(tail: Collection[Any]) -> Sequence[Any]:
    """Return what has to be there, or to have ended, before a tail begins."""
    before = {op.name: op for each in tail for op in each.control_inputs if op not in tail}
    return [*_arrived(tail), *(op for _, op in sorted(before.items()))]


def _arrived(section: Collection[Any]) -> Sequence[Any]:
    """Return what has to be there before a section begins, each by an identity, so that graph passes see it used."""
    inputs = {t.name: t for op in section for t in op.inputs if t.op not in section and not _is_handle(t)}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor.op.type != "Const"}
    return [tf.identity(tensor).op for _, tensor in sorted(inputs.items())]


def _reads(variable: Variable, ops: Collection[Operation]) -> Sequence[Any]:
    """Return which operations read a variable before any of them has changed something."""
    changed = _descendants(op for op in ops if _is_writer(op))
    return [op for op in ops if _is_read_of(variable, op) and op not in changed]


def _is_read_of(variable: Variable, op: Operation) -> bool:
    return op.type in _READS and op.inputs[0].name == variable.handle.name


def _locked(
    lock: Any,
    arrived: Sequence[Any],
    begun: Sequence[Any],
    section: Collection[Any],
    ended: Sequence[Any],
    checked: Sequence[Any] = (),
) -> Any:
    """Let a section wait for a lock, which is taken when all has arrived; returns what gives it back in the end.

    Args:
        lock: The lock.
        arrived: What it waits for.
        begun: Counters that are raised before anything else.
        section: Operations.
        ended: Counters that are raised last.
        checked: Operations that may fail, before anything is changed.
    """
    counted = [counter.assign_add(1, read_value=False) for counter in begun]
    raised = [counter.assign_add(1, read_value=False) for counter in ended]
    end = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    _let_wait([lock.op], arrived)
    _let_wait(checked, [lock.op])
    _let_wait(counted, [lock.op, *checked])
    parts = [op for op in section if op.type in _READS or _is_writer(op)]
    _let_wait(parts, [lock.op, *counted])
    _let_wait(raised, [lock.op, *counted, *parts])
    _let_wait([end], [*counted, *parts, *raised])
    return end


def _let_wait(ops: Iterable[Operation], before: Sequence[Any]) -> None:
    """Let operations wait for others, themselves: ``tf.control_dependencies`` may let one of their constants wait."""
    for op in ops:
        op._add_control_inputs(before)


def _is_writer(op: Operation) -> bool:
    return op.type not in (*_LOOKS, "VarHandleOp") and any(_is_handle(tensor) for tensor in op.inputs)


def _is_handle(tensor: Tensor) -> bool:
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def _place(op: Operation) -> str:
    """Return the device of an operation's task; one that works on a resource runs where the resource is."""
    handle = next((tensor.op for tensor in op.inputs if _is_handle(tensor)), None)
    if handle is not None:
        return _place(handle)
    spec = tf.DeviceSpec.from_string(op.device)
    return f"/job:{spec.job}/task:{spec.task or 0}" if spec.job else ""


def leaves(op: Operation) -> Sequence[Any]:
    """Return what an operation waits for, without the groups in between."""
    return [leaf for other in op.control_inputs for leaf in leaves(other)] if op.type == "NoOp" else [op]


def _ancestors(ops: Iterable[Operation]) -> Sequence[Any]:
    """Return operations, and all that have to run before them."""
    return _closure(ops, lambda op: [tensor.op for tensor in op.inputs] + list(op.control_inputs))


def _descendants(ops: Iterable[Operation]) -> set[Any]:
    """Return operations, and all that run after them because they use them or wait for them."""
    users = lambda op: [user for output in op.outputs for user in output.consumers()] + list(op._control_outputs)  # noqa: E731
    return set(_closure(ops, users))


def _closure(ops: Iterable[Operation], next_to: Any) -> Sequence[Any]:
    todo = list(dict.fromkeys(ops))
    seen = set(todo)
    for op in todo:  # grows while it is read
        new = [other for other in dict.fromkeys(next_to(op)) if other not in seen]
        seen.update(new)
        todo.extend(new)
    return todo
