"""Nothing but bytes: 16 variables of ``TFPS_BENCH_MB`` together, read whole and updated whole in each step.

The gradient is the input, a one, everywhere, so SGD with a rate of 1/1024 leaves exactly -n/1024 after n steps.
"""

import os
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import tfps

VARIABLES, RATE = 16, 2.0**-10


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return a one, as features and as labels, for ever or once."""
    del params, input_context
    ones = tf.data.Dataset.from_tensors((1.0, 1.0))
    return ones.repeat() if mode == tfps.ModeKeys.TRAIN else ones


def model_fn(features: Any, labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the variables; the loss is their sum times the input."""
    del labels
    size = int(os.environ["TFPS_BENCH_MB"]) * 10**6 // 4 // VARIABLES
    values = [tf.get_variable(f"part{i}", [size], initializer=tf.zeros_initializer()) for i in range(VARIABLES)]
    loss = tf.add_n([tf.reduce_sum(value * features) for value in values])
    metrics = {}
    if mode == tfps.ModeKeys.EVAL:
        metrics["low"] = tf.metrics.mean(tf.reduce_min([tf.reduce_min(value) for value in values]))
        metrics["high"] = tf.metrics.mean(tf.reduce_max([tf.reduce_max(value) for value in values]))
    optimizer = tfps.make_optimizer(params, default="sgd", learning_rate=RATE)
    return tfps.ModelSpec(loss=loss, predictions={"loss": loss}, eval_metric_ops=metrics, optimizer=optimizer)
