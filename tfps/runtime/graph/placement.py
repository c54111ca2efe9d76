"""Where each variable lives (on which parameter server), and the tensors that a step sends between tasks.

``replica_device_setter`` asks a strategy for the PS of each variable while the graph is built. Every task builds the
same graph in the same order, so all get the same answer without communication.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.training.device_setter import STANDARD_PS_OPS

from tfps.cluster.spec import DEVICE_OF_STATE, STATE_OF_CHIEF, Cluster, Task
from tfps.runtime.graph import size_bounds
from tfps.runtime.graph.graph_editor import has_function, set_device
from tfps.tf_types import Context, DType, Fetch, Graph, Operation, Shape, Tensor, Variable

VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
_OLD_TABLES = ("MutableHashTable", "MutableHashTableOfTensors", "MutableDenseHashTable")
TABLES = (*_OLD_TABLES, *(f"{table}V2" for table in _OLD_TABLES))

_KERAS_SEED = "seed_generator_state"  # name of Keras's variable
_ON_PS = frozenset(STANDARD_PS_OPS)  # op types for which replica_device_setter asks a strategy
_CALLS = (
    *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf"),
    *("Case", "StatelessCase", "While", "StatelessWhile"),
)
_COPIED_SIZE = 16  # maximum elements of a constant that TensorFlow copies instead of sending it

Strategy = Callable[[Operation], int]


class RoundRobin:
    """Assigns variables to the parameter servers in turn, regardless of their sizes."""

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        self._next = 0

    def __call__(self, op: Operation) -> int:
        """Return the PS index for a variable's operation."""
        del op
        index, self._next = self._next, (self._next + 1) % self._num_ps
        return index


class GreedyByBytes:
    """Assigns each variable to the PS that holds the fewest bytes so far.

    Same as ``GreedyLoadBalancingStrategy`` with ``byte_size_load_fn`` of the former tf.contrib.training.
    """

    def __init__(self, num_ps: int) -> None:
        self._bytes = [0] * num_ps

    def __call__(self, op: Operation) -> int:
        """Return the PS index for a variable's operation."""
        index = self._bytes.index(min(self._bytes))
        self._bytes[index] += variable_bytes(op)
        return index


STRATEGIES: Mapping[str, Callable[[int], Strategy]] = {"greedy": GreedyByBytes, "round_robin": RoundRobin}


def same_as(graph: Graph) -> Strategy:
    """Return a strategy that puts each variable and table where another graph on the same cluster has it, by name."""
    devices = {op.name: tf.DeviceSpec.from_string(op.device) for op in graph.get_operations() if op.type in _ON_PS}
    ps_of = {name: device.task or 0 for name, device in devices.items() if device.job == "ps"}
    return lambda op: ps_of.get(op.name, 0)


def variable_bytes(op: Operation) -> int:
    """Return the size in bytes of the variable that an operation holds; 0 for other resources, such as tables."""
    if op.type not in VARIABLES:
        return 0
    return tensor_bytes(tf.TensorShape(op.get_attr("shape")), op.get_attr("dtype")) or 0


def device_setter(cluster: Cluster, task: Task, strategy: Strategy) -> Context:
    """Return the device function of a worker: variables go to the PS of ``strategy``, the rest to the worker.

    Without PS, they go to the chief, and to no GPU of it, as on a PS.
    """
    if not cluster.ps:
        return functools.partial(_device_without_ps, task)
    return tf.train.replica_device_setter(
        cluster=tf.train.ClusterSpec(cluster.spec()), worker_device=task.device, ps_strategy=strategy
    )


def _device_without_ps(task: Task, op: Operation) -> str:
    asked = tf.DeviceSpec.from_string(op.device or "")
    if op.type in _ON_PS and not asked.job:
        return DEVICE_OF_STATE
    device = tf.DeviceSpec.from_string(task.device)
    device.merge_from(asked)
    return str(device.to_string())


def local_variables_on(device: str) -> Context:
    """Return a scope in which a task's local variables (metrics, sync's local step) stay on ``device``."""

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ())
        if not local and kwargs.get("name") != _KERAS_SEED:
            return next_creator(**kwargs)
        with tf.device(None), tf.device(device):
            return next_creator(**kwargs)

    return tf.variable_creator_scope(create)


def keras_seeds_local() -> Context:
    """Return a scope in which Keras's random states are local to a task, and not part of a checkpoint.

    On a PS, all workers would draw the same numbers.
    """

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        if kwargs.get("name") != _KERAS_SEED:
            return next_creator(**kwargs)
        graph, given = tf.get_default_graph(), kwargs["initial_value"]
        shift = graph.seed or 0  # differs between workers, so their states differ, too

        def initial_value() -> Tensor:
            value = tf.convert_to_tensor(given() if callable(given) else given)
            return value + tf.cast([shift, 0], value.dtype)

        made = next_creator(**{**kwargs, "initial_value": initial_value})
        kept = graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
        kept[:] = [variable for variable in kept if variable is not made]
        graph.add_to_collection(tf.GraphKeys.LOCAL_VARIABLES, made)
        return made

    return tf.variable_creator_scope(create)


