"""The flags that a model reads, and those that it was given and does not."""

import logging
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models.params import unread_flags
from tfps.runtime.graph import builder

CLUSTER = Cluster(("ps:1",), ("worker:1",))  # of which nothing is started


def test_a_flag_is_unread_if_it_is_given_and_not_read() -> None:
    """A default is not given."""
    given = JobConfig(batch_size=256, data_dir="/data")
    assert unread_flags(given, {"seed"}) == ["--batch_size=256", "--data_dir=/data"]
    assert unread_flags(given, {"batch_size", "data_dir"}) == []
    assert unread_flags(JobConfig(), set()) == []


@pytest.mark.parametrize("reader", ["input_fn", "model_fn", "nobody", "a copy"])
def test_a_flag_of_the_data_that_no_function_reads_is_reported(reader: str, caplog: pytest.LogCaptureFixture) -> None:
    """Either function may read it, or take all flags; else a line of the chief says so."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        size = params["batch_size"] if reader == "input_fn" else dict(params)["batch_size"] if reader == "a copy" else 8
        return dataset_of(np.float32([1])).repeat().batch(size)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        scale = 1.0 / params["batch_size"] if reader == "model_fn" else 1.0
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = scale * weight * tf.reduce_sum(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1))

    with caplog.at_level(logging.WARNING):
        builder.training(JobConfig(batch_size=256), CLUSTER, Task("worker", 0), model_of(input_fn, model_fn))
    said = [text for text in caplog.messages if text.startswith("--batch_size=256: --model=")]
    assert len(said) == (reader == "nobody")
