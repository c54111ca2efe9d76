"""A model's own additions are exclusive: of two at the same time, none is lost.

TensorFlow lets updates of some variables overlap. An addition reads the old value and writes the sum, so another one in
between is lost. Two kinds of updates do this:

- ``scatter_add`` and its like on a resource variable hold a lock that they share (``ResourceScatterUpdateOp`` in
  tensorflow/core/kernels/resource_variable_ops.cc). ``ResourceScatterNdAdd`` holds the lock alone, and adds the same
  numbers in the same order. So ``patch_scatter`` makes models use it::

      before   ResourceScatterAdd(v, ids, rows)            after   ResourceScatterNdAdd(v, ids[..., newaxis], rows)

- An update of a TensorFlow 1.x variable, which is passed by reference, holds no lock, unless ``use_locking`` is set. So
  ``lock_references`` sets it.

Not covered: ``scatter_mul`` and ``scatter_div``, which TensorFlow has in the shared form only, and ``tf.raw_ops``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import gen_resource_variable_ops, gen_state_ops, resource_variable_ops

from tfps.runtime.graph.graph_editor import set_bool_attr
from tfps.tf_types import Graph, Operation, Tensor

_EXCLUSIVE = {
    "resource_scatter_add": gen_state_ops.resource_scatter_nd_add,
    "resource_scatter_sub": gen_state_ops.resource_scatter_nd_sub,
    "resource_scatter_min": gen_state_ops.resource_scatter_nd_min,
    "resource_scatter_max": gen_state_ops.resource_scatter_nd_max,
}
_SHARED_ADD = resource_variable_ops.resource_scatter_add
_LOCKING = "use_locking"


_in_model: ContextVar[bool] = ContextVar("in_model", default=False)


def patch_scatter() -> None:
    """Make ``scatter_add``, ``sub``, ``min`` and ``max`` of resource variables exclusive, also inside functions.

    TensorFlow's optimizers have ``scatter_add`` under another name. They are unchanged, but for one whose update a
    model runs itself: the update of the model's optimizer holds a lock of the PS. Call this before the graph of a model
    is built; further calls change nothing.
    """
    for name, exclusive in _EXCLUSIVE.items():
        setattr(gen_resource_variable_ops, name, functools.partial(_scatter, exclusive))
    resource_variable_ops.resource_scatter_add = _scatter_add_of_optimizer


@contextlib.contextmanager
def of_model() -> Iterator[None]:
    """Make what optimizers add to rows in the context exclusive, too."""
    token = _in_model.set(True)
    try:
        yield
    finally:
        _in_model.reset(token)


def _scatter_add_of_optimizer(*args: Any, **kwargs: Any) -> Operation:
    if _in_model.get():
        return _scatter(_EXCLUSIVE["resource_scatter_add"], *args, **kwargs)
    return _SHARED_ADD(*args, **kwargs)


def _scatter(
    exclusive: Callable[..., Operation], resource: Tensor, indices: Any, updates: Any, name: str | None = None
) -> Operation:
    """Update rows of a variable, as ``tf.raw_ops.ResourceScatterAdd`` does: ``updates`` may be one number for all."""
    indices = tf.convert_to_tensor(indices)
    numbers = tf.convert_to_tensor(updates)
    if numbers.shape.rank in (0, None):
        row = gen_resource_variable_ops.variable_shape(resource)[1:]
        numbers = tf.broadcast_to(numbers, tf.concat([tf.shape(indices), row], 0))
    if indices.shape.rank == 0:
        indices, numbers = indices[tf.newaxis], numbers[tf.newaxis]
    return exclusive(resource, indices[..., tf.newaxis], numbers, name=name)


def lock_references(graph: Graph) -> None:
    """Make each update of a TensorFlow 1.x variable in a graph hold the variable's lock."""
    for op in graph.get_operations():
        if _LOCKING in op.node_def.attr and not op.get_attr(_LOCKING):
            set_bool_attr(op, _LOCKING, True)
