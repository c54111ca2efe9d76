"""The training examples of a model that lets tfps divide them. Must not import TensorFlow."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfps.tf_types import Nested, Tensor


@dataclass(frozen=True)
class Examples:
    """The training examples of a model, for ``input_fn`` to return instead of a dataset.

    tfps divides, shuffles, batches and repeats them.

    Attributes:
        size: The number of examples.
        read: Function from indices, int64 [batch], to the batch ``(features, labels)``. It builds a graph, as a
            function for ``tf.data.Dataset.map`` does.
        classes: The class of each example, an array or a list, for ``--partition=label``; ``None`` if they have none.

    Raises:
        TypeError: If ``size`` is no whole number, or ``read`` is no function.
        ValueError: If there is no example.
    """

    size: int
    read: Callable[[Tensor], tuple[Nested, Nested]]
    classes: Any = None

    def __post_init__(self) -> None:
        """Check the size and the function."""
        if not isinstance(self.size, numbers.Integral):
            raise TypeError(f"tfps.Examples: size={self.size!r} must be a whole number")
        if self.size < 1:
            raise ValueError(f"tfps.Examples: size={self.size} must be at least 1")
        if not callable(self.read):
            raise TypeError(f"tfps.Examples: read={self.read!r} must be a function from indices to (features, labels)")
