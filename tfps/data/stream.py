"""The batches of ``Examples`` for one worker.

Where the batches of a worker come from:

1. Without ``--data_policy``, and with ``shard``: from the worker's own share, epoch after epoch.
2. With ``dynamic``, in a mode whose workers train in step: each update has the next examples of the whole sequence, in
   equal parts (``epochs.Turns``).
3. With ``dynamic`` in another mode: from shards that the PS deals (``dealer``). The worker puts them into the stream
   between its runs of steps (``hand``), always a few batches ahead of the pipeline.

With ``--epochs`` the first two end. ``position`` has the position in the data.
"""

import itertools
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.data.epochs import ENDLESS, Epochs, Turns
from tfps.data.examples import Examples
from tfps.data.order import PARTITIONS, Indices, Order
from tfps.errors import ModelError
from tfps.text import kind_of
from tfps.tf_types import Dataset, Operation, Tensor

PREFETCHED = 4
_CHUNK = 64  # batches for which TensorFlow calls Python once
_LOOK_SECS = 0.05  # a thread of TensorFlow's waits so long for a batch, and then lets others go first


def of(
    given: Any, mode: str, params: Mapping[str, Any], workers: int, worker: int, where: str, in_step: bool = False
) -> Any:
    """Return a dataset of ``((features, labels), indices)`` for ``Examples``; return anything else as it is.

    Args:
        given: What ``input_fn`` returned.
        mode: For what: ``train`` or another mode.
        params: The flags of the job.
        workers: The number of workers.
        worker: The index of this one.
        where: The model and the place of its ``input_fn``, for messages.
        in_step: Whether each update has a batch of each worker.

    Raises:
        DataError: If a worker would have no example.
        ModelError: If a flag asks for what only ``Examples``, or those with classes, can do.
    """
    if isinstance(given, Examples) and mode == "train":
        dataset = _stream(given, params, workers, worker, in_step, where).dataset()
        batch = tf.data.get_output_types(dataset)[0]
        if not (isinstance(batch, tuple) and len(batch) == 2):
            raise ModelError(f"{where}: read of tfps.Examples returned {batch}; it must return (features, labels).")
        return dataset
    if isinstance(given, Examples):
        raise ModelError(f"{where}: tfps.Examples are for training: return a tf.data.Dataset or None for {mode!r}.")
    asked = [name for name in ("data_policy", "partition", "local_epochs") if mode == "train" and params.get(name)]
    if asked:
        raise ModelError(
            f"{where}: --{asked[0]}={params[asked[0]]}: tfps cannot divide {kind_of(given)}: return "
            "tfps.Examples(size, read) for training (`tfps help models`), or leave the flag out."
        )
    return given


def _stream(
    examples: Examples, params: Mapping[str, Any], workers: int, worker: int, in_step: bool, where: str
) -> "Stream":
    """Return the stream of a worker; a ``ModelError`` names the place of the model's ``input_fn``."""
    try:
        return Stream(examples, params, workers, worker, in_step)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None


