"""A model's input pipeline, in the graph of whoever reads it."""

from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2

from tfps.config.job_config import JobConfig
from tfps.models.loader import Model
from tfps.models.spec import ModeKeys
from tfps.runtime.graph import model_calls
from tfps.runtime.graph.cancel_safe_iterator import LastingIterator

_MAY_END = ("DirectedInterleave", "GeneratorDataset", "PyFunc")  # parts of operations' names, of datasets
_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2")


def input_of(model: Model, mode: str, config: JobConfig, device: str, pipelines: int, index: int) -> Any:
    """Build the input pipeline on the task's own CPU; returns iterator, number of batches and the next, or ``None``."""
    with tf.device(f"{device}/cpu:0" if "cpu" not in device else device):
        dataset = model_calls.dataset(model, mode, config, pipelines, index)
        if dataset is None:
            return None
        _keep_cardinality(tf.get_default_graph())
        training = mode == ModeKeys.TRAIN
        iterator = LastingIterator(dataset) if training else tf.data.make_initializable_iterator(dataset)
        return iterator, _batches(dataset), iterator.get_next()


def examples_of(features: Any, labels: Any) -> Any:
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


def _batches(dataset: Any) -> Any:
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


def _keep_cardinality(graph: Any) -> None:
    """Let ``map`` leave the number of elements as it is.

    With TensorFlow 1.x's it is unknown after it, for its function may end the input; only one that calls Python can.
    """
    for op in graph.get_operations():
        if op.type in _MAPS:
            function = graph._get_function(op.get_attr("f").name).definition
            if not any("PyFunc" in node.op for node in function.node_def):
                op._set_attr("preserve_cardinality", attr_value_pb2.AttrValue(b=True))
