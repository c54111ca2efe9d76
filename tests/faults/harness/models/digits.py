"""The built-in ``mnist`` on the package's digits, each step as slow as ``control`` says: the soak's model.

Weights of its own under ``updates/`` count what was applied. They add nothing to the loss, but have gradients of -1:
the optimizer is Adagrad, whose accumulators add up their squares.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from control import Control

import tfps
from tfps.models import mnist


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return the built-in model's batches; in training, slowly."""
    data = mnist.input_fn(mode, {**params, "data_dir": ""}, input_context)
    if mode != tfps.ModeKeys.TRAIN:
        return data
    control = Control(params["data_dir"], input_context.input_pipeline_id)

    def wait() -> Any:
        control.wait()
        return np.int32(0)

    def slowly(features: Any, labels: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(wait, [], tf.int32)]):
            return {"image": tf.identity(features["image"])}, tf.identity(labels)

    return data.map(slowly)


def model_fn(features: Mapping[str, Any], labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the built-in network, and beside it what counts."""
    built = mnist.model_fn(features, labels, mode, params)
    if mode == tfps.ModeKeys.PREDICT:
        return built
    counting = tf.add_n([tf.reduce_sum(_counting(index)) for index in range(2)])
    return dataclasses.replace(built, loss=built.loss - (counting - tf.stop_gradient(counting)))


def _counting(index: int) -> Any:
    """Return a weight that is larger than all of the network, so that either placement puts the next on another PS."""
    return tf.get_variable(f"updates/small{index}", [2500], initializer=tf.zeros_initializer())
