"""The training examples of a model that lets tfps divide them. Must not import TensorFlow."""

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
    """

    size: int
    read: Callable[[Tensor], tuple[Nested, Nested]]
    classes: Any = None
