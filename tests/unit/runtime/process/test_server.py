"""The start of a task's TensorFlow server."""

from unittest import mock

import pytest
from support.listeners import address_of, listener

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

from tfps.runtime.process import server  # noqa: E402

REFUSED = tf.errors.UnknownError(None, None, "Could not start gRPC server")


def refusal(address: str) -> str:
    """Return the error of a worker whose server TensorFlow cannot start; in a process of a test none is started."""
    cluster = Cluster(("127.0.0.1:1",), (address,))
    with mock.patch.object(tf.train, "Server", side_effect=REFUSED), pytest.raises(ConfigError) as caught:
        server.start(JobConfig(), cluster, Task("worker", 0))
    return str(caught.value)


def test_a_port_in_use_is_named() -> None:
    """TensorFlow says only that it could not start: if something listens on the port, that is the reason."""
    with listener() as taken:
        address = address_of(taken)
        reported = f"--worker_hosts: cannot listen on {address}: the port is in use. If another task has the port,"
        assert refusal(address).startswith(reported)
    assert "cannot listen on 127.0.0.1:1: Could not start gRPC server. If" in refusal("127.0.0.1:1")
