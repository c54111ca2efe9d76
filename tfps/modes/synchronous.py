"""Synchronous training: an update is the mean of the gradients of all workers, computed at the same parameters.

TensorFlow's own ``SyncReplicasOptimizer`` (tensorflow/python/training/sync_replicas_optimizer.py; Chen et al. 2016,
"Revisiting Distributed Synchronous SGD"). The two sides, N workers:

1. A worker computes a gradient and puts it into an accumulator on the PS, stamped with the step it was computed at;
   an older stamp than the accumulator's is dropped.
2. The chief's queue runner takes N gradients as their mean, applies it once, raises ``global_step`` to g and puts
   N tokens of value g into a queue.
3. The worker takes a token; its value is the step that its next gradient counts for.

Tokens have no owner: a quick worker can take a slow one's, compute twice in one step, and make the mean one of its own
gradients alone. Here it puts such a token back and draws again, so a mean is always one gradient of each worker.
"""

from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster import Cluster
from tfps.config import JobConfig
from tfps.modes.step import Step


def build(optimizer: Any, loss: Any, global_step: Any, config: JobConfig, cluster: Cluster) -> Step:
    """Build one synchronous step.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer``, which gets the mean gradient.
        loss: Scalar float tensor.
        global_step: int64 resource variable; counts the updates applied.
        config: The job; not used by this mode.
        cluster: Its number of workers is the number of gradients in a mean.

    Returns:
        The step; its tickets are the tokens, and no tokens are handed out in advance, so no gradient is stale at start.
    """
    del config
    sync = tf.train.SyncReplicasOptimizer(optimizer, cluster.num_workers, cluster.num_workers)
    token = sync.minimize(loss, global_step=global_step)
    # Neither has a public name. Closing the queue is the only way to wake workers that wait for a token.
    queue, local_step = sync._sync_token_queue, sync._local_step
    with tf.device(global_step.device), tf.control_dependencies([queue.enqueue(local_step.read_value())]):
        redraw = local_step.assign(queue.dequeue())
    return Step(
        train_op=token.op,
        first_ticket=global_step.read_value(),
        next_ticket=token,
        chief_init=sync.chief_init_op,
        worker_init=sync.local_step_init_op,
        queue_runners=(sync.get_chief_queue_runner(),),
        redraw=redraw,
        give_back=queue.close(cancel_pending_enqueues=True),
        chief_can_finish=False,
    )
