"""How the gradients of n workers become one, which holds up against some broken or poisoned workers.

For the gradients ``g_1 .. g_n`` of an update, elementwise except for Krum::

    mean           (g_1 + ... + g_n) / n
    sum            g_1 + ... + g_n
    median         the middle one; of an even number, the mean of the two in the middle
    trimmed_mean   the mean of those that remain when the f smallest and the f largest are left out
    krum           the g_i whose squared distances to its n - f - 2 nearest others have the least sum

Median and trimmed mean: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates".
Krum: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", which holds for
``n >= 2 f + 3``. So ``f`` is the largest number for which this is true, ``tolerated``; trimmed mean leaves out at
least one on each side.
"""

from collections.abc import Callable, Mapping

import tensorflow.compat.v1 as tf

from tfps.tf_types import Tensor


def tolerated(count: int) -> int:
    """Return the number of broken workers among ``count`` that Krum tolerates."""
    return max(0, (count - 3) // 2)


def mean(stack: Tensor) -> Tensor:
    """Return the mean of n gradients, [n, ...]."""
    return tf.reduce_sum(stack, axis=0) / _count(stack)


def total(stack: Tensor) -> Tensor:
    """Return the sum of n gradients, [n, ...]."""
    return tf.reduce_sum(stack, axis=0)


def median(stack: Tensor) -> Tensor:
    """Return the elementwise median of n gradients, [n, ...]."""
    count = _count(stack)
    return tf.reduce_mean(tf.sort(stack, axis=0)[(count - 1) // 2 : count // 2 + 1], axis=0)


def trimmed_mean(stack: Tensor) -> Tensor:
    """Return the elementwise mean of n gradients, [n, ...], without the smallest and the largest; of two, the mean."""
    count = _count(stack)
    trimmed = min(max(1, tolerated(count)), (count - 1) // 2)
    return tf.reduce_mean(tf.sort(stack, axis=0)[trimmed : count - trimmed], axis=0)


ELEMENTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "sum": total,
    "median": median,
    "trimmed_mean": trimmed_mean,
}


def squared_distances(stack: Tensor) -> Tensor:
    """Return the squared distances of n gradients, [n, ...], to each other: [n, n]."""
    flat = tf.reshape(stack, [_count(stack), -1])
    rows = [tf.reduce_sum(tf.square(flat - flat[index]), axis=1) for index in range(_count(stack))]
    return tf.stack(rows)


def krum(distances: Tensor) -> Tensor:
    """Return the index of the gradient that Krum selects, from the squared distances: [n, n]."""
    count = int(distances.shape[0])
    nearest = tf.sort(distances, axis=1)[:, 1 : count - tolerated(count) - 1]  # without the one to itself
    return tf.argmin(tf.reduce_sum(nearest, axis=1))


def _count(stack: Tensor) -> int:
    return int(stack.shape[0])
