"""What a checkpoint may not hold."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.modes.updates.moments import Moments
from tfps.modes.updates.update_ops import ancestors
from tfps.runtime.graph.passes.snapshot import Snapshot, _are_broken, _real

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize(
    ("numbers", "of_optimizer", "of_model"),
    [([1, 2], False, False), ([1, NAN], True, True), ([INF, 1], True, False), ([60_000, 60_000], False, False)],
)
def test_numbers_that_are_not_finite(dtype: type, numbers: list[float], of_optimizer: bool, of_model: bool) -> None:
    """NaN is found in a variable of any type, and Inf where an optimizer updates it; large numbers are no Inf."""
    with tf.Graph().as_default(), tf.Session() as session:
        value = _real(tf.constant(np.array(numbers, dtype)))
        found = session.run(_are_broken([value, value], may_be_inf=[False, True]))
    assert found.tolist() == [of_optimizer, of_model]


def test_the_imaginary_part_counts() -> None:
    """A complex number is not finite if its imaginary part is not."""
    with tf.Graph().as_default(), tf.Session() as session:
        value = _real(tf.constant(np.array([complex(1, NAN)], np.complex64)))
        assert session.run(_are_broken([value], may_be_inf=[True])).tolist() == [True]


def test_each_variable_is_looked_at_by_itself() -> None:
    """One that is not finite is no other's fault, whatever their types; neither is a sum that is too large."""
    with tf.Graph().as_default(), tf.Session() as session:
        given = [np.float32([3e38, 3e38]), np.float64([1e300, 1e300]), np.float16([1, NAN]), np.float32([[INF], [1]])]
        values = [_real(tf.constant(numbers)) for numbers in given]
        found = session.run(_are_broken(values, may_be_inf=[False] * 4))
        other = session.run(_are_broken(values, may_be_inf=[True, False, True, True]))
    assert found.tolist() == [False, False, True, True]
    assert other.tolist() == [False, False, True, False]


@pytest.mark.parametrize("sliced", [False, True])
def test_a_reference_variable_is_copied_in_the_moment(sliced: bool) -> None:
    """An update in place, after the moment and before the values are written, changes none of them."""
    slices = tf.fixed_size_partitioner(2) if sliced else None
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
        weight = tf.get_variable(
            "weight", [4], initializer=tf.zeros_initializer(), use_resource=False, partitioner=slices
        )
        snapshot = Snapshot(Moments(1, 1))
        with tf.control_dependencies(snapshot.reads):
            changed = [one.assign_add(tf.ones_like(one)).op for one in (weight if sliced else [weight])]
        with tf.control_dependencies(changed):
            saved = [tf.identity(snapshot.value(spec)) for one in snapshot.saveables for spec in one.specs]
        init = tf.global_variables_initializer()
        with tf.Session(tf.train.Server({"ps": ["localhost:0"]}).target) as session:
            session.run(init)
            found = session.run(saved)
            after = session.run(list(weight) if sliced else [weight])
    assert np.concatenate(found).tolist() == [0, 0, 0, 0]
    assert np.concatenate(after).tolist() == [1, 1, 1, 1]


def test_all_values_are_of_the_moment() -> None:
    """Whatever a PS holds is read after its lock is taken: variables of both kinds and of any device, and tables."""
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
        for name, by_handle, device in [
            ("a", True, ""),
            ("b", False, ""),
            ("c", True, "/cpu:0"),
            ("d", False, "/cpu:0"),
        ]:
            with tf.device(f"/job:ps/task:0{device}"):
                tf.get_variable(name, [2], use_resource=by_handle)
        tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, empty_key=-1, deleted_key=-2)
        snapshot = Snapshot(Moments(1, 1))
        values = [snapshot.value(spec) for one in snapshot.saveables for spec in one.specs]
        locks = [[op for op in ancestors([value.op]) if op.type == "MutexLock"] for value in values]
        [end] = snapshot.reads
    assert len(values) == 4 + 2 * 2
    assert all(found == locks[0] and len(found) == 1 for found in locks)
    assert {value.op for value in values} <= set(ancestors([end]))
