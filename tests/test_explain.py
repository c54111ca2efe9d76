"""What an error of a run is taken for."""

import pytest
import tensorflow.compat.v1 as tf
from cluster_in_process import linear, model_of, shared_servers, target_of

from tfps.cluster import Task
from tfps.errors import ModelError
from tfps.runtime import explain, finite


def test_an_error_says_nothing_of_those_before_it() -> None:
    """TensorFlow would append what it logged of them: a lost PS or a model's mistake after a NaN would be a NaN."""
    model = model_of(lambda *_: None, linear)
    with shared_servers(), tf.Graph().as_default() as graph:
        nan = tf.debugging.check_numerics(tf.placeholder_with_default(float("nan"), []), "the loss")
        broken = tf.strings.to_number(tf.placeholder_with_default("no number", []))
        with tf.Session(target_of(Task("worker", 0)), graph=graph) as session:
            with pytest.raises(tf.errors.InvalidArgumentError, match="the loss"):
                session.run([nan, tf.no_op()])
            with pytest.raises(tf.errors.InvalidArgumentError) as wrong:
                session.run([broken, tf.no_op()])
    assert "the loss" not in wrong.value.message
    assert finite.complaint(wrong.value) is None
    error = explain.failed(wrong.value, model, graph, 1)
    assert isinstance(error, ModelError), error
    assert "no number" in str(error)
