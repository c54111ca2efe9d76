"""An iterator that survives the steps and sessions that use it.

TensorFlow's iterator does not. A step that is cancelled while it waits for an element cancels the iterator permanently,
which then reports its end (``IteratorResource::GetNext`` in tensorflow/core/kernels/data/iterator_ops.cc). A
multi-device iterator gets its elements in a background thread, some in advance, and a cancelled step only stops waiting
(``MultiDeviceIterator`` in tensorflow/core/kernels/data/multi_device_iterator_ops.cc). Here it has one device.
"""

import re
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.data.ops.prefetch_op import _PrefetchDataset
from tensorflow.python.data.util import structure

from tfps.data.position import Position
from tfps.data.stream import Stream
from tfps.tf_types import Dataset, Nested, Tensor

INPUTS = ("IteratorGetNext", "MultiDeviceIteratorGetNextFromShard")  # operations that return a batch
_END = re.compile("End of sequence|is closed and has insufficient elements")  # of a dataset, of a queue
_NAME, _INCARNATION = "tfps/input", "tfps/incarnation"
_AUTOMATIC = 4  # instead of tf.data.AUTOTUNE or an unset size


class CancelSafeIterator:
    """Iterates over a task's training input. Create and use it on the device of the dataset.

    Do not use it in a session without a server. Closing that session hangs if a function of the dataset has been used,
    as of 2.21. ``DynamicDeviceMgr`` in tensorflow/core/common_runtime holds its lock while it deletes the iterator,
    which asks it for a device.

    Args:
        dataset: ``tf.data.Dataset``.

    Attributes:
        initializer: Operation that starts at the first element of the dataset.
        resource: The iterator resource.
        stream: Where tfps makes the batches of a model's ``Examples``: its ``data.stream.Stream``.
        indices: Likewise, the examples of the next batch: int64 [batch].
        position: The position of the job in them, with ``--data_policy``.
    """

    stream: Stream | None = None
    indices: Tensor = None
    position: Position | None = None

    def __init__(self, dataset: Dataset) -> None:
        self._spec, self._flat = dataset.element_spec, dataset._flat_structure
        self.resource = tf.raw_ops.MultiDeviceIterator(
            devices=["/cpu:0"], shared_name=_NAME, container="", **self._flat
        )
        source, ahead = _without_prefetch(dataset)
        incarnation = tf.raw_ops.MultiDeviceIteratorInit(
            dataset=source._apply_debug_options()._variant_tensor,
            multi_device_iterator=self.resource,
            max_buffer_size=ahead,
        )
        self._incarnation = tf.Variable(
            lambda: tf.zeros([], tf.int64), trainable=False, collections=[], use_resource=True, name=_INCARNATION
        )
        self.initializer = self._incarnation.assign(incarnation, read_value=False)

    def get_next(self) -> Nested:
        """Return the next element.

        At run time, it raises ``tf.errors.OutOfRangeError`` if there is none.
        """
        tensors = tf.raw_ops.MultiDeviceIteratorGetNextFromShard(
            multi_device_iterator=self.resource,
            shard_num=0,
            incarnation_id=self._incarnation.read_value(),
            **self._flat,
        )
        return structure.from_tensor_list(self._spec, tensors)


def is_end(error: Any) -> bool:
    """Return whether an error is the end of an input, and not that of a generator read by a model's Python function."""
    return isinstance(error, tf.errors.OutOfRangeError) and _END.search(error.message) is not None


def is_of_another(error: Any) -> bool:
    """Return whether an end comes from another worker's input, which closed a queue between the workers."""
    return is_end(error) and "End of sequence" not in error.message


def _without_prefetch(dataset: Dataset) -> tuple[Dataset, Tensor]:
    """Return a dataset without the ``prefetch`` at its end, and the number of elements to keep ready instead: int64.

    Two threads that pass each element on cost a short step (``tfps launch --model=mnist``) about a tenth of its time.
    """
    last = getattr(dataset, "_dataset", dataset)  # the TensorFlow 1.x class wraps the newer one
    if not isinstance(last, _PrefetchDataset):
        return dataset, tf.constant(1, tf.int64)
    return last._input_dataset, tf.where(last._buffer_size > 0, last._buffer_size, tf.constant(_AUTOMATIC, tf.int64))
