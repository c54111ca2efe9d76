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

The reader holds the lock only while it refers to the values: an update that comes later leaves what is referred to as
it is, and changes a copy (tensorflow/core/kernels/training_op_helpers.h). TensorFlow unlocks when a step fails.

A PS takes its lock when all that the update needs is there, and waits for no other task while it holds it, so locks
never wait for each other in a circle, and a lost worker holds none. What one PS changes only after another has changed
something (Adam's powers of beta, with several PS) is therefore not part of the moment.

``applied`` counts a worker's updates on a PS. Values that were read from several PS belong to the same updates if the
counts are the same on all of them.

A connection that is reset, or a worker that is killed, may break off a step in the middle of this: between the PS, or
between two variables of one. No PS can take back what it has applied. But then a worker's counts, ``begun`` and
``applied`` on every PS, are not all the same when nothing of it runs any more: that is ``partial``, which is told.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

APPLIED = "applied"
_BEGUN = "applying"
_KINDS = (_BEGUN, APPLIED)
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_LOOKS = (*_READS, "VarIsInitializedOp", "VariableShape")


class Moments:
    """The locks of every PS and the counts of updates there, in one graph.

    Args:
        num_ps: The number of PS.
        num_workers: The number of workers.
    """

    def __init__(self, num_ps: int, num_workers: int) -> None:
        self.devices = [f"/job:ps/task:{index}" for index in range(num_ps)]
        self._num_workers = num_workers
        self._counters: dict[tuple[str, str, int], Any] = {}
        self._updating: list[str] = []

    def lock(self, device: str) -> Any:
        """Add to the graph, and return, the lock of a PS: no update begins there until ``unlock``."""
        with tf.device(device):
            return tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name="tfps/update"))

    def unlock(self, lock: Any) -> Any:
        """Add to the graph, and return, an operation that gives a lock back."""
        with tf.device(lock.device):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def counts(self, device: str) -> Any:
        """Add to the graph, and return, how many updates of each worker a PS has applied: int64 [workers]."""
        counters = [self.counter(APPLIED, device, worker) for worker in range(self._num_workers)]
        with tf.device(device):
            return tf.stack([counter.read_value() for counter in counters])

    def reset(self, workers: Iterable[int]) -> Any:
        """Add to the graph, and return, an operation that sets the counts of some workers to 0 on all PS."""
        with tf.control_dependencies(None):
            places = [(kind, device, worker) for worker in workers for device in self.devices for kind in _KINDS]
            return tf.group(*(self.counter(*place).initializer for place in places))

    def partial(self, worker: int) -> Any:
        """Add to the graph, and return, how many updates of a worker are made in part: int64 scalar.

        That is so if no run of the worker is under way, and after ``apply`` has told which PS an update changes.
        """
        counters = [self.counter(kind, device, worker) for device in self._updating for kind in _KINDS]
        counts = tf.stack([counter.read_value() for counter in counters])
        return tf.reduce_max(counts) - tf.reduce_min(counts)

    def updates(self, device: str) -> None:
        """Note that an update changes something on a PS."""
        self._updating.append(device)

    def counter(self, kind: str, device: str, worker: int) -> Any:
        """Return the int64 variable that counts the updates of a worker that a PS has begun, or applied."""
        place = kind, device, worker
        if place not in self._counters:
            with tf.control_dependencies(None), tf.device(device):
                self._counters[place] = tf.Variable(
                    lambda: tf.zeros([], tf.int64),
                    trainable=False,
                    collections=[],
                    use_resource=True,
                    name=f"tfps/{kind}_{self.devices.index(device)}_{worker}",
                )
        return self._counters[place]


@dataclass(frozen=True)
class Update:
    """The operations that apply one worker's gradients.

    Attributes:
        counted: Operation that ends when its part on the PS of ``global_step``, which it raises, has been applied.
        others: Operations that end when its parts on the other PS have been applied.
        counts_last: Whether the PS of ``global_step`` has nothing else to change: it counts when the others are done.
    """

    counted: Any
    others: Sequence[Any]
    counts_last: bool


