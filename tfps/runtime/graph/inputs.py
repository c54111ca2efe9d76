"""A model's input pipeline, in the graph of whoever reads it."""

from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2

from tfps.config.job_config import JobConfig
from tfps.models.loader import Model
from tfps.models.spec import ModeKeys
from tfps.runtime.graph import model_calls
from tfps.runtime.graph.cancel_safe_iterator import CancelSafeIterator
from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Dataset, Graph, Tensor

_MAY_END = ("DirectedInterleave", "GeneratorDataset", "PyFunc")  # parts of operations' names, of datasets
_END = ("PyFunc", "IteratorGetNext", "Dequeue", "ReaderRead")  # likewise, of what a function may end the input by
_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2")


def input_of(model: Model, mode: str, config: JobConfig, device: str, pipelines: int, index: int) -> Any:
    """Build the input pipeline on the task's own CPU; returns iterator, number of batches and the next, or ``None``."""
    with tf.device(f"{device}/cpu:0" if "cpu" not in device else device):
        dataset = model_calls.dataset(model, mode, config, pipelines, index)
        if dataset is None:
            return None
        _keep_cardinality(tf.get_default_graph())
        training = mode == ModeKeys.TRAIN
        iterator = CancelSafeIterator(dataset) if training else tf.data.make_initializable_iterator(dataset)
        return iterator, _batches(dataset), iterator.get_next()


def examples_of(features: Any, labels: Tensor) -> Any:
    """Return how many examples a batch has: a number, or an int64 scalar where it may be another in another batch.

    That is the first dimension of the labels, or of the features where no label has one; of several, of one that may
    have another in another batch, if there is one.
    """
    kinds = [[part for part in tf.nest.flatten(kind) if part is not None] for kind in (labels, features)]
    sized = [[part for part in parts if part.shape.rank != 0] for parts in kinds]
    parts = sized[0] or sized[1]
    for part in parts:
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int64)
        if not part.shape[:1].is_fully_defined():
            sizes = part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part, out_type=tf.int64)
            return tf.reduce_prod(sizes[:1])  # 1 of a scalar
    return parts[0].shape[:1].num_elements() if parts else 1


def _batches(dataset: Dataset) -> Any:
    """Return how many batches a dataset has, as far as its word is good: int64 scalar.

    One that chooses among others ends with one of them, and a Python function may give nothing the next time, though
    ``repeat()`` after either says that there is no end.
    """
    told = tf.data.experimental.cardinality(dataset)
    graph = tf.get_default_graph().as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    if not any(kind in node.op for node in nodes for kind in _MAY_END):
        return told
    unknown = tf.constant(tf.data.experimental.UNKNOWN_CARDINALITY, tf.int64)
    return tf.where(tf.equal(told, tf.data.experimental.INFINITE_CARDINALITY), unknown, told)


def _keep_cardinality(graph: Graph) -> None:
    """Let ``map`` leave the number of elements as it is.

    With TensorFlow 1.x's it is unknown after it, for its function may end the input: one that calls Python, or takes
    from something that may end.
    """
    for op in graph.get_operations():
        inner = _nodes(graph, op.node_def) if op.type in _MAPS else ()
        if op.type in _MAPS and not any(kind in node.op for node in inner for kind in _END):
            op._set_attr("preserve_cardinality", attr_value_pb2.AttrValue(b=True))


def _nodes(graph: Graph, node: Any) -> Iterator[Any]:
    """Yield the operations in the functions that an operation calls, and in those that they call."""
    todo = [called.name for called in side_effects.functions_of(node)]
    for name in todo:  # grows while it is read
        for inner in graph._get_function(name).definition.node_def:
            yield inner
            todo += [f.name for f in side_effects.functions_of(inner) if f.name not in todo]