class Stream:
    """The batches of one worker.

    Args:
        examples: The examples.
        params: The flags of the job.
        workers: The number of workers.
        worker: The index of this one.
        in_step: Whether each update has a batch of each worker.

    Attributes:
        size: The number of examples.
        batch_size: How many examples a step has, on all devices of the worker.
        is_dealt: Whether the batches are put in while the worker trains.
    """

    def __init__(
        self, examples: Examples, params: Mapping[str, Any], workers: int, worker: int, in_step: bool = False
    ) -> None:
        self.size, self._examples, self._workers, self._worker = examples.size, examples, workers, worker
        self.batch_size: int = params["batch_size"]
        is_dynamic = params["data_policy"] == "dynamic"
        self._takes_turns, self.is_dealt = is_dynamic and in_step, is_dynamic and not in_step
        self._epochs: int | None = params["epochs"] if params["data_policy"] else None
        self._order = self.order(params["seed"], 1 if is_dynamic else workers, params["partition"] or PARTITIONS[0])
        self._counts: Indices = np.zeros(self.size, np.int64)
        self._put: deque[Indices] = deque()
        self._has_more = threading.Condition()

    def order(self, seed: int, workers: int, partition: str) -> Order:
        """Return the order of these examples in a run of some kind."""
        return Order(self._examples, seed, workers, partition)

    def begin_at(self, counts: Indices) -> None:
        """Let the dataset begin at a position when its iterator is initialized next."""
        self._counts = counts
        self._begin()

    def sequence(self, counts: Indices) -> Epochs:
        """Return all examples of a job with ``dynamic`` from a position on."""
        return Epochs(self._order, 0, counts, self._epochs)

    def batches(self) -> int:
        """Return the number of batches from the position on; ``ENDLESS`` if it does not end, or may get more."""
        if self.is_dealt:
            return ENDLESS
        if self._takes_turns:
            return self._turns.updates
        return ENDLESS if self._share.length == ENDLESS else -(-self._share.length // self.batch_size)

    def share_sizes(self) -> list[int] | None:
        """Return, by worker, how many examples its share has; ``None`` where there are no shares."""
        has_shares = not (self._takes_turns or self.is_dealt)
        return [len(share) for share in self._order.shares] if has_shares else None

    def put(self, ids: Indices) -> None:
        """Add a batch to a stream that is dealt."""
        with self._has_more:
            self._put.append(ids)
            self._has_more.notify()

    def dataset(self, devices: int = 1) -> Dataset:
        """Return a dataset of ``((features, labels), indices)``.

        For several devices, ``(features, labels)`` is instead a tuple of those of each, and weights: float64 [devices];
        see ``towers.batches`` of the training graph. All batches are full, unless there is an end.
        """
        self.batch_size *= devices
        self._begin()

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def read(indices: Tensor) -> Any:
            return self._read(indices) if devices == 1 else self._read_for(devices, indices)

        dataset = self._indices().map(read).prefetch(PREFETCHED)
        dataset.tfps_stream = self
        return dataset

    def _begin(self) -> None:
        if self._takes_turns:
            self._turns = Turns(self.sequence(self._counts), self._workers, self.batch_size)
        elif not self.is_dealt:
            self._share = Epochs(self._order, self._worker, self._counts, self._epochs)

    def _indices(self) -> Dataset:
        """Return a dataset of the indices of each step's examples."""
        by_batch = self.is_dealt or (self._takes_turns and self._epochs is not None)
        act = self._next_put if self.is_dealt else (self._batch if by_batch else self._chunk)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def call(number: Tensor) -> Tensor:
            return tf.ensure_shape(tf.numpy_function(act, [number], tf.int64), [None])

        made = tf.data.Dataset.range(ENDLESS).map(call)
        if self.is_dealt:
            made = made.filter(tf.autograph.experimental.do_not_convert(lambda ids: tf.size(ids) > 0))
        elif self._epochs is not None:
            made = made.take_while(tf.autograph.experimental.do_not_convert(lambda ids: tf.size(ids) > 0))
        is_endless, size = self._epochs is None, self.batch_size
        if not by_batch:
            return made.rebatch(size, drop_remainder=is_endless)
        return made.map(lambda ids: tf.ensure_shape(ids, [size])) if is_endless else made

    def _chunk(self, number: int) -> Indices:
        """Return several batches of the worker, one after another."""
        if self._takes_turns:
            each = range(int(number) * _CHUNK, (int(number) + 1) * _CHUNK)
            return np.concatenate([self._turns.batch(self._worker, update) for update in each])
        size = _CHUNK * self.batch_size
        return self._share.part(int(number) * size, (int(number) + 1) * size)[0]

    def _batch(self, number: int) -> Indices:
        return self._turns.batch(self._worker, int(number))

    def _next_put(self, number: int) -> Indices:
        """Return the next batch that was put in; an empty one if there is none yet: TensorFlow asks again."""
        del number
        with self._has_more:
            self._has_more.wait_for(lambda: len(self._put) > 0, _LOOK_SECS)
            return self._put.popleft() if self._put else np.zeros(0, np.int64)

    def _read(self, indices: Tensor) -> Any:
        """Return the batch of some indices, and the indices."""
        found = self._examples.read(indices)
        with tf.control_dependencies(_size_checks(found, indices)):
            return found, tf.identity(indices)

    def _read_for(self, devices: int, indices: Tensor) -> Any:
        """Return the batch of each device with the weights, and the indices.

        A device without examples stands in with the batch of the first.
        """
        size = tf.size(indices)
        cuts = [-(-size * number // devices) for number in range(devices + 1)]
        found, weights, checked = [], [], []
        for begin, end in itertools.pairwise(cuts):
            is_empty = tf.equal(begin, end)
            own = indices[tf.where(is_empty, 0, begin) : tf.where(is_empty, cuts[1], end)]
            batch, ids = self._read(
                tf.ensure_shape(own, [self.batch_size // devices if self._epochs is None else None])
            )
            found.append(batch)
            checked.append(ids)
            weights.append(tf.cast(~is_empty, tf.float64))
        with tf.control_dependencies(checked):
            return (*found, tf.stack(weights)), tf.identity(indices)


def _size_checks(found: Any, indices: Tensor) -> list[Operation]:
    """Return operations that fail if a batch does not have as many examples as there are indices."""
    parts = [part for part in tf.nest.flatten(found) if isinstance(part, tf.Tensor) and part.shape.rank]
    message = "read of tfps.Examples must return one example for each index"
    return [tf.debugging.assert_equal(tf.shape(part)[0], tf.size(indices), message=message) for part in parts[-1:]]
