"""Synchronous training: an update is the mean of the gradients of all workers, computed at the same parameters.

The protocol of TensorFlow's ``SyncReplicasOptimizer`` (tensorflow/python/training/sync_replicas_optimizer.py; Chen et
al. 2016, "Revisiting Distributed Synchronous SGD"). The two sides, N workers:

1. A worker computes a gradient and puts it into an accumulator on the PS, stamped with the step it was computed at;
   an older stamp than the accumulator's is dropped.
2. The chief's queue runner takes N gradients as their mean, applies it once, raises ``global_step`` to g and puts
   N tokens of value g into a queue.
3. The worker takes a token; its value is the step that its next gradient counts for.

Two things differ from TensorFlow's, so that a mean is always one gradient of each worker, divided by N:

- Tokens have no owner: a quick worker can take a slow one's, compute twice in one step, and make the mean one of its
  own gradients alone. Here it puts such a token back and draws again.
- ``SparseConditionalAccumulator`` divides each row by the number of gradients it saw that row in, and merges rows only
  if their indices come sorted. Here it adds up, which is right in any order, and the sum is divided by N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    local_step = tf.Variable(
        0,
        dtype=tf.int64,
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
        use_resource=True,
        name="tfps/local_step",
    )
    stamp = local_step.read_value()
    gradients = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not gradients:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    means = [_mean(gradient, variable, stamp, cluster.num_workers) for gradient, variable in gradients]
    with tf.device(global_step.device):
        queue = tf.FIFOQueue(-1, tf.int64, shapes=[], name="tfps/tokens", shared_name="tfps/tokens")
        update = optimizer.apply_gradients([(mean.value, mean.variable) for mean in means], global_step)
        with tf.control_dependencies([update]):
            hand_out = queue.enqueue_many([tf.fill([cluster.num_workers], global_step.read_value())])
        draw = _draw(queue, local_step, [mean.push for mean in means])
        redraw = _draw(queue, local_step, [queue.enqueue(stamp)])
        start = tf.group(*(mean.accumulator.set_global_step(global_step.read_value()) for mean in means))
    return Step(
        train_op=draw.op,
        first_ticket=global_step.read_value(),
        next_ticket=draw,
        chief_init=start,
        worker_init=local_step.assign(global_step.read_value(), read_value=False),
        queue_runners=(tf.train.QueueRunner(queue, [hand_out]),),
        redraw=redraw,
        give_back=queue.close(cancel_pending_enqueues=True),  # the only way to wake workers that wait for a token
        chief_can_finish=False,
    )


@dataclass(frozen=True)
class _Mean:
    """A variable's accumulator, the operation that puts this worker's gradient in, and the mean that comes out."""

    variable: Any
    accumulator: Any
    push: Any
    value: Any


def _mean(gradient: Any, variable: Any, stamp: Any, num_workers: int) -> _Mean:
    name = f"{variable.op.name}/mean"
    with tf.device(variable.device):
        if not isinstance(gradient, tf.IndexedSlices):
            dense = tf.ConditionalAccumulator(gradient.dtype, variable.shape, shared_name=name)
            return _Mean(variable, dense, dense.apply_grad(gradient, stamp), dense.take_grad(num_workers))
        sparse = tf.SparseConditionalAccumulator(gradient.dtype, shape=[], shared_name=name, reduction_type="SUM")
        total = sparse.take_indexed_slices_grad(num_workers)
        share = tf.IndexedSlices(total.values / num_workers, total.indices, total.dense_shape)
        return _Mean(variable, sparse, sparse.apply_indexed_slices_grad(gradient, stamp), share)


def _draw(queue: Any, local_step: Any, after: Sequence[Any]) -> Any:
    """Return a token drawn after some operations ran, as the worker's new local step."""
    with tf.control_dependencies(after):
        token = queue.dequeue()
    return local_step.assign(token)
