"""An iterator that outlasts the steps and the sessions that use it.

TensorFlow's own does not: a step that is cancelled while it waits for an element cancels the iterator for good, which
from then on says that it has ended (``IteratorResource::GetNext`` in tensorflow/core/kernels/data/iterator_ops.cc). A
multi-device iterator gets its elements in a thread of its own, some ahead, and a cancelled step only stops waiting
(``MultiDeviceIterator`` in tensorflow/core/kernels/data/multi_device_iterator_ops.cc). Here it has one device.
"""

import re
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.data.ops.prefetch_op import _PrefetchDataset
from tensorflow.python.data.util import structure

from tfps.tf_types import Dataset

INPUTS = ("IteratorGetNext", "MultiDeviceIteratorGetNextFromShard")  # operations that give a batch
_END = re.compile("End of sequence|is closed and has insufficient elements")  # of a dataset, of a queue
_NAME, _INCARNATION = "tfps/input", "tfps/incarnation"
_AUTOMATIC = 4  # for tf.data.AUTOTUNE, or none


class CancelSafeIterator:
    """Gives the elements of a task's training input; make it, and use it, on the device where the dataset is.

    Not in a session without a server: to close that hangs where a function of the dataset has been used, as of 2.21
    (``DynamicDeviceMgr`` in tensorflow/core/common_runtime holds its lock while it deletes the iterator, which asks it
    for a device).

    Args:
        dataset: ``tf.data.Dataset``.

    Attributes:
        initializer: Operation that begins at the dataset's first element.
        resource: What gives them.
    """

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

    def get_next(self) -> Any:
        """Return the next element.

        When run, it raises ``tf.errors.OutOfRangeError`` if there is none.
        """
        tensors = tf.raw_ops.MultiDeviceIteratorGetNextFromShard(
            multi_device_iterator=self.resource,
            shard_num=0,
            incarnation_id=self._incarnation.read_value(),
            **self._flat,
        )
        return structure.from_tensor_list(self._spec, tensors)


def is_end(error: Any) -> bool:
    """Return whether an error is the end of an input, and not of a generator that a model's Python function reads."""
    return isinstance(error, tf.errors.OutOfRangeError) and _END.search(error.message) is not None


def is_of_another(error: Any) -> bool:
    """Return whether an end is that of another worker's input, with which a queue between them was closed."""
    return is_end(error) and "End of sequence" not in error.message


def _without_prefetch(dataset: Dataset) -> tuple[Any, Any]:
    """Return a dataset without the ``prefetch`` at its end, and how many elements to keep ready instead: int64.

    Two threads that hand each element on cost a short step (``tfps launch --model=mnist``) about a tenth of its time.
    """
    last = getattr(dataset, "_dataset", dataset)  # that of TensorFlow 1.x wraps the newer one
    if not isinstance(last, _PrefetchDataset):
        return dataset, tf.constant(1, tf.int64)
    return last._input_dataset, tf.where(last._buffer_size > 0, last._buffer_size, tf.constant(_AUTOMATIC, tf.int64))
