"""A click model: 26 embedding tables of 40,000x16, and an MLP of 64 and 32 on what they give."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import tfps

FIELDS, ROWS, SIZE = 26, 40_000, 16


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return batches of ids, int32 of shape [batch, 26], and clicks, float32 of shape [batch]."""
    part = "train" if mode == tfps.ModeKeys.TRAIN else "eval"
    x, y = (np.load(Path(params["data_dir"]) / f"{part}_{name}.npy") for name in "xy")
    if mode != tfps.ModeKeys.TRAIN:
        return tf.data.Dataset.from_tensors((x, y))
    share, of, size = input_context.input_pipeline_id, input_context.num_input_pipelines, params["batch_size"]
    used = len(x) // of // size * size
    ids = _outside_the_graph(x[share::of][:used].reshape(-1, size, FIELDS))
    clicks = _outside_the_graph(y[share::of][:used].reshape(-1, size))
    batches = tf.data.Dataset.from_tensor_slices((ids, clicks))
    return batches.shuffle(used // size, seed=params["seed"]).repeat().prefetch(4)


def model_fn(features: Any, labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the model; its loss is the cross entropy."""
    normal = tf.random_normal_initializer(stddev=0.05)
    looked_up = []
    for field in range(FIELDS):
        table = tf.get_variable(f"table{field}", [ROWS, SIZE], initializer=normal)
        looked_up.append(tf.nn.embedding_lookup(table, features[:, field]))
    net = tf.concat(looked_up, axis=1)
    net = tf.nn.relu(_dense("hidden1", net, FIELDS * SIZE, 64))
    net = tf.nn.relu(_dense("hidden2", net, 64, 32))
    logits = tf.squeeze(_dense("logits", net, 32, 1), axis=1)
    if mode == tfps.ModeKeys.PREDICT:
        return tfps.ModelSpec(predictions={"click": tf.sigmoid(logits)})
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, default="adagrad", learning_rate=0.05))


def _dense(name: str, net: Any, inputs: int, outputs: int) -> Any:
    kernel = tf.get_variable(f"{name}/kernel", [inputs, outputs], initializer=tf.glorot_uniform_initializer())
    return tf.matmul(net, kernel) + tf.get_variable(f"{name}/bias", [outputs], initializer=tf.zeros_initializer())


def _outside_the_graph(array: Any) -> Any:
    """Return a tensor of an array that is not copied into the graph, and from there into every checkpoint."""
    tensor = tf.numpy_function(lambda: array, [], array.dtype)
    tensor.set_shape(array.shape)
    return tensor
