"""The optimizer with which the PS take the mean change of a round: ``--server_optimizer``.

The mean change, with the opposite sign, is its gradient (Reddi et al. 2021, "Adaptive Federated Optimization"). With
``sgd`` and a rate of 1, the variables become the mean of the workers' copies: FedAvg, local SGD. ``nesterov`` over an
inner AdamW is DiLoCo (Douillard et al. 2023). ``adam`` has another beta2 and epsilon than TensorFlow's default: few
updates are made, and each gradient is as large as a whole round of steps.
"""

from collections.abc import Callable, Mapping

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.tf_types import Optimizer

_MOMENTUM = 0.9
_BETA2, _EPSILON = 0.99, 1e-3
_MADE: Mapping[str, Callable[[float, float], Optimizer]] = {
    "sgd": lambda rate, _: tf.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate, momentum: tf.train.MomentumOptimizer(rate, momentum, name="ServerMomentum"),
    "nesterov": lambda rate, momentum: tf.train.MomentumOptimizer(
        rate, momentum, name="ServerMomentum", use_nesterov=True
    ),
    "adam": lambda rate, momentum: tf.train.AdamOptimizer(rate, momentum, _BETA2, _EPSILON, name="ServerAdam"),
    "adagrad": lambda rate, _: tf.train.AdagradOptimizer(rate, _EPSILON, name="ServerAdagrad"),
}


def make(config: JobConfig) -> Optimizer:
    """Return the optimizer of a job. Its slots are named after its kind, beside those of the model's optimizer.

    So a checkpoint of a job with another kind does not fit.

    Args:
        config: A job whose flags the mode has validated.
    """
    momentum = _MOMENTUM if config.server_momentum is None else config.server_momentum
    return _MADE[config.server_optimizer or "sgd"](config.server_learning_rate or 1.0, momentum)
