"""What a checkpoint may not hold."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.runtime.graph.passes.snapshot import _is_broken

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize(
    ("numbers", "of_optimizer", "of_model"),
    [([1, 2], False, False), ([1, NAN], True, True), ([INF, 1], True, False), ([60_000, 60_000], False, False)],
)
def test_numbers_that_are_not_finite(dtype: type, numbers: list[float], of_optimizer: bool, of_model: bool) -> None:
    """NaN is found in a variable of any type, and Inf where an optimizer updates it; large numbers are no Inf."""
    with tf.Graph().as_default(), tf.Session() as session:
        value = tf.constant(np.array(numbers, dtype))
        found = session.run([_is_broken(value, may_be_inf=False), _is_broken(value, may_be_inf=True)])
    assert found == [of_optimizer, of_model]


def test_the_imaginary_part_counts() -> None:
    """A complex number is not finite if its imaginary part is not."""
    with tf.Graph().as_default(), tf.Session() as session:
        value = tf.constant(np.array([complex(1, NAN)], np.complex64))
        assert session.run(_is_broken(value, may_be_inf=True))
