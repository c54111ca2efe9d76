"""The optimizers that ``--optimizer`` names. Imports TensorFlow only when an optimizer is created.

A distribution offers an optimizer with an entry point of the group ``tfps.optimizers``; in its ``pyproject.toml``::

    [project.entry-points."tfps.optimizers"]
    lion = "my_package.lion:LionFactory"
"""

from collections.abc import Mapping
from typing import Any

from tfps.optimizers.base import OptimizerFactory
from tfps.plugins import Registry
from tfps.tf_types import Optimizer

OPTIMIZERS: Registry[OptimizerFactory] = Registry(
    OptimizerFactory,
    "optimizer",
    "optimizer",
    {
        "sgd": "tfps.optimizers.builtin:GradientDescentFactory",
        "momentum": "tfps.optimizers.builtin:MomentumFactory",
        "adam": "tfps.optimizers.builtin:AdamFactory",
        "adagrad": "tfps.optimizers.builtin:AdagradFactory",
        "ftrl": "tfps.optimizers.builtin:FtrlFactory",
        "rmsprop": "tfps.optimizers.builtin:RMSPropFactory",
    },
    "tfps.optimizers",
)


def make_optimizer(params: Mapping[str, Any], default: str, learning_rate: float) -> Optimizer:
    """Create the optimizer that the flags ask for, or the model's own.

    Args:
        params: ``model_fn``'s params: ``optimizer`` and ``learning_rate``, each ``None`` if the flag was not given.
        default: The model's own optimizer, a name of ``OPTIMIZERS``.
        learning_rate: The model's own learning rate.

    Returns:
        A ``tf.compat.v1.train.Optimizer``.

    Raises:
        ValueError: If there is no optimizer of that name.
        ConfigError: If the optimizer is from another distribution and cannot be loaded.
    """
    name = params.get("optimizer") or default
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: give one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS.load(name).create(params.get("learning_rate") or learning_rate)
