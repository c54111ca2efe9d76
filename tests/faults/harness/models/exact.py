"""A model whose every update is known, so that the end tells what was lost and whether the means were exact.

Worker i pushes the gradient 2^i to ``weight`` and 1 to ``count``, and a step of SGD subtracts them. So ``-count`` is
the number of updates, and in sync ``-weight`` is that number times the mean of all 2^i.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from control import Control

import tfps


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return inputs that come as slowly as ``control`` says."""
    if mode != tfps.ModeKeys.TRAIN:
        return tf.data.Dataset.from_tensors(({"x": 0.0}, 0.0))
    control = Control(params["data_dir"], input_context.input_pipeline_id)

    def value(number: Any) -> Any:
        x = tf.numpy_function(lambda _: np.float32(control.value()), [number], tf.float32)
        return {"x": tf.ensure_shape(x, [])}, 0.0

    return tf.data.Dataset.range(control.batches()).map(value)


def model_fn(features: Mapping[str, Any], labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the two variables."""
    del labels
    wide = Path(params["data_dir"], "wide").exists()  # a model that no checkpoint of the usual one fits
    zeros = tf.zeros_initializer()
    weight = tf.get_variable("weight", [3] if wide else [], initializer=zeros)
    count = tf.get_variable("count", [], initializer=zeros)
    total = tf.reduce_sum(weight)
    metrics = {"weight": tf.metrics.mean(total), "count": tf.metrics.mean(count)} if mode == "eval" else {}
    return tfps.ModelSpec(
        loss=total * features["x"] + count,
        predictions={"y": total},
        eval_metric_ops=metrics,
        optimizer=tf.train.GradientDescentOptimizer(1.0),
    )
