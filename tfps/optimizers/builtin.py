"""The factories of the built-in optimizers. TensorFlow is imported when one creates its optimizer."""

import importlib
from collections.abc import Mapping
from typing import ClassVar

from tfps.optimizers.base import OptimizerFactory
from tfps.tf_types import Optimizer


class _ClassFactory(OptimizerFactory):
    """Creates an instance of a class that is named by its module and its name."""

    module: ClassVar[str] = "tensorflow.compat.v1.train"
    class_name: ClassVar[str]
    arguments: ClassVar[Mapping[str, float]] = {}

    def create(self, learning_rate: float) -> Optimizer:
        """Import the class, and return a new instance of it."""
        optimizer = getattr(importlib.import_module(self.module), self.class_name)
        return optimizer(learning_rate=learning_rate, **self.arguments)


class GradientDescentFactory(_ClassFactory):
    """``--optimizer=sgd``."""

    name = "sgd"
    class_name = "GradientDescentOptimizer"


class MomentumFactory(_ClassFactory):
    """``--optimizer=momentum``."""

    name = "momentum"
    class_name = "MomentumOptimizer"
    arguments: ClassVar[Mapping[str, float]] = {"momentum": 0.9}


class AdamFactory(_ClassFactory):
    """``--optimizer=adam``."""

    name = "adam"
    module = "tfps.optimizers.lazy_adam"
    class_name = "LazyAdamOptimizer"


class AdagradFactory(_ClassFactory):
    """``--optimizer=adagrad``."""

    name = "adagrad"
    module = "tfps.optimizers.adagrad"
    class_name = "ExactAdagradOptimizer"


class FtrlFactory(_ClassFactory):
    """``--optimizer=ftrl``."""

    name = "ftrl"
    class_name = "FtrlOptimizer"


class RMSPropFactory(_ClassFactory):
    """``--optimizer=rmsprop``."""

    name = "rmsprop"
    class_name = "RMSPropOptimizer"
