"""Asynchronous training: each worker's gradient is applied as it comes, to whatever the parameters are by then.

No worker waits for another. A gradient was computed at parameters that other workers may have changed since (it is
*stale*), and k gradients make k updates: the sum, one by one. Downpour SGD, Dean et al. 2012, section 4.1.

To end after exactly ``max_steps`` updates, workers draw numbered tickets from a counter beside ``global_step``;
``ResourceCountUpTo`` hands out each number once (tensorflow/core/kernels/count_up_to_op.cc). The next ticket is
drawn in the run of the present step, so it costs no extra round trip.
"""

from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster
from tfps.config import INT64_MAX, JobConfig
from tfps.modes.step import Step


def build(optimizer: Any, loss: Any, global_step: Any, config: JobConfig, cluster: Cluster) -> Step:
    """Build one asynchronous step.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer``.
        loss: Scalar float tensor.
        global_step: int64 resource variable; counts the updates applied.
        config: The job; not used by this mode.
        cluster: The cluster; not used by this mode.

    Returns:
        The step; its tickets number the job's updates from 0.
    """
    del config, cluster
    train_op = optimizer.minimize(loss, global_step=global_step)
    with tf.device(global_step.device):
        counter = tf.Variable(
            0, dtype=tf.int64, trainable=False, collections=[], use_resource=True, name="tfps/tickets"
        )
        draw_first = _draw(counter)
        with tf.control_dependencies([train_op]):  # a step that fails has drawn nothing
            draw_next = _draw(counter)
        return Step(
            train_op=train_op,
            first_ticket=draw_first,
            next_ticket=draw_next,
            chief_init=counter.assign(global_step, read_value=False),
            worker_init=tf.no_op(),
            queue_runners=(),
            redraw=None,
            give_back=counter.assign_sub(1, read_value=False),
            chief_can_finish=True,
        )


def _draw(counter: Any) -> Any:
    return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=INT64_MAX, T=tf.int64)
