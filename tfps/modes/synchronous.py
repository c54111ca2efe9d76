"""Synchronous training: an update is the mean of the gradients of all workers, computed at the same parameters.

The protocol of TensorFlow's ``SyncReplicasOptimizer`` (tensorflow/python/training/sync_replicas_optimizer.py; Chen et
al. 2016, "Revisiting Distributed Synchronous SGD"). The two sides, N workers:

1. A worker computes a gradient and puts it into an accumulator on the PS, stamped with the step it was computed at;
   an older stamp than the accumulator's is dropped.
2. The chief's background run takes N gradients as their mean, applies it once, raises ``global_step`` to g and puts a
   token of value g into each worker's queue.
3. The worker takes its token, whose value is the step that its next gradient counts for.

Three things differ from TensorFlow's, so that a mean is always one gradient of each worker, divided by N:

- There, tokens have no owner: a quick worker can take a slow one's, compute twice in one step, and make the mean one of
  its own gradients alone. Here each worker has a queue of its own.
- ``SparseConditionalAccumulator`` divides each row by the number of gradients it saw that row in, and merges rows only
  if their indices come sorted. Here it adds up, which is right in any order; what comes out is merged by row (an
  optimizer may take its norm), and the sum is divided by N.
- The stamp is kept on the PS, beside the tokens, and does not travel with every gradient.

A worker may be lost with its token, or with a part of its gradient sent, and the chief in the middle of an update. When
they begin together anew, in the next *era*, stamps go on from a higher base: what is still on its way from before is
dropped as stale, what has arrived is cleared, and every worker computes the gradient of the present step once more. A
PS may not know yet that a worker is lost, and still have its requests in line: they are given tokens and gradients of
zeros, and an update of another era than the PS's fails before it changes anything. An update begins on all PS or on
none: when each has all its means. From then on it needs nobody but the chief, which lets it end when all have broken
off. Only where the chief is lost in the middle of one (``torn``), the variables are of two steps, and of no use.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.cluster.resolver import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.base import Copy, Step, SyncRecovery

_BASE = 1 << 40  # more than there are steps
_NEVER_STALE = 1 << 62
_OVER = "the update is of an era that is over"


def build(optimizer: Any, loss: Any, global_step: Any, config: JobConfig, cluster: Cluster, task: Task) -> Step:
    """Build one synchronous step.

    Args:
        optimizer: ``tf.compat.v1.train.Optimizer``, which gets the mean gradient, and does not raise ``global_step``.
        loss: Scalar float tensor.
        global_step: int64 resource variable; counts the updates applied.
        config: The job; not used by this mode.
        cluster: Its number of workers is the number of gradients in a mean.
        task: The worker.

    Returns:
        The step; its tickets are the tokens, and no tokens are handed out in advance, so no gradient is stale at start.
    """
    del config
    with tf.device(global_step.device):
        base, stamp = _number("tfps/base"), _number(f"tfps/stamp_{task.index}")
        stamped = stamp.read_value()
    gradients = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    if not gradients:
        raise ValueError("No gradients provided for any variable: the loss depends on none.")
    names = _unlike([f"{variable.op.name}/mean" for _, variable in gradients])
    made = [
        _mean(gradient, variable, stamped, cluster.num_workers, name)
        for (gradient, variable), name in zip(gradients, names, strict=True)
    ]
    era = tf.placeholder(tf.int64, [], name="tfps/present_era")
    begun, eras, means = _beginning_as_one(made, era)
    with tf.device(global_step.device):
        queues = [_tokens(index) for index in range(cluster.num_workers)]
        applied = optimizer.apply_gradients([(mean.value, mean.variable) for mean in means], global_step)
        with tf.control_dependencies([applied]):
            update = global_step.assign_add(1, read_value=False)
        with tf.control_dependencies([update]):
            value = global_step.read_value()
            hand_out = tf.group(*(queue.enqueue(value) for queue in queues))
        pushed = [_number(f"tfps/pushed_{index}") for index in range(cluster.num_workers)]
        with tf.control_dependencies([mean.push for mean in means]):
            count = pushed[task.index].assign_add(1, read_value=False)
        with tf.control_dependencies([count]):
            token = queues[task.index].dequeue()
        taken = stamp.assign(token + base, read_value=False)
        worker_init = tf.group(
            stamp.assign(global_step + base, read_value=False),
            pushed[task.index].assign(global_step, read_value=False),
        )
        with tf.control_dependencies([base.assign(era * _BASE, read_value=False)]):
            first = base + global_step
        start = tf.group(
            *(known.assign(era, read_value=False) for known in eras),
            *(mean.accumulator.set_global_step(first) for mean in means),
            *(number.count.assign(global_step, read_value=False) for number in begun),
        )
        leftovers = SyncRecovery(
            era=era,
            counts=tf.stack(
                [tf.cast(mean.accumulator.num_accumulated(), tf.int64) for mean in means]
                + [tf.cast(queue.size(), tf.int64) for queue in queues]
            ),
            fill=[mean.fill for mean in means] + [queue.enqueue(global_step) for queue in queues],
            enough=cluster.num_workers,
            clear=[mean.drop for mean in means] + [queue.dequeue().op for queue in queues],
            torn=tf.reduce_any(tf.not_equal(tf.stack([number.count.read_value() for number in begun]), global_step)),
        )

    def draw(count: int, in_hand: int = 0) -> Any:
        return global_step.read_value() + tf.range(in_hand, in_hand + count, dtype=tf.int64)

    def draw_after(count: int, copy: Copy) -> Any:
        return copy(token) + tf.range(count, dtype=tf.int64)

    def give_back(count: int) -> Any:
        del count  # no mean can be made without this worker: closing is the only way to wake those that wait
        return tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in queues))

    return Step(
        train_op=taken,
        gate=(taken,),
        draw=draw,
        draw_after=draw_after,
        tells_step=False,
        chief_init=start,
        worker_init=worker_init,
        fence=None,
        update=hand_out,
        begins=[number.begin for number in begun],
        leftovers=leftovers,
        ahead=tf.stack([number.read_value() for number in pushed]) - global_step,
        staleness=None,
        give_back=give_back,
        any_can_finish=False,
        may_overlap=False,
        taken=None,
        moments=None,
        partial=None,
    )


def _number(name: str) -> Any:
    return tf.Variable(lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name=name)


def _tokens(index: int) -> Any:
    name = f"tfps/tokens_{index}"
    return tf.FIFOQueue(-1, tf.int64, shapes=[], name=name, shared_name=name)


@dataclass(frozen=True)
class _Mean:
    """A variable's accumulator, the operation that puts this worker's gradient in, and the mean that comes out.

    ``fill`` puts zeros in, ``drop`` takes out what is in it, if anything is.
    """

    variable: Any
    accumulator: Any
    push: Any
    value: Any
    fill: Any
    drop: Any


def _unlike(names: Sequence[str]) -> Sequence[str]:
    """Return names of which none is twice: a variable may have several gradients."""
    return [
        f"{name}_{names[:index].count(name)}" if name in names[:index] else name for index, name in enumerate(names)
    ]


def _mean(gradient: Any, variable: Any, stamp: Any, num_workers: int, name: str) -> _Mean:
    gradient = _summed_by_row(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
    make = _sparse_mean if isinstance(gradient, tf.IndexedSlices) else _dense_mean
    with tf.device(variable.device):
        return make(gradient, variable, stamp, num_workers, name)


def _dense_mean(gradient: Any, variable: Any, stamp: Any, num_workers: int, name: str) -> _Mean:
    wide = _wide(gradient.dtype)
    sums = tf.ConditionalAccumulator(wide, variable.shape, shared_name=name)
    zeros = tf.zeros_like(variable.read_value(), wide)
    return _Mean(
        variable=variable,
        accumulator=sums,
        push=sums.apply_grad(tf.cast(gradient, wide), stamp),
        value=tf.cast(sums.take_grad(num_workers), gradient.dtype),
        fill=sums.apply_grad(zeros, _NEVER_STALE),
        drop=sums.take_grad(1).op,
    )


def _sparse_mean(gradient: Any, variable: Any, stamp: Any, num_workers: int, name: str) -> _Mean:
    wide = _wide(gradient.dtype)
    sums = tf.SparseConditionalAccumulator(wide, shape=[], shared_name=name, reduction_type="SUM")
    total = _summed_by_row(sums.take_indexed_slices_grad(num_workers))
    mean = tf.cast(total.values / num_workers, gradient.dtype)
    zeros = tf.IndexedSlices(tf.zeros([1, *variable.shape[1:]], wide), tf.zeros([1], gradient.indices.dtype))
    return _Mean(
        variable=variable,
        accumulator=sums,
        push=sums.apply_indexed_slices_grad(tf.IndexedSlices(tf.cast(gradient.values, wide), gradient.indices), stamp),
        value=tf.IndexedSlices(mean, total.indices, tf.constant(variable.shape.as_list(), tf.int64)),
        fill=sums.apply_indexed_slices_grad(zeros, _NEVER_STALE),
        drop=sums.take_indexed_slices_grad(1).indices.op,
    )


def _wide(dtype: Any) -> Any:
    """Return the type in which gradients are summed: numbers of 16 bits may be finite, and their sum not."""
    return dtype if dtype.size > 2 else tf.float32


@dataclass(frozen=True)
class _Begun:
    """How many updates have begun on a PS, a variable, and the operation with which one begins."""

    count: Any
    begin: Any


def _beginning_as_one(means: Sequence[_Mean], era: Any) -> tuple[Sequence[_Begun], Sequence[Any], Sequence[_Mean]]:
    """Let an update begin on all PS or on none: when each has all its means, and in the era that it is in.

    Each PS tells each other when it has them, so that nothing waits for more than one message of each.

    Returns:
        By PS, how many updates have begun and a variable of its era; the means of an update that has begun.
    """
    devices = sorted({mean.variable.device for mean in means})
    by_ps = {device: [mean for mean in means if mean.variable.device == device] for device in devices}
    counters: list[_Begun] = []
    eras: list[Any] = []
    there: list[Any] = []
    begun: list[_Mean] = []
    for device, own in by_ps.items():
        with tf.device(device):
            eras.append(_number(f"tfps/begun_in_era_{len(eras)}"))
            with tf.control_dependencies([_numbers(mean.value) for mean in own]):
                present = tf.equal(eras[-1].read_value(), era)
            there.append(tf.raw_ops.Assert(condition=present, data=[_OVER]))
    for device, own in by_ps.items():
        with tf.device(device):
            count = _number(f"tfps/begun_{len(counters)}")
            with tf.control_dependencies(there):
                counters.append(_Begun(count, count.assign_add(1, read_value=False)))
            with tf.control_dependencies([counters[-1].begin]):
                begun += [dataclasses.replace(mean, value=_same(mean.value)) for mean in own]
    return counters, eras, begun


def _numbers(mean: Any) -> Any:
    return mean.values if isinstance(mean, tf.IndexedSlices) else mean


def _same(mean: Any) -> Any:
    if isinstance(mean, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(mean.values), tf.identity(mean.indices), mean.dense_shape)
    return tf.identity(mean)


def _summed_by_row(gradient: Any) -> Any:
    """Return a sparse gradient with each row once."""
    rows, place = tf.unique(gradient.indices)
    sums = tf.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)
