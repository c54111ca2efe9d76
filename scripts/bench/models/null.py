"""A step that does nothing but read parameters and give an update of ones: the null step of the TensorFlow paper.

``TFPS_BENCH_MB`` megabytes of parameters in 16 variables, all of which a step reads, or with ``TFPS_BENCH_ROWS`` one
table of rows of 64, of which it reads so many by chance; of no megabytes, one scalar.
"""

import os
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import tfps

VARIABLES, WIDTH, RATE = 16, 64, 2.0**-10


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return a one, as features and as labels, for ever or once."""
    del params, input_context
    ones = tf.data.Dataset.from_tensors((1.0, 1.0))
    return ones.repeat() if mode == tfps.ModeKeys.TRAIN else ones


def model_fn(features: Any, labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the parameters; the loss is the sum of those read times the input."""
    del labels, mode
    megabytes, rows = int(os.environ["TFPS_BENCH_MB"]), int(os.environ["TFPS_BENCH_ROWS"])
    loss, total = parameters(features, megabytes * 10**6 // 4, rows)
    optimizer = tfps.make_optimizer(params, default="sgd", learning_rate=RATE)
    return tfps.ModelSpec(loss=loss, eval_metric_ops={"total": tf.metrics.mean(total)}, optimizer=optimizer)


def parameters(ones: Any, size: int, rows: int) -> tuple[Any, Any]:
    """Build ``size`` parameters; return the sum of those that a step reads, and of all of them, made on the PS."""
    zeros = tf.zeros_initializer()
    if rows:
        table = tf.get_variable("table", [size // WIDTH, WIDTH], initializer=zeros)
        ids = tf.random.uniform([rows], maxval=size // WIDTH, dtype=tf.int32)
        return tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * ones), _sum(table)
    shapes = [[size // VARIABLES]] * VARIABLES if size else [[]]
    values = [tf.get_variable(f"part{i}", shape, initializer=zeros) for i, shape in enumerate(shapes)]
    return tf.add_n([tf.reduce_sum(value * ones) for value in values]), tf.add_n([_sum(value) for value in values])


def _sum(variable: Any) -> Any:
    """Return the sum of a variable's values, without a copy of it on the wire."""
    with tf.device(variable.device):
        return tf.reduce_sum(variable.read_value())
