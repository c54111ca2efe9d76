"""Start this task's TensorFlow server."""

import logging
import os
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import ports, rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.devices import requested
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.modes.registry import mode_of
from tfps.runtime.process import request_ids, tcp_timeout, tf_rendezvous, thread_count

log = logging.getLogger(__name__)


def start(config: JobConfig, cluster: Cluster, task: Task) -> Any:
    """Start the ``tf.train.Server`` of a task; it ends with the process.

    Raises:
        ConfigError: If TensorFlow cannot start it.
    """
    rendezvous.bypass_proxies(os.environ, cluster)
    intra, inter = thread_count.pool_sizes(cluster, task, overlap=mode_of(config).can_overlap)
    tcp_timeout.allow_many()
    tcp_timeout.start()
    tf_rendezvous.keep_freeing()
    request_ids.make_unique()
    if task in cluster.state_tasks:
        tcp_timeout.follow_names(cluster.workers)
    log.debug("threads: %s intra-op, %s inter-op", intra or "TensorFlow's", inter or "TensorFlow's")
    options = tf.ConfigProto(
        allow_soft_placement=True, intra_op_parallelism_threads=intra, inter_op_parallelism_threads=inter
    )
    options.gpu_options.allow_growth = True
    asked = requested(config.devices_per_worker)
    if task.job == "worker" and asked.kind == "CPU" and asked.count:
        options.device_count["CPU"] = asked.count
    try:
        return tf.train.Server(
            tf.train.ClusterSpec(cluster.spec()), job_name=task.job, task_index=task.index, config=options
        )
    except tf.errors.OpError as error:
        address = cluster.address(task)
        why = "the port is in use" if ports.answers(address) else error.message
        raise ConfigError(
            f"--{task.job}_hosts: cannot listen on {address}: {why}. If another task has the port, perhaps with "
            "another order of hosts, end that task or give another port."
        ) from None
