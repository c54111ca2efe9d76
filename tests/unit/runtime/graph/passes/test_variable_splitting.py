"""Claims about large variables that are split over the parameter servers: they begin as they would in one piece."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.runtime.graph.passes import variable_splitting

ROWS, COLUMNS = 6, 4
CLUSTER = Cluster(("p0:1", "p1:1"), ("w:1",))
TABLE = np.arange(24, dtype=np.float32).reshape(ROWS, COLUMNS)


def first_values(num_ps: int, make: Callable[[], Any]) -> Any:
    """Return the first values of the variable that a function makes, and in how many slices it is."""
    cluster = Cluster(tuple(f"ps{i}:1" for i in range(num_ps)), ("w:1",))
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(5)
        getter = variable_splitting.getter(JobConfig(min_slice_mb=1e-9), cluster)
        with tf.variable_scope(tf.get_variable_scope(), custom_getter=getter):
            made = tf.convert_to_tensor(make())
        session.run(tf.global_variables_initializer())
        return session.run(made), len(tf.global_variables())


def table(**arguments: Any) -> Callable[[], Any]:
    """Return a function that makes a variable."""
    return lambda: tf.get_variable("table", [ROWS, COLUMNS], **arguments)


def stretched(shape: Any, dtype: Any = tf.float32) -> Any:
    """Be an initializer of the user's own, which looks at the shape."""
    return tf.cast(tf.random.stateless_normal(shape, [1, 2]), dtype) * float(shape[0])


@pytest.mark.parametrize(
    "initializer",
    [
        tf.constant_initializer(TABLE),
        tf.constant_initializer([1.0, 2.0, 3.0]),
        tf.constant_initializer(0.5),
        tf.orthogonal_initializer(seed=3),
        tf.initializers.identity(),
        tf2.keras.initializers.Orthogonal(seed=3),
        stretched,
        tf.zeros_initializer,
        tf.ones_initializer(),
    ],
)
def test_first_values_do_not_depend_on_the_number_of_ps(initializer: Any) -> None:
    """Those that are known are the same, to the bit, in one piece and in slices."""
    make = table(initializer=initializer)
    (whole, one), (parts, _) = first_values(1, make), first_values(2, make)
    assert one == 1
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize(
    "initializer",
    [
        tf.random_normal_initializer(seed=7),
        tf.random_uniform_initializer(-1, 1, seed=7),
        tf.truncated_normal_initializer(seed=7),
        tf.glorot_uniform_initializer(seed=7),
        tf.variance_scaling_initializer(seed=7),
        tf.random_normal_initializer(),
        None,
        tf2.keras.initializers.RandomNormal(seed=7),
        tf2.random_normal_initializer(seed=7),
    ],
)
def test_no_numbers_come_twice(initializer: Any) -> None:
    """What is drawn for one slice is not drawn for another one again, with a seed or without."""
    values, slices = first_values(3, table(initializer=initializer))
    assert slices == 3
    assert len(np.unique(values)) == ROWS * COLUMNS
    np.testing.assert_array_equal(values, first_values(3, table(initializer=initializer))[0])


def test_what_is_about_the_whole_variable_keeps_it_whole() -> None:
    """A constraint, and a regularizer that may not add up, would be about each slice by itself."""
    for arguments in ({"constraint": lambda w: tf.clip_by_norm(w, 1.0)}, {"regularizer": tf.norm}):
        assert first_values(2, table(**arguments))[1] == 1
    assert first_values(2, table(regularizer=tf2.keras.regularizers.L2(0.1)))[1] == 2


def test_a_getter_of_the_model_may_give_arguments_by_position() -> None:
    """Scripts that keep float32 variables for float16 models do; their arguments are those of TensorFlow's getter."""

    def keep_float32(getter: Any, name: str, shape: Any = None, dtype: Any = None, *others: Any, **named: Any) -> Any:
        variable = getter(name, shape, tf.float32, *others, **named)
        return variable if dtype == tf.float32 else tf.cast(variable, dtype)

    def make() -> Any:
        with tf.variable_scope("kept", custom_getter=keep_float32):
            return tf.get_variable("table", [ROWS, COLUMNS], tf.float16, tf.constant_initializer(TABLE))

    for num_ps in (1, 2):
        values, slices = first_values(num_ps, make)
        assert (values.dtype, slices, values.tolist()) == (np.float16, num_ps, TABLE.tolist())

    getter = variable_splitting.getter(JobConfig(), CLUSTER)
    with (
        tf.Graph().as_default(),
        tf.variable_scope("", custom_getter=getter),
        tf.variable_scope("", custom_getter=lambda get, name, **_: get(name, [2])),
    ):
        assert tf.get_variable("default").dtype.base_dtype == tf.float32


def test_split_variables_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A model that selects variables by name, or an optimizer that takes norms, sees slices."""
    with tf.Graph().as_default() as graph, caplog.at_level("INFO", logger="tfps"):
        with tf.variable_scope("", custom_getter=variable_splitting.getter(JobConfig(min_slice_mb=1e-9), CLUSTER)):
            table()()
        names = [variable.op.name for variable in tf.trainable_variables()]
        variable_splitting.log_split(graph, JobConfig())
    assert names == ["table/part_0", "table/part_1"]
    assert "table: split over the PS. tf.trainable_variables() has the slices, named table/part_0" in caplog.text
    with tf.Graph().as_default() as graph, caplog.at_level("INFO", logger="tfps"):
        caplog.clear()
        table()()
        variable_splitting.log_split(graph, JobConfig())
    assert caplog.text == ""


@pytest.mark.parametrize("initializer", [tf.orthogonal_initializer(), tf.orthogonal_initializer(seed=7)])
def test_all_slices_are_of_one_draw(initializer: Any) -> None:
    """What is made as a whole is made once, so that its columns are orthogonal over all slices, also without a seed."""
    values, slices = first_values(3, table(initializer=initializer))
    assert slices == 3
    np.testing.assert_allclose(values.T @ values, np.eye(COLUMNS), atol=1e-5)


def found_rows(ids: list[int], partitioner: Any = None) -> list[float]:
    """Return the rows that TensorFlow's default lookup finds in a table of 0 to 5 in two slices."""
    cluster = Cluster(("p0:1", "p1:1"), ("w:1",))
    variable_splitting.patch_embedding_lookup()
    with tf.Graph().as_default(), tf.Session() as session:
        getter = variable_splitting.getter(JobConfig(min_slice_mb=1e-9), cluster)
        with tf.variable_scope("scope", custom_getter=getter):
            rows = tf.get_variable("rows", [6], initializer=tf.zeros_initializer(), partitioner=partitioner)
        looked = [tf.nn.embedding_lookup(rows, ids), tf.nn.embedding_lookup(list(rows), ids)]
        fill = [part.assign([3.0 * index, 3.0 * index + 1, 3.0 * index + 2]) for index, part in enumerate(rows)]
        session.run(fill)
        one, other = session.run(looked)
    assert one.tolist() == other.tolist()
    return list(one)


def test_a_row_is_looked_for_where_it_is_meant_to_be() -> None:
    """A row is in the slice that holds it where tfps splits; what a model splits itself is dealt in turn."""
    assert found_rows([0, 1, 4]) == [0.0, 1.0, 4.0]
    assert found_rows([0, 1, 4], tf.fixed_size_partitioner(2)) == [0.0, 3.0, 2.0], "as TensorFlow does"
