"""The batches of ``Examples`` for one worker, and the position of the job in them.

``order`` says what a position is. An example counts as read when its gradient is in the parameters. The position is
a variable on the PS, and is saved with the others::

    [workers, batch size, seed, partition, step, count of example 0, count of example 1, ...]

How it follows the parameters depends on the mode:

1. Where each worker applies its own gradients (async, ssp), the update adds 1 to the counts of its batch, under the
   lock of the update. So a checkpoint has both or neither. ``workers`` is 0: the counts are what they say.
2. Where one update has one batch of each worker (sync), the step tells the position. The counts are those at ``step``,
   when the run began, and each update since has taken one batch of each worker.

A worker looks up the position when it starts. What a lost pipeline had read ahead is read again. Where a worker of sync
is lost, the job restarts from its checkpoint: an input cannot go back in the same process.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.data.examples import Examples
from tfps.data.order import PARTITIONS, Indices, Order
from tfps.errors import ConfigError, ModelError
from tfps.tf_types import Dataset, Operation, Session, Tensor, Variable

NAME = "tfps/examples"
_HEAD = 5
_FOR_EVER = np.iinfo(np.int64).max
_PREFETCHED = 4


def of(given: Any, mode: str, params: Mapping[str, Any], workers: int, worker: int, where: str) -> Any:
    """Return a dataset of ``((features, labels), indices)`` for ``Examples``; return anything else as it is.

    Args:
        given: What ``input_fn`` returned.
        mode: For what: ``train`` or another mode.
        params: The flags of the job.
        workers: The number of workers.
        worker: The index of this one.
        where: The model and the place of its ``input_fn``, for messages.

    Raises:
        DataError: If a worker would have no example.
        ModelError: If a flag asks for what only ``Examples`` can do.
    """
    if isinstance(given, Examples) and mode == "train":
        dataset = Stream(given, params, workers, worker).dataset()
        batch = tf.data.get_output_types(dataset)[0]
        if not (isinstance(batch, tuple) and len(batch) == 2):
            raise ModelError(f"{where}: read of tfps.Examples returned {batch}; it must return (features, labels).")
        return dataset
    if isinstance(given, Examples):
        raise ModelError(f"{where}: tfps.Examples are for training: return a tf.data.Dataset or None for {mode!r}.")
    asked = [name for name in ("data_policy", "partition") if params[name]] if mode == "train" else []
    if asked:
        raise ModelError(
            f"{where}: --{asked[0]}={params[asked[0]]}: tfps cannot divide the {type(given).__name__}: return "
            "tfps.Examples(size, read) for training (`tfps help models`), or leave the flag out."
        )
    return given


class Stream:
    """The endless batches of one worker.

    Args:
        examples: The examples.
        params: The flags of the job.
        workers: The number of workers.
        worker: The index of this one.
    """

    def __init__(self, examples: Examples, params: Mapping[str, Any], workers: int, worker: int) -> None:
        self.size, self._examples, self._worker = examples.size, examples, worker
        self._batch_size: int = params["batch_size"]
        self._order = self.order(params["seed"], workers, params["partition"] or PARTITIONS[0])
        self._counts: Indices = np.zeros(self.size, np.int64)

    def order(self, seed: int, workers: int, partition: str) -> Order:
        """Return the order of these examples in a run of some kind."""
        return Order(self._examples, seed, workers, partition)

    def begin_at(self, counts: Indices) -> None:
        """Let the dataset begin at a position when its iterator is initialized next."""
        self._counts = counts

    def dataset(self) -> Dataset:
        """Return a dataset of ``((features, labels), indices)``, all batches full. It never ends."""

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def ordered(number: Tensor) -> Tensor:
            return tf.ensure_shape(tf.numpy_function(self._epoch, [number], tf.int64), [None])

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def read(indices: Tensor) -> Any:
            found = self._examples.read(indices)
            with tf.control_dependencies(_size_checks(found, indices)):
                return found, tf.identity(indices)

        epochs = tf.data.Dataset.range(_FOR_EVER).map(ordered)
        batches = epochs.rebatch(self._batch_size, drop_remainder=True)
        dataset = batches.map(read).prefetch(_PREFETCHED)
        dataset.tfps_stream = self
        return dataset

    def _epoch(self, number: int) -> Indices:
        """Return what the worker reads in the n-th epoch from its position on."""
        first = self._order.first_epoch(self._worker, self._counts)
        return self._order.rest(self._worker, self._counts, first + int(number))


def _size_checks(found: Any, indices: Tensor) -> list[Operation]:
    """Return operations that fail if a batch does not have as many examples as there are indices."""
    parts = [part for part in tf.nest.flatten(found) if isinstance(part, tf.Tensor) and part.shape.rank]
    message = "read of tfps.Examples must return one example for each index"
    return [tf.debugging.assert_equal(tf.shape(part)[0], tf.size(indices), message=message) for part in parts[-1:]]


class Position:
    """The position of a job in its examples, in the graph of one worker.

    Args:
        stream: The worker's batches.
        indices: The examples of a step's batch: int64 [batch].
        global_step: int64 resource variable.
        config: The job.
        workers: The number of workers.
        by_step: Whether an update has one batch of each worker, so that the step tells the position.
    """

    def __init__(
        self, stream: Stream, indices: Tensor, global_step: Variable, config: JobConfig, workers: int, by_step: bool
    ) -> None:
        self._stream, self._indices, self._step = stream, indices, global_step
        kind = PARTITIONS.index(config.partition or PARTITIONS[0])
        self._own = [workers if by_step else 0, config.batch_size, config.seed, kind]
        with tf.device(global_step.device):
            self._variable = tf.Variable(
                lambda: tf.zeros([_HEAD + stream.size], tf.int64), trainable=False, use_resource=True, name=NAME
            )
            self._value = tf.placeholder(tf.int64, [_HEAD + stream.size], "tfps/examples_now")
            self._assign = self._variable.assign(self._value, read_value=False)
            self._now = self._variable.read_value(), global_step.read_value()

    def counted(self) -> Operation | None:
        """Add an operation to an update that counts its batch, and return it; ``None`` where the step tells."""
        if self._own[0]:
            return None
        with tf.device(self._variable.device):
            places = tf.identity(self._indices) + _HEAD
            return self._variable.scatter_add(tf.IndexedSlices(tf.ones_like(places), places)).op

    def begin(self, session: Session) -> None:
        """Make the position of the variables that of a run that starts now; the chief does it before all others."""
        value, step = session.run(self._now)
        counts = self._counts(value, int(step))
        session.run(self._assign, {self._value: np.concatenate([[*self._own, step], counts])})

    def find(self, session: Session) -> None:
        """Let the worker's input begin at the present position, when it is initialized next.

        Raises:
            ConfigError: If the step tells the position, and workers differ in their batch size.
        """
        value, step = session.run(self._now)
        if self._own[0] and value[1] != self._own[1]:
            raise ConfigError(
                f"--batch_size={self._own[1]}: the chief has {value[1]}, and with --data_policy in --mode=sync all "
                "workers must have the same: give it to all."
            )
        self._stream.begin_at(self._counts(value, int(step)))

    def _counts(self, value: Indices, step: int) -> Indices:
        """Return how often each example has been read by the updates in the variables."""
        workers, batch_size, seed, kind, first = map(int, value[:_HEAD])
        if not workers:
            return value[_HEAD:]
        order = self._stream.order(seed, workers, PARTITIONS[kind])
        return order.advanced(value[_HEAD:], (step - first) * batch_size)
