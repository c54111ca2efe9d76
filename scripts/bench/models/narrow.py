"""A deep and narrow net: 50 residual layers of 16x16 and a bias, so 100 small variables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import tfps

WIDTH = 16


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return batches of rows and the function's values, float32 of shape [batch, 16] both."""
    part = "train" if mode == tfps.ModeKeys.TRAIN else "eval"
    x, y = (np.load(Path(params["data_dir"]) / f"{part}_{name}.npy") for name in "xy")
    if mode != tfps.ModeKeys.TRAIN:
        return tf.data.Dataset.from_tensors((x, y))
    share, of = input_context.input_pipeline_id, input_context.num_input_pipelines
    shape = (-1, params["batch_size"], WIDTH)
    used = len(x) // of // params["batch_size"] * params["batch_size"]
    batches = tuple(array[share::of][:used].reshape(shape) for array in (x, y))
    dataset = tf.data.Dataset.from_tensor_slices(batches)
    return dataset.shuffle(len(batches[0]), seed=params["seed"]).repeat().prefetch(4)


def model_fn(features: Any, labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the net; its loss is the mean squared error."""
    init = np.load(Path(params["data_dir"]) / "init.npy")
    net = features
    for layer, first in enumerate(init):
        kernel = tf.get_variable(f"layer{layer}/kernel", [WIDTH, WIDTH], initializer=tf.constant_initializer(first))
        bias = tf.get_variable(f"layer{layer}/bias", [WIDTH], initializer=tf.zeros_initializer())
        net += 0.1 * tf.tanh(tf.matmul(net, kernel) + bias)
    if mode == tfps.ModeKeys.PREDICT:
        return tfps.ModelSpec(predictions={"y": net})
    optimizer = tfps.make_optimizer(params, default="adagrad", learning_rate=0.02)
    return tfps.ModelSpec(loss=tf.reduce_mean(tf.square(net - labels)), optimizer=optimizer)
