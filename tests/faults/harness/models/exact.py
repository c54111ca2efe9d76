"""A model whose every update is known, so that a checkpoint tells how many it holds, and whether the means were exact.

Each weight under ``updates/`` is raised by exactly 1 by each update, all its elements, or all the rows that are looked
up: gradients are -1, subtracted by a step of SGD; of worker ``i`` that of ``weight`` is 2^i instead. So in sync
``-weight`` is the number of updates times the mean of all 2^i.

There are small weights, which live packed, large ones, which the packed wire leaves alone, and tables, of which each
step touches some rows. They come in pairs of one size, so that either placement gives each of two PS one of each kind
(small ones: two, for one alone is not packed).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from control import Control
from sums import ROWS

import tfps

SHAPES = {"large": [160_000], "table": [8, 4], "small": [2]}  # 640 KB are more than half a bucket of the wire
PAIRS = {"large": 1, "table": 1, "small": 2}


def input_fn(mode: str, params: Mapping[str, Any], input_context: Any) -> Any:
    """Return inputs that come as slowly as ``control`` says."""
    rows = tf.constant(ROWS, tf.int64)
    if mode != tfps.ModeKeys.TRAIN:
        return tf.data.Dataset.from_tensors(({"x": 0.0, "one": 1.0, "rows": rows}, 0.0))
    control = Control(params["data_dir"], input_context.input_pipeline_id)

    def value(number: Any) -> Any:
        x = tf.ensure_shape(tf.numpy_function(lambda _: np.float32(control.value()), [number], tf.float32), [])
        return {"x": x, "one": tf.ones([]), "rows": rows}, 0.0

    return tf.data.Dataset.range(control.batches()).map(value)


def model_fn(features: Mapping[str, Any], labels: Any, mode: str, params: Mapping[str, Any]) -> tfps.ModelSpec:
    """Build the variables."""
    del labels
    wide = Path(params["data_dir"], "wide").exists()  # a model that no checkpoint of the usual one fits
    used = tf.add_n([tf.reduce_sum(_used(kind, index, features)) for kind, index in _names()])
    weight = tf.get_variable("weight", [3] if wide else [], initializer=tf.zeros_initializer())
    total = tf.reduce_sum(weight)
    metrics = {"weight": tf.metrics.mean(total)} if mode == "eval" else {}
    return tfps.ModelSpec(
        loss=total * features["x"] - used * features["one"],  # one: so that gradients are no constants
        predictions={"y": total},
        eval_metric_ops=metrics,
        optimizer=tf.train.GradientDescentOptimizer(1.0),
    )


def _names() -> list[tuple[str, int]]:
    return [(kind, index) for kind, pairs in PAIRS.items() for index in range(2 * pairs)]


def _used(kind: str, index: int, features: Mapping[str, Any]) -> Any:
    """Return what a step uses of a weight."""
    made = tf.get_variable(f"updates/{kind}{index}", SHAPES[kind], initializer=tf.zeros_initializer())
    return tf.nn.embedding_lookup(made, features["rows"]) if kind == "table" else made
