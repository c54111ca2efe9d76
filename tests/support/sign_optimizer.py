"""An optimizer as another package adds it: signSGD, whose update of an element depends only on that element."""

import importlib
from typing import Any

from tfps.optimizers.base import OptimizerFactory
from tfps.tf_types import Optimizer


class SignFactory(OptimizerFactory):
    """``--optimizer=sign``."""

    name = "sign"

    def create(self, learning_rate: float) -> Optimizer:
        """Return a new optimizer; TensorFlow is imported only here."""
        kind: Any = importlib.import_module("support.sign_sgd").SignSgdOptimizer
        return kind(learning_rate)
