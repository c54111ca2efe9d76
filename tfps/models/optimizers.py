"""The optimizers that ``--optimizer`` names, as one table. Imports TensorFlow only when one is made."""

from collections.abc import Mapping
from typing import Any

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sgd": ("GradientDescentOptimizer", {}),
    "momentum": ("MomentumOptimizer", {"momentum": 0.9}),
    "adam": ("LazyAdamOptimizer", {}),  # ours; the others are TensorFlow's
    "adagrad": ("AdagradOptimizer", {}),
    "ftrl": ("FtrlOptimizer", {}),
    "rmsprop": ("RMSPropOptimizer", {}),
}


def make_optimizer(params: Mapping[str, Any], default: str, learning_rate: float) -> Any:
    """Make the optimizer that the flags ask for, or the model's own.

    Args:
        params: ``model_fn``'s params: ``optimizer`` and ``learning_rate``, each ``None`` when the flag was not given.
        default: The model's own optimizer, a name of ``OPTIMIZERS``.
        learning_rate: The model's own learning rate.

    Returns:
        A ``tf.compat.v1.train.Optimizer``.
    """
    import tensorflow.compat.v1 as tf  # noqa: PLC0415  the table above is read where TensorFlow must not be

    from tfps.models import lazy_adam  # noqa: PLC0415

    class_name, options = OPTIMIZERS[params.get("optimizer") or default]
    made = getattr(lazy_adam, class_name, None) or getattr(tf.train, class_name)
    return made(learning_rate=params.get("learning_rate") or learning_rate, **options)
