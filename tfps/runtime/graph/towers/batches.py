"""The input of several towers: a step reads one element, which holds a batch for each of them.

An input may end with fewer batches than there are towers. The towers without one then get the first batch of the step
again, with weight 0: it adds nothing to the loss, to the gradients or to the number of examples::

    input     b0 b1 b2 b3 b4
    4 towers  (b0 b1 b2 b3, weights 1 1 1 1)  (b4 b4 b4 b4, weights 1 0 0 0)
"""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.data.util import structure

from tfps.tf_types import Dataset, Nested, Tensor


def grouped(dataset: Dataset, count: int, pad: bool) -> Dataset:
    """Return a dataset whose elements hold ``count`` elements of another one, and their weights: float64 [count].

    Args:
        dataset: The other dataset.
        count: The number of towers.
        pad: Whether an incomplete last group is filled up. It is left out otherwise.
    """
    spec = dataset.element_spec
    flat = dataset.map(lambda *parts: tuple(structure.to_tensor_list(spec, parts)))
    windows = flat.window(count, drop_remainder=not pad)
    made = windows.map(lambda *parts: _group(parts, count))
    flat_spec = flat.element_spec

    def whole(elements: Any, weights: Tensor) -> Any:
        given = [tf.nest.map_structure(lambda part, one: tf.ensure_shape(part, one.shape), each, flat_spec)
                 for each in elements]  # fmt: skip
        return (*(structure.from_tensor_list(spec, list(each)) for each in given), weights)

    return made.map(whole)


def _group(parts: Sequence[Dataset], count: int) -> tuple[Any, Tensor]:
    """Return the elements of a window, the first again for each that is missing, and the weights."""
    elements = tf.data.Dataset.zip(parts)
    real = tf.data.Dataset.zip((elements, tf.data.Dataset.from_tensors(1.0).repeat()))
    again = tf.data.Dataset.zip((elements.take(1).repeat(count - 1), tf.data.Dataset.from_tensors(0.0).repeat()))
    filled = real.concatenate(again)
    found = [filled.skip(index).take(1).get_single_element() for index in range(count)]
    return tuple(element for element, _ in found), tf.stack([tf.cast(weight, tf.float64) for _, weight in found])


def steps(batches: Tensor, count: int, pad: bool) -> Tensor:
    """Return for how many steps an input of so many batches is enough: int64; negative numbers stay as they are."""
    whole = (batches + (count - 1 if pad else 0)) // count
    return tf.where(batches < 0, batches, whole)


def flat(batch: Nested) -> list[Tensor]:
    """Return the tensors of a batch, with the parts of sparse and ragged ones."""
    return [part for part in tf.nest.flatten(batch, expand_composites=True) if isinstance(part, tf.Tensor)]
