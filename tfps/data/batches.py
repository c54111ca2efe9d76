"""Turn arrays of images into batches inside the graph, fast enough that no step waits for them.

A worker's share enters TensorFlow once, as bytes, when its iterator is initialized. Indices, not images, run through
``tf.data``, an epoch at a time. One ``gather`` then picks the rows of a batch. An element per image would cost 3 times
more, or 20 times if each is cast separately.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.data.examples import Examples
from tfps.data.idx import Bytes
from tfps.errors import DataError

PREFETCHED = 4
_FOR_EVER = np.iinfo(np.int64).max

_Function = TypeVar("_Function", bound=Callable[..., Any])


def batches(
    images: Bytes, labels: Bytes, batch_size: int, seed: int = 0, shard: tuple[int, int] = (0, 1), training: bool = True
) -> Any:
    """Create a dataset of batches.

    Args:
        images: uint8, shape [n, height, width].
        labels: uint8, shape [n].
        batch_size: Images per batch; the last batch of an evaluation may have fewer.
        seed: Determines, with the shard's index, the order of every epoch; not used in evaluation.
        shard: ``(index, count)``: take every ``count``-th example, starting at ``index``. The shares of all indices are
            disjoint, and together are everything.
        training: Whether to shuffle, differently in each epoch, and to repeat without end. Every example comes once per
            epoch, and a batch may span two epochs. Otherwise one pass, in order.

    Returns:
        A ``tf.data.Dataset`` of ``({"image": float32 [batch, height, width, 1], 0 to 1}, labels int32 [batch])``.

    Raises:
        DataError: If the share is empty.
    """
    index, count = shard
    share = images[index::count, ..., np.newaxis], labels[index::count]
    if not len(share[0]):
        raise DataError(f"worker {index} of {count:,} has no example among {len(images):,}: use fewer workers.")
    indices = _shuffled(len(share[0]), batch_size, (seed, index)) if training else _in_order(len(share[0]), batch_size)
    return indices.map(_as_it_is(_reader(*share))).prefetch(PREFETCHED)


def examples(images: Bytes, labels: Bytes) -> Examples:
    """Return images for tfps to divide, as ``--data_policy`` and ``--partition`` say.

    Args:
        images: uint8, shape [n, height, width].
        labels: uint8, shape [n].

    Returns:
        Examples whose batches are like those of ``batches``.
    """
    return Examples(len(labels), _reader(images[..., np.newaxis], labels), classes=labels)


def _reader(images: Bytes, labels: Bytes) -> Callable[[Any], tuple[dict[str, Any], Any]]:
    """Return a function from rows, int64 [batch], to their batch."""
    pixels, classes = (_when_initialised(np.ascontiguousarray(array)) for array in (images, labels))

    def pick(rows: Any) -> tuple[dict[str, Any], Any]:
        image = tf.cast(tf.gather(pixels, rows), tf.float32) * (1 / 255)
        return {"image": image}, tf.cast(tf.gather(classes, rows), tf.int32)

    return pick


def _as_it_is(function: _Function) -> _Function:
    """Return a function that AutoGraph does not convert, which would take a third of the time for the whole graph."""
    kept: _Function = tf.autograph.experimental.do_not_convert(function)
    return kept


def _when_initialised(array: Bytes) -> Any:
    """Return a tensor of an array that the graph itself does not contain.

    As a constant, MNIST would go into every checkpoint's meta graph, the event file and each optimization pass over the
    graph, which takes seconds. The batches must be made in this process, as those of a task on its own device are.
    """
    tensor = tf.numpy_function(lambda: array, [], tf.uint8)
    tensor.set_shape(array.shape)
    return tensor


def _shuffled(size: int, batch_size: int, seed: tuple[int, int]) -> Any:
    """Return a dataset of batches of indices from an endless sequence of permutations."""

    def order(epoch: Any) -> Any:
        epoch_seed = tf.random.experimental.stateless_fold_in(tf.constant(seed, tf.int64), epoch)
        return tf.random.experimental.stateless_shuffle(tf.range(size), epoch_seed)

    return tf.data.Dataset.range(_FOR_EVER).map(_as_it_is(order)).rebatch(batch_size, drop_remainder=True).repeat()


def _in_order(size: int, batch_size: int) -> Any:
    return tf.data.Dataset.range(size).batch(batch_size)