def apply(optimizer: Any, pairs: Sequence[tuple[Any, Any]], global_step: Any, moments: Moments, worker: int) -> Update:
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
    first = _place(global_step.handle.op)
    apart = made - set(sections[first])
    early = _reads(global_step, apart)
    read_late = bool(sections[first]) and any(_is_read_of(global_step, op) and op not in early for op in apart)
    ends = {}
    for device in [name for name, section in sections.items() if section or name == first]:
        moments.updates(device)
        begun, ended = (moments.counter(kind, device, worker) for kind in _KINDS)
        with tf.control_dependencies(None), tf.device(device):
            arrived = _arrived(sections[device]) if sections[device] else [applied]
            arrived = [*arrived, *early] if device == first else arrived
            raised = [ended] if device != first else [] if read_late else [ended, global_step]
            ends[device] = _locked(moments.lock(device), arrived, [begun], sections[device], raised)
    late = [op for op in leaves(applied) if not any(op in section for section in sections.values())]
    if read_late:
        with tf.control_dependencies(None), tf.device(first):
            raised = [moments.counter(APPLIED, first, worker), global_step]
            ends[first] = _locked(moments.lock(first), [*ends.values(), *late], [], (), raised)
    return Update(ends.pop(first), [*ends.values(), *late], counts_last=read_late or not sections[first])


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


def _arrived(section: Collection[Any]) -> Sequence[Any]:
    """Return what has to be there before a section begins, each by an identity, so that graph passes see it used."""
    inputs = {t.name: t for op in section for t in op.inputs if t.op not in section and not _is_handle(t)}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor.op.type != "Const"}
    return [tf.identity(tensor).op for _, tensor in sorted(inputs.items())]


def _reads(variable: Any, ops: Collection[Any]) -> Sequence[Any]:
    """Return which operations read a variable before any of them has changed something."""
    changed = _descendants(op for op in ops if _is_writer(op))
    return [op for op in ops if _is_read_of(variable, op) and op not in changed]


def _is_read_of(variable: Any, op: Any) -> bool:
    return op.type in _READS and op.inputs[0].name == variable.handle.name


def _locked(
    lock: Any, arrived: Sequence[Any], begun: Sequence[Any], section: Collection[Any], ended: Sequence[Any]
) -> Any:
    """Let a section wait for a lock, which is taken when all has arrived; returns what gives it back in the end.

    Args:
        lock: The lock.
        arrived: What it waits for.
        begun: Counters that are raised before anything else.
        section: Operations.
        ended: Counters that are raised last.
    """
    counted = [counter.assign_add(1, read_value=False) for counter in begun]
    raised = [counter.assign_add(1, read_value=False) for counter in ended]
    end = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    _let_wait([lock.op], arrived)
    _let_wait(counted, [lock.op])
    parts = [op for op in section if op.type in _READS or _is_writer(op)]
    _let_wait(parts, counted)
    _let_wait(raised, [lock.op, *counted, *parts])
    _let_wait([end], [*counted, *parts, *raised])
    return end


def _let_wait(ops: Iterable[Any], before: Sequence[Any]) -> None:
    """Let operations wait for others, themselves: ``tf.control_dependencies`` may let one of their constants wait."""
    for op in ops:
        op._add_control_inputs(before)


def _is_writer(op: Any) -> bool:
    return op.type not in (*_LOOKS, "VarHandleOp") and any(_is_handle(tensor) for tensor in op.inputs)


def _is_handle(tensor: Any) -> bool:
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def _place(op: Any) -> str:
    """Return the device of an operation's task; one that works on a resource runs where the resource is."""
    handle = next((tensor.op for tensor in op.inputs if _is_handle(tensor)), None)
    if handle is not None:
        return _place(handle)
    spec = tf.DeviceSpec.from_string(op.device)
    return f"/job:{spec.job}/task:{spec.task or 0}" if spec.job else ""


def leaves(op: Any) -> Sequence[Any]:
    """Return what an operation waits for, without the groups in between."""
    return [leaf for other in op.control_inputs for leaf in leaves(other)] if op.type == "NoOp" else [op]


def _ancestors(ops: Iterable[Any]) -> Sequence[Any]:
    """Return operations, and all that have to run before them."""
    return _closure(ops, lambda op: [tensor.op for tensor in op.inputs] + list(op.control_inputs))


def _descendants(ops: Iterable[Any]) -> set[Any]:
    """Return operations, and all that run after them because they use them or wait for them."""
    users = lambda op: [user for output in op.outputs for user in output.consumers()] + list(op._control_outputs)  # noqa: E731
    return set(_closure(ops, users))


def _closure(ops: Iterable[Any], next_to: Any) -> Sequence[Any]:
    todo = list(dict.fromkeys(ops))
    seen = set(todo)
    for op in todo:  # grows while it is read
        new = [other for other in dict.fromkeys(next_to(op)) if other not in seen]
        seen.update(new)
        todo.extend(new)
    return todo
