"""Fit a straight line through noisy points, y = 2x + 10: two parameters, and nothing to download.

The smallest model that shows a cluster at work: ``weight`` and ``bias`` start at 0 and approach 2 and 10 visibly. The
graph generates the points from a seed, in a separate stream for each worker.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import tfps
from tfps.tf_types import Dataset, InputContext, Tensor

WEIGHT, BIAS, NOISE = 2.0, 10.0, 0.33
EVAL_SEED = (-1, -1)  # --seed is never negative, so never a training stream
EVAL_BATCHES, EVAL_BATCH_SIZE = 8, 128


def input_fn(mode: str, params: Mapping[str, Any], input_context: InputContext) -> Dataset:
    """Return batches of points: this worker's endless stream, or always the same few for evaluation."""
    training = mode == tfps.ModeKeys.TRAIN
    seed = (params["seed"], input_context.input_pipeline_id) if training else EVAL_SEED
    size = params["batch_size"] if training else EVAL_BATCH_SIZE
    steps = tf.data.Dataset.range(tf.int64.max if training else EVAL_BATCHES)
    return steps.map(lambda step: _points(size, seed, step)).prefetch(4)


def model_fn(features: Mapping[str, Tensor], labels: Tensor, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the line.

    Args:
        features: ``x``, float32 of shape [batch].
        labels: y, float32 of shape [batch]; ``None`` for prediction.
        mode: One of ``tfps.ModeKeys``.
        params: The job's flags.
    """
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
    y = weight * features["x"] + bias
    if mode == tfps.ModeKeys.PREDICT:
        return tfps.ModelSpec(predictions={"y": y})
    metrics = {}
    if mode == tfps.ModeKeys.EVAL:
        metrics["rmse"] = tf.metrics.root_mean_squared_error(labels, y)
    return tfps.ModelSpec(
        loss=tf.reduce_mean(tf.square(y - labels)),
        predictions={"y": y},
        eval_metric_ops=metrics,
        optimizer=tfps.make_optimizer(params, default="sgd", learning_rate=0.05),
        log_tensors={"weight": tf.identity(weight), "bias": tf.identity(bias)},
    )


def _points(count: int, seed: tuple[int, int], step: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return ``count`` points of a stream: ``({"x": ...}, y)``, always the same for a seed and step."""
    step_seed = tf.random.experimental.stateless_fold_in(tf.constant(seed, tf.int64), step)
    x_seed, noise_seed = tf.unstack(tf.random.experimental.stateless_split(step_seed, 2))
    x = tf.random.stateless_uniform([count], x_seed, minval=-1.0, maxval=1.0)
    noise = tf.random.stateless_normal([count], noise_seed, stddev=NOISE)
    return {"x": x}, WEIGHT * x + BIAS + noise
