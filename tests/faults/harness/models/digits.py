"""The built-in ``mnist`` on the package's digits, each step as slow as ``control`` says: the soak's model."""

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
    """Build the built-in network."""
    return mnist.model_fn(features, labels, mode, params)
