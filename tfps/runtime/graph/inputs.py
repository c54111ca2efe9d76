"""A model's input pipeline, in the graph of the task that reads it."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.models.model import Model
from tfps.models.params import TrackedFlags
from tfps.models.spec import ModeKeys
from tfps.runtime.graph import graph_editor, model_calls, placement
from tfps.runtime.graph.cancel_safe_iterator import INPUTS, CancelSafeIterator
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.passes.functions import nodes_within
from tfps.runtime.graph.towers import batches as tower_batches
from tfps.runtime.graph.towers import devices as tower_devices
from tfps.tf_types import Dataset, Fetch, Graph, InputIterator, Nested, NodeDef, Operation, Tensor

_ENDLESS = ("RepeatDataset", "RandomDataset")  # parts of the op types of datasets
_MAY_END = ("DirectedInterleave", "GeneratorDataset", "PyFunc")  # likewise
_END = ("PyFunc", "IteratorGetNext", "Dequeue", "ReaderRead")  # likewise, with which a function may end the input
_OWN_END = ("IteratorGetNext", "MultiDeviceIteratorGetNext", "Dequeue", "ReaderRead")  # likewise, in a model
_DROP = ("Filter", "TakeWhile", "FlatMap", "Interleave", "Unbatch", "IgnoreErrors", "GroupBy")  # parts of op types
_CUT = ("Take", "Skip", "Shard", "Batch", "Window", "Scan")  # likewise: what they return depends on the order
_CHANGES = ("MapDataset", "BatchDataset", "BatchV2", "ShuffleDataset", "Prefetch", "OptionsDataset")  # parts
_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2")


def input_of(
    model: Model,
    mode: str,
    config: JobConfig,
    device: str,
    pipelines: int,
    index: int,
    params: TrackedFlags | None = None,
) -> Any:
    """Build the input pipeline on the task's CPU. Return iterator, number of batches and next batch, or ``None``.

    If a worker trains on several devices, the next element holds a batch of each; see ``towers.batches``.
    """
    with tf.device(f"{device}/cpu:0" if "cpu" not in device else device):
        dataset = model_calls.dataset(model, mode, config, pipelines, index, params)
        if dataset is None:
            return None
        _keep_cardinality(tf.get_default_graph())
        training = mode == ModeKeys.TRAIN
        batches, count = _batches(dataset), tower_devices.count(config) if training else 1
        own = getattr(dataset, "tfps_stream", None)
        if count > 1 and own is not None:
            if config.epochs and config.tower_updates == "all":
                raise ConfigError(
                    f"--tower_updates=all with --epochs={config.epochs}: the last batch may have no example for one of "
                    f"{count} devices. Leave one of them out."
                )
            dataset = own.dataset(count)
        elif count > 1:
            dataset = tower_batches.grouped(dataset, count, config.tower_updates != "all")
        iterator = CancelSafeIterator(dataset) if training else tf.data.make_initializable_iterator(dataset)
        if own is not None:
            batch, iterator.indices = iterator.get_next()
            iterator.stream = own
            return iterator, tf.constant(tf.data.experimental.INFINITE_CARDINALITY, tf.int64), batch
        return iterator, batches, iterator.get_next()


def examples_of(features: Nested, labels: Nested) -> Tensor:
    """Return the number of examples in a batch: a number, or an int64 scalar if it may differ between batches.

    It is the first dimension of the labels, or of the features if no label has one. If there are several parts, one
    whose size may differ between batches is preferred.
    """
    kinds = [[part for part in tf.nest.flatten(kind) if part is not None] for kind in (labels, features)]
    sized = [[part for part in parts if part.shape.rank != 0] for parts in kinds]
    parts = sized[0] or sized[1]
    for part in parts:
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int64)
        if not part.shape[:1].is_fully_defined():
            sizes = part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part, out_type=tf.int64)
            return tf.reduce_prod(sizes[:1])  # 1 for a scalar
    return parts[0].shape[:1].num_elements() if parts else 1


def _batches(dataset: Dataset) -> Tensor:
    """Return the number of batches in a dataset, as far as its cardinality is reliable: int64 scalar.

    A dataset that selects from others ends when one of them ends. A Python function may return nothing the next time,
    and a filter by random numbers may let nothing pass. ``repeat()`` after any of them still reports an infinite
    dataset, and ``repeat().take(n)`` reports n. So does a selection from random numbers, which are endless themselves.
    """
    graph = tf.get_default_graph()
    nodes = _nodes(graph, graph.get_operations())
    is_endless = any(_is(node, _ENDLESS) for node in nodes)
    may_end = any(_is(node, _MAY_END) for node in nodes)
    if is_endless and (may_end or any(_may_drop_all(graph, op) for op in graph.get_operations())):
        return tf.constant(tf.data.experimental.UNKNOWN_CARDINALITY, tf.int64)
    return tf.data.experimental.cardinality(dataset)


def _nodes(graph: Graph, ops: Iterable[Operation]) -> Sequence[NodeDef]:
    """Return operations with those in the functions that they call."""
    return [node for op in ops for node in (op.node_def, *nodes_within(graph, op.node_def))]


def _may_drop_all(graph: Graph, op: Operation) -> bool:
    """Return whether an operation is a dataset that may have elements in one epoch and none in another.

    It leaves elements out, and which ones depends on random numbers or other state, or on the order of shuffled ones.
    """
    if "Dataset" not in op.type or not any(_is(node, _DROP) for node in _nodes(graph, [op])):
        return False
    before = _nodes(graph, placement.ancestors([op]))
    if any("Dataset" not in node.op and side_effects.has_state(node) for node in before):
        return True
    return any("RandomDataset" in node.op for node in before) or (
        any("Shuffle" in node.op for node in before)
        and any(_is(node, _CUT) for node in before)
        and any(_is(node, ("Filter", "TakeWhile")) for node in before)
    )


def _is(node: NodeDef, kinds: Iterable[str]) -> bool:
    return any(kind in node.op for kind in kinds)


def batches_with(graph: Graph, known: Collection[Operation], batches: Tensor) -> Tensor:
    """Return how many batches there are for a model that may have an input of its own, which may end first.

    Args:
        graph: The graph, with the model.
        known: Its operations before the model was built.
        batches: The number of batches in the input of ``input_fn``: int64 scalar.
    """
    for op in graph.get_operations():
        nodes = [] if op in known else [op.node_def, *nodes_within(graph, op.node_def)]
        if any(kind in node.op for node in nodes for kind in _OWN_END):
            return tf.constant(tf.data.experimental.UNKNOWN_CARDINALITY, tf.int64)
    return batches


def _keep_cardinality(graph: Graph) -> None:
    """Make ``map`` keep the number of elements.

    In TensorFlow 1.x the number is unknown after ``map``, because its function may end the input. That needs a call to
    Python, or an operation that takes elements from something that may end.
    """
    for op in graph.get_operations():
        inner = nodes_within(graph, op.node_def) if op.type in _MAPS else ()
        if op.type in _MAPS and not any(kind in node.op for node in inner for kind in _END):
            graph_editor.set_bool_attr(op, "preserve_cardinality", True)


def next_of(iterator: InputIterator) -> Operation:
    """Return the operation that gets the next batch of an iterator."""
    is_own = isinstance(iterator, CancelSafeIterator)
    resource = iterator.resource if is_own else graph_editor.iterator_resource(iterator)
    return next(op for op in resource.consumers() if op.type in INPUTS)


def only_with(read: Operation, updates: Sequence[Operation]) -> None:
    """Make changes such as metrics and counters wait for the batch, even if they do not use it.

    A step that finds no more batches then changes nothing.
    """
    early = set(placement.ancestors([read]))
    for op in set(placement.ancestors(updates)) - early:
        lasts = any(graph_editor.is_handle(tensor) for tensor in op.inputs)
        if lasts and side_effects.changes(op):
            for start in _starts(op):
                if start not in early:
                    graph_editor.add_control_inputs(start, [read])


def _starts(op: Operation) -> Sequence[Operation]:
    """Return an operation, or the entries of the loop around it: no control edge may lead into a loop."""
    if graph_editor.can_wait(op):
        return [op]
    return [
        one for one in placement.ancestors([op]) if one.type in ("Enter", "RefEnter") and graph_editor.can_wait(one)
    ]


def read_when_started(ends: Sequence[Fetch], batches: Tensor) -> None:
    """Let a step read a batch of an input that may end only when each task has started its part of the run.

    The worker's part fails immediately if its input has ended. TensorFlow then cancels the parts of the other tasks. If
    it has not sent one yet, it sends it later, and does not cancel that one: the run never ends (``RunManyGraphs`` in
    tensorflow/core/distributed_runtime/master_session.cc).

    The message from each task costs a short step of an input without an end some percent, so it has none.

    Args:
        ends: The fetches of the step.
        batches: The number of batches; a constant if TensorFlow's may be wrong.
    """
    ops = placement.ancestors(ends)
    lasting = [
        op for op in ops if not (op.inputs or op.control_inputs) and any(map(graph_editor.is_handle, op.outputs))
    ]
    begun = {placement.task_of(op): op for op in sorted(lasting, key=graph_editor.order, reverse=True)}
    for read in [op for op in ops if op.type in INPUTS and graph_editor.can_wait(op)]:
        others = [op for task, op in begun.items() if task != placement.task_of(read)]
        if _may_end(read, batches):
            graph_editor.add_control_inputs(read, others)


def _may_end(read: Operation, batches: Tensor) -> bool:
    """Return whether an iterator's dataset may end: it is no endless repetition, or its epochs may be empty."""
    if batches.op.type == "Const":
        return True
    users = read.inputs[0].consumers()
    ops = [op.inputs[0].op for op in users if op.type in ("MakeIterator", "MultiDeviceIteratorInit")]
    for op in ops:
        while _is(op.node_def, _CHANGES):
            op = op.inputs[0].op  # noqa: PLW2901
        if op.type != "RepeatDataset" or (tf.get_static_value(op.inputs[1]) or 0) >= 0:
            return True
    return not ops
