"""What a model file gives back: ``ModelSpec``, and the three modes it is called in. Does not import TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfps.tf_types import Optimizer, Tensor


class ModeKeys:
    """What ``model_fn`` and ``input_fn`` are called for; ``tf.estimator.ModeKeys``' names and values."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class ModelSpec:
    """What ``model_fn`` returns; ``tf.estimator.EstimatorSpec``'s fields.

    Attributes:
        loss: Scalar float tensor, the mean over the batch. Needed for training and evaluation.
        predictions: Tensors by name, first dimension the batch. Needed for export.
        eval_metric_ops: By name, the pair that a ``tf.compat.v1.metrics`` function returns: (value, update op).
        optimizer: A ``tf.compat.v1.train.Optimizer``. Needed for training.
        log_tensors: Scalars by name, printed with the loss on every progress line.
    """

    loss: Tensor = None
    predictions: Mapping[str, Any] | None = None
    eval_metric_ops: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    optimizer: Optimizer = None
    log_tensors: Mapping[str, Any] = field(default_factory=dict)
