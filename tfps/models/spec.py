"""The interface of model files: ``ModelSpec``, which they return, and the three modes. Does not import TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfps.tf_types import Operation, Optimizer, Tensor


class ModeKeys:
    """The modes of ``model_fn`` and ``input_fn``, with the names and values of ``tf.estimator.ModeKeys``."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class ModelSpec:
    """The result of ``model_fn``, modeled on ``tf.estimator.EstimatorSpec``.

    Attributes:
        loss: Scalar float tensor, the mean over the batch. Required for training and evaluation.
        predictions: Tensors by name, with the batch as first dimension. Required for export.
        eval_metric_ops: By name, the pair that a ``tf.compat.v1.metrics`` function returns: (value, update op).
        optimizer: A ``tf.compat.v1.train.Optimizer``. Required for training.
        log_tensors: Scalars by name, printed with the loss on every progress line.
    """

    loss: Tensor = None
    predictions: Mapping[str, Tensor] | None = None
    eval_metric_ops: Mapping[str, tuple[Tensor, Operation]] = field(default_factory=dict)
    optimizer: Optimizer = None
    log_tensors: Mapping[str, Tensor] = field(default_factory=dict)
