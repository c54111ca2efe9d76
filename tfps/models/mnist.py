"""A small ConvNet that reads digits, MNIST's or those in the package: 1,960 parameters.

The network of Ray's parameter-server example: a 3x3 convolution of 3 filters, 3x3 max-pooling, ReLU, one dense layer.
It must learn in all modes with the same settings. The hardest case is gradients that are several steps old: in a
randomly initialized network they silence the few filters. So the filters start as edge detectors and the dense layer at
zero (``--seed`` then decides only the order of the examples). For the same reason the optimizer is Adagrad, as in
Downpour SGD (Dean et al. 2012). 400 updates of batch 128 reach 0.95 and more on MNIST's last 2,000 test images, with
gradients 3 to 5 steps old as well. On the package's digits they reach 0.90 and more.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import tfps
from tfps.data import digits, idx
from tfps.data.batches import batches, examples
from tfps.text import show
from tfps.tf_types import InputContext, Tensor

log = logging.getLogger(__name__)

EDGES = (  # three 3x3 filters of equal norm, far apart: each detects where ink ends in another direction
    ((1, 0, -1), (1, 0, -1), (1, 0, -1)),
    ((1, 1, 1), (0, 0, 0), (-1, -1, -1)),
    ((-1, -1, 0), (-1, 0, 1), (0, 1, 1)),
)


def input_fn(mode: str, params: Mapping[str, Any], input_context: InputContext) -> Any:
    """Return batches of the images in ``--data_dir``, or without that flag of the package's digits.

    With ``--data_policy``, ``--partition`` or ``--local_epochs``, return the images for tfps to divide.
    """
    data = idx.load(params["data_dir"]) if params["data_dir"] else digits.load()
    if mode != tfps.ModeKeys.TRAIN:
        return batches(data.eval_images, data.eval_labels, params["batch_size"], training=False)
    if params["data_dir"] and data.is_split and input_context.input_pipeline_id == 0:
        log.info(
            "--data_dir=%s has one set of images, not two (train, t10k): the first %s images are for training and the "
            "last %s for evaluation",
            *(show(params["data_dir"], 200), f"{len(data.train_images):,}", f"{len(data.eval_images):,}"),
        )
    if any(params.get(name) for name in ("data_policy", "partition", "local_epochs")):
        return examples(data.train_images, data.train_labels)
    shard = (input_context.input_pipeline_id, input_context.num_input_pipelines)
    return batches(data.train_images, data.train_labels, params["batch_size"], params["seed"], shard)


def model_fn(features: Mapping[str, Tensor], labels: Tensor, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the network.

    Args:
        features: ``image``, float32 of shape [batch, 28, 28, 1], 0 to 1.
        labels: int32 of shape [batch], 0 to 9; ``None`` for prediction.
        mode: One of ``tfps.ModeKeys``.
        params: The job's flags.
    """
    logits = _logits(features["image"])
    predictions = {"class_ids": tf.argmax(logits, axis=1), "probabilities": tf.nn.softmax(logits)}
    if mode == tfps.ModeKeys.PREDICT:
        return tfps.ModelSpec(predictions=predictions)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    metrics = {}
    if mode == tfps.ModeKeys.EVAL:
        metrics["accuracy"] = tf.metrics.accuracy(labels, predictions["class_ids"])
    return tfps.ModelSpec(
        loss=tf.reduce_mean(losses),
        predictions=predictions,
        eval_metric_ops=metrics,
        optimizer=tfps.make_optimizer(params, default="adagrad", learning_rate=0.05),
    )


def _logits(image: Tensor) -> Tensor:
    """Return the network's output, float32 of shape [batch, 10]."""
    edges = np.stack(EDGES, axis=-1).reshape(3, 3, 1, 3)
    kernel = tf.get_variable("conv/kernel", [3, 3, 1, 3], initializer=tf.constant_initializer(edges))
    bias = tf.get_variable("conv/bias", [3], initializer=tf.zeros_initializer())
    weights = tf.get_variable("dense/kernel", [192, 10], initializer=tf.zeros_initializer())
    offsets = tf.get_variable("dense/bias", [10], initializer=tf.zeros_initializer())
    net = tf.nn.max_pool2d(tf.nn.conv2d(image, kernel, strides=1, padding="VALID"), 3, strides=3, padding="VALID")
    net = tf.nn.relu(tf.nn.bias_add(net, bias))  # the same result as before pooling, at a ninth of the work
    return tf.matmul(tf.reshape(net, [-1, 192]), weights) + offsets