@dataclass(frozen=True)
class PlacedVariable:
    """One variable, or one slice of a variable, and its place."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    ps: int


def variables(graph: Graph) -> list[PlacedVariable]:
    """Return every saved variable of a graph, including optimizer slots, in the order of creation."""
    return [
        PlacedVariable(
            name=variable.op.name,
            shape=tuple(variable.shape.as_list()),
            dtype=variable.dtype.base_dtype.name,
            num_bytes=variable_bytes(variable.op),
            ps=tf.DeviceSpec.from_string(variable.device).task or 0,
        )
        for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    ]


@dataclass(frozen=True)
class Transfer:
    """One tensor that one step sends from one task to another.

    ``num_bytes`` is ``None`` if the size is known only at run time, as for sparse gradients. Then ``most_bytes`` is the
    largest possible one, where the batch or a table bounds it; see ``size_bounds``.
    """

    tensor: str
    source: str
    target: str
    num_bytes: int | None
    most_bytes: int | None = None


def place_unplaced_ops(graph: Graph, device: str) -> None:
    """Place operations without a device, such as a ``tf.TensorArray``, on the task, as its session would.

    Operations on a resource run on the device of the resource, and need none.
    """
    for op in graph.get_operations():
        if not op.device and resource_of(op) is None:
            set_device(op, device)


def transfers(fetches: Iterable[Fetch]) -> list[Transfer]:
    """Return what one ``session.run`` of ``fetches`` sends between tasks: one entry, one RecvTensor call, each.

    A tensor used twice on a task is sent once. A control edge between tasks is sent as an empty tensor. The changes of
    grappler are not included: it looks through identities and no-ops, and may add control edges where it folds
    constants.
    """
    found: dict[tuple[str, str], Transfer] = {}
    ops = ancestors(fetches)
    copied = _copied(ops)
    for op in ops:
        target = task_of(op)
        for name, source, size in _inputs(op):
            if source != target and name not in copied:
                most = size_bounds.most_bytes(op.graph.get_tensor_by_name(name)) if size is None else None
                found[name, target] = Transfer(name, source, target, size, most)
    return list(found.values())


def fetched(tensor: Tensor, target: str) -> Transfer | None:
    """Return the transfer that fetching ``tensor`` on task ``target`` causes, or ``None`` if it is already there."""
    source = task_of(tensor.op)
    return Transfer(tensor.name, source, target, tensor_bytes(tensor.shape, tensor.dtype)) if source != target else None


def ancestors(fetches: Iterable[Fetch]) -> list[Operation]:
    """Return the operations that run when some tensors or operations are fetched."""
    todo = [fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in fetches]
    seen = set(todo)
    for op in todo:  # grows during the loop
        new = [parent for parent in [t.op for t in op.inputs] + list(op.control_inputs) if parent not in seen]
        seen.update(new)
        todo.extend(dict.fromkeys(new))
    return todo


def _copied(ops: Iterable[Operation]) -> set[str]:
    """Return the constants that TensorFlow copies to the tasks that use them: small ones that several tasks use.

    tensorflow/core/common_runtime/replicate_constants_pass.cc
    """
    uses = {(t, task_of(op)) for op in ops for t in op.inputs if t.op.type == "Const"}
    tasks = Counter(tensor for tensor, _ in uses)
    return {t.name for t, count in tasks.items() if count > 1 and t.shape.num_elements() <= _COPIED_SIZE}


def _inputs(op: Operation) -> Sequence[tuple[str, str, int | None]]:
    """Return name, source task and bytes of each edge into an operation.

    Resource handles are not sent. But a function that runs on another task gets the value of a variable among its
    arguments.
    """
    data = [(t.name, task_of(t.op), tensor_bytes(t.shape, t.dtype)) for t in op.inputs if t.dtype != tf.resource]
    if resource_of(op) is None:
        given = [t for t in op.inputs if t.dtype == tf.resource and t.op.type == "VarHandleOp"]
        data += [(t.name, task_of(t.op), variable_bytes(t.op)) for t in given]
    return data + [(f"^{parent.name}", task_of(parent), 0) for parent in op.control_inputs]


def task_of(op: Operation) -> str:
    """Return the task on which an operation runs. An operation on a resource runs where the resource is.

    What a chief without PS holds for all workers counts as a task of its own, ``STATE_OF_CHIEF``. So the chief has the
    same graph as the other workers, to which these tensors are sent.
    """
    if (resource := resource_of(op)) is not None:
        return task_of(resource.op)
    return _task_in(op.device)


def holds_state(op: Operation) -> bool:
    """Return whether an operation runs where the variables are: on a PS, or in the part of a chief without PS."""
    return not task_of(op).startswith("worker/")


@functools.cache
def _task_in(device: str) -> str:
    """Return the task in the name of a device. A graph has few devices and many operations."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.replica is not None:
        return STATE_OF_CHIEF
    return f"{spec.job or 'worker'}/{spec.task or 0}"


def resource_of(op: Operation) -> Tensor:
    """Return the resource on which an operation works, and with which it is colocated; ``None`` if there is none.

    A function call has none: it runs on the device assigned to it, whatever resources are among its arguments. The
    operations on these inside the function run where the resources are (``REGISTER_INPUT_COLOCATION_EXEMPTION``,
    tensorflow/core/kernels/partitioned_function_ops.cc; TensorFlow first turns conditions and loops into operations of
    the graph).
    """
    resource = next((tensor for tensor in op.inputs if tensor.dtype == tf.resource), None)
    if resource is None or op.type in _CALLS or has_function(op.graph, op.type):
        return None
    return resource


def tensor_bytes(shape: Shape, dtype: DType) -> int | None:
    """Return the size of a tensor in bytes, or ``None`` if it is not known before run time."""
    if not shape.is_fully_defined() or dtype.base_dtype in (tf.string, tf.variant):
        return None
    return int(shape.num_elements()) * int(dtype.base_dtype.size)
