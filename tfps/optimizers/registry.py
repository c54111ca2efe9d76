"""The optimizers that ``--optimizer`` names, as one table. Imports TensorFlow only when an optimizer is created."""

import pkgutil
from collections.abc import Mapping
from typing import Any

from tfps.tf_types import Optimizer

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sgd": ("tensorflow.compat.v1.train:GradientDescentOptimizer", {}),
    "momentum": ("tensorflow.compat.v1.train:MomentumOptimizer", {"momentum": 0.9}),
    "adam": ("tfps.optimizers.lazy_adam:LazyAdamOptimizer", {}),
    "adagrad": ("tfps.optimizers.adagrad:ExactAdagradOptimizer", {}),
    "ftrl": ("tensorflow.compat.v1.train:FtrlOptimizer", {}),
    "rmsprop": ("tensorflow.compat.v1.train:RMSPropOptimizer", {}),
}


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
    """
    name = params.get("optimizer") or default
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {name!r}: name one of {', '.join(OPTIMIZERS)}")
    path, options = OPTIMIZERS[name]
    make = pkgutil.resolve_name(path)
    return make(learning_rate=params.get("learning_rate") or learning_rate, **options)
