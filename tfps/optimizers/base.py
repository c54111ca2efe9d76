"""What an optimizer that ``--optimizer`` names has to offer. Does not import TensorFlow."""

import abc
from typing import ClassVar

from tfps.tf_types import Optimizer


class OptimizerFactory(abc.ABC):
    """Creates a ``tf.compat.v1.train.Optimizer``; the class is loaded without TensorFlow, the optimizer is not.

    If the update of each element depends only on that element, the optimizer's class may state it with
    ``elementwise = True`` in its own body. tfps then packs small variables, see
    ``tfps.runtime.graph.passes.variable_packing``. Subclasses do not inherit the statement.
    If the change of the parameters is proportional to the learning rate, it may state it with
    ``proportional_to_rate = True`` in the same way. ``--staleness_lr`` needs it.

    Attributes:
        name: The value of ``--optimizer``.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def create(self, learning_rate: float) -> Optimizer:
        """Return a new optimizer with its defaults for everything but the learning rate."""
