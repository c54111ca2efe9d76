"""Turn arrays of images into batches inside the graph, fast enough never to be what a step waits for.

A worker's share enters TensorFlow once, as bytes, when its iterator is initialised. What runs through ``tf.data`` are
not images but indices, an epoch at a time; a batch of indices then picks its rows in one ``gather``. An element per
image costs 3 times more, or 20 if each is cast alone.
"""

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.data.idx import Bytes
from tfps.errors import DataError

PREFETCHED = 4
_FOR_EVER = np.iinfo(np.int64).max


def batches(
    images: Bytes, labels: Bytes, batch_size: int, seed: int = 0, shard: tuple[int, int] = (0, 1), training: bool = True
) -> Any:
    """Make a dataset of batches.

    Args:
        images: uint8, shape [n, height, width].
        labels: uint8, shape [n].
        batch_size: Images in a batch; the last one of an evaluation may have fewer.
        seed: Together with the shard's index, gives the order of every epoch; not used in evaluation.
        shard: ``(index, count)``: take every ``count``-th example, from ``index`` on. The shares of all indices are
            disjoint, and together are everything.
        training: Whether to shuffle, each epoch anew, and to repeat for ever: every example comes once an epoch, and
            a batch may span two. Otherwise one pass, in order.

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
    pixels, classes = (_when_initialised(np.ascontiguousarray(array)) for array in share)

    def pick(rows: Any) -> tuple[dict[str, Any], Any]:
        image = tf.cast(tf.gather(pixels, rows), tf.float32) * (1 / 255)
        return {"image": image}, tf.cast(tf.gather(classes, rows), tf.int32)

    return indices.map(pick).prefetch(PREFETCHED)


def _when_initialised(array: Bytes) -> Any:
    """Return a tensor of an array that the graph itself does not hold.

    As a constant, MNIST would go into every checkpoint's meta graph, the event file and each optimisation pass over the
    graph, which takes seconds. The batches must be made in this process, as those of a task on its own device are.
    """
    tensor = tf.numpy_function(lambda: array, [], tf.uint8)
    tensor.set_shape(array.shape)
    return tensor


def _shuffled(size: int, batch_size: int, seed: tuple[int, int]) -> Any:
    """Make a dataset of batches of indices: one permutation of all of them after another."""

    def order(epoch: Any) -> Any:
        epoch_seed = tf.random.experimental.stateless_fold_in(tf.constant(seed, tf.int64), epoch)
        return tf.random.experimental.stateless_shuffle(tf.range(size), epoch_seed)

    return tf.data.Dataset.range(_FOR_EVER).map(order).rebatch(batch_size, drop_remainder=True).repeat()


def _in_order(size: int, batch_size: int) -> Any:
    return tf.data.Dataset.range(size).batch(batch_size)
