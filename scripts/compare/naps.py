"""The built-in ``mnist``, each of whose steps takes a nap instead of a longer computation.

Naps of several workers do not disturb each other, even on a machine with fewer cores than workers.
``TFPS_COMPARE_NAP_MS`` is the length in milliseconds. The worker ``TFPS_COMPARE_SLOW_WORKER``, if it is set, sleeps
``TFPS_COMPARE_SLOWDOWN`` times as long.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import tfps
from tfps.models import mnist
from tfps.models.mnist import model_fn

__all__ = ["input_fn", "model_fn", "nap_secs"]


def nap_secs(worker: int) -> float:
    """Return how long a step of a worker sleeps, in seconds."""
    slow = os.environ.get("TFPS_COMPARE_SLOW_WORKER") == str(worker)
    factor = float(os.environ["TFPS_COMPARE_SLOWDOWN"]) if slow else 1.0
    return factor * float(os.environ["TFPS_COMPARE_NAP_MS"]) / 1_000


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return the batches of ``mnist``; in training, each comes after a nap."""
    batches = mnist.input_fn(mode, params, input_context)
    if mode != tfps.ModeKeys.TRAIN:
        return batches
    secs = nap_secs(input_context.input_pipeline_id)

    def late(labels: Any) -> Any:
        time.sleep(secs)
        return labels

    def after_a_nap(features: Any, labels: Any) -> tuple[Any, Any]:
        return features, tf.ensure_shape(tf.numpy_function(late, [labels], labels.dtype), labels.shape)

    return batches.map(after_a_nap)
