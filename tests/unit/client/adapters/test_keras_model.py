"""A Keras 3 model as parameters, trained through a service like in one process."""

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
from support.service import service

from tfps.client.adapters import adapter_of
from tfps.client.adapters.keras_model import KerasModel
from tfps.errors import ServiceError


def model() -> keras.Model:
    """Return a small model with a variable that is not trained."""
    made = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, name="dense"), keras.layers.BatchNormalization()])
    for index, variable in enumerate(made.variables):
        variable.assign(np.full(variable.shape, index + 1.0, np.float32))
    return made


def test_names_are_the_paths() -> None:
    """Of those that are trained."""
    found = KerasModel(model()).values()
    assert len(found) == 4
    assert [name for name in found if name.endswith("dense/kernel")]
    assert isinstance(adapter_of(model()), KerasModel)


def test_a_model_trains_through_a_service() -> None:
    """Each gets the values of the first, and an update is that of one process; averages stay its own."""
    with service(2, learning_rate=0.5) as running, running.client() as ps:
        first, other = model(), model()
        before = [value.copy() for value in KerasModel(first).values().values()]
        ps.init_module(first)
        for variable in other.variables:
            variable.assign(np.zeros(variable.shape, np.float32))
        names = dict(zip(KerasModel(other).values(), KerasModel(first).values(), strict=True))
        assert len(names) == 4
        inputs = np.arange(6, dtype=np.float32).reshape(2, 3)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first(inputs) ** 2)
        gradients = tape.gradient(loss, [variable.value for variable in first.trainable_variables])
        averages = [variable.numpy().copy() for variable in first.non_trainable_variables]
        assert ps.push_grads(first, gradients) == 1
        ps.pull_into(first)
        for old, gradient, new in zip(before, gradients, first.trainable_variables, strict=True):
            np.testing.assert_allclose(new.numpy(), old - 0.5 * gradient.numpy(), rtol=1e-6)
        for old, new in zip(averages, first.non_trainable_variables, strict=True):
            np.testing.assert_array_equal(new.numpy(), old)


@pytest.mark.parametrize("gradients", [None, [np.zeros(2)]])
def test_gradients_are_one_for_each_variable(gradients: object) -> None:
    """Else their number is in the error."""
    with pytest.raises(ServiceError, match="gradients: expected 4, one for each trainable variable, given"):
        KerasModel(model()).gradients(gradients)


def test_a_model_of_other_names_is_refused() -> None:
    """So is one that is not built yet, or of another shape; nothing is assigned then."""
    with service() as running, running.client() as ps:
        ps.init_module(model())
        other, unbuilt = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]), keras.Sequential()
        before = [variable.numpy() for variable in other.variables]
        with pytest.raises(ServiceError, match="is no parameter"):
            ps.pull_into(other)
        for old, variable in zip(before, other.variables, strict=True):
            np.testing.assert_array_equal(old, variable.numpy())
        with pytest.raises(ServiceError, match="build it before"):
            ps.pull_into(unbuilt)
        narrow = keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(1, name="dense"), keras.layers.BatchNormalization()]
        )
        with pytest.raises(ServiceError, match="the service has float32"):
            KerasModel(narrow).assign({one.path: np.zeros([9], np.float32) for one in narrow.trainable_variables})
        with pytest.raises(ServiceError, match="no variable has one"):
            ps.push_grads(model(), [None] * len(model().trainable_variables))


def test_averages_are_shared_if_asked_for() -> None:
    """As buffers: a push assigns them; the state of random numbers stays each model's own."""
    first = model()
    first.add(keras.layers.Dropout(0.5, seed=1))
    first.build([None, 3])
    averages = [one for one in first.non_trainable_variables if "moving" in one.path]
    assert set(KerasModel(first).buffers()) == {one.path for one in averages}
    with service(2) as running, running.client() as ps:
        ps.init_module(first, buffers=True)
        for one in averages:
            one.assign(np.full(one.shape, 9, np.float32))
        gradients = [np.zeros(one.shape, np.float32) for one in first.trainable_variables]
        ps.push_grads(first, gradients, buffers=True)
        found = ps.pull()
        assert all((found[one.path] == 9).all() for one in averages)
        averages[0].assign(np.zeros(averages[0].shape, np.float32))
        ps.pull_into(first)
        assert (np.asarray(averages[0]) == 9).all()
