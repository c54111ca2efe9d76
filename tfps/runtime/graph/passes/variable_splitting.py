"""Split large variables along their first dimension over the parameter servers.

::

    before   ps/0: w [1000, 8]
    after    ps/0: w/part_0 [500, 8], rows 0 to 499      ps/1: w/part_1 [500, 8], rows 500 to 999

A split may change only the place of a variable's elements. But TensorFlow initializes a slice like a separate variable.
With a seed, the values of one slice repeat in the next. An initializer that depends on the whole shape, such as an
orthogonal one, does not see it. A constant initializer has too many values. So the whole value is created and sliced,
unless the initializer is known to draw each element separately.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import embedding_ops
from tensorflow.python.ops.init_ops import TruncatedNormal
from tensorflow.python.ops.variables import PartitionedVariable

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.runtime.graph.graph_editor import may_be_slice, slice_info
from tfps.tf_types import DType, Graph, Initializer, Tensor, Variable

_EACH_BY_ITSELF = (  # these get the whole shape, and use it instead of that of the slice
    tf.zeros_initializer,
    tf.ones_initializer,
    tf.random_uniform_initializer,
    tf.random_normal_initializer,
    TruncatedNormal,
    tf.variance_scaling_initializer,
    tf.glorot_uniform_initializer,
    tf.glorot_normal_initializer,
)
_ADDITIVE = ("L1", "L2", "L1L2")  # Keras's
_SPLIT = "tfps/split"  # collection of the names of split variables
_NAMED = 3
_ARGUMENTS = (  # of a getter after the name, in the order of _true_getter in TensorFlow's variable_scope.py
    *("shape", "dtype", "initializer", "regularizer", "reuse", "trainable", "collections", "caching_device"),
    *("partitioner", "validate_shape", "use_resource", "constraint", "synchronization", "aggregation"),
)

log = logging.getLogger(__name__)


def getter(config: JobConfig, cluster: Cluster) -> Any:
    """Return a getter for ``tf.variable_scope`` that splits large variables along their first dimension.

    A variable becomes at most one slice per PS, each of at least ``min_slice_mb``. A smaller variable stays whole. So
    does one that the model splits itself, and one with a constraint or a regularizer, which may apply to the whole
    variable.
    """
    smallest = max(1, int(config.min_slice_mb * 2**20))
    partitioner = tf.min_max_variable_partitioner(
        max_partitions=len(cluster.state_tasks), axis=0, min_slice_size=smallest
    )

    def get(getter: Callable[..., Variable], name: str, *args: Any, **kwargs: Any) -> Variable:
        kwargs |= dict(zip(_ARGUMENTS, args, strict=False))  # a getter of the model may have given them by position
        shape, dtype = tf.TensorShape(kwargs.get("shape")), kwargs.get("dtype", tf.float32)
        known = shape.is_fully_defined() and shape.rank
        if known and _may_be_split(kwargs) and max(partitioner(shape=shape, dtype=dtype)) > 1:
            tf.add_to_collection(_SPLIT, name)
            kwargs |= {"partitioner": partitioner, "initializer": _of_slices(kwargs.get("initializer"))}
        return getter(name, **kwargs)

    return get


def log_split(graph: Graph, config: JobConfig) -> None:
    """Log the split variables: the optimizer gets slices, and so does a model that selects variables by name."""
    names = sorted(set(graph.get_collection(_SPLIT)))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        log.info(
            "%s%s: split over the PS. tf.trainable_variables() has the slices, named %s/part_0 and so on, and the "
            "optimizer gets each as a separate variable. If the model or the optimizer needs whole names or variables, "
            "for example for a norm, give more than --min_slice_mb=%g.",
            *(", ".join(names[:_NAMED]), more, names[0], config.min_slice_mb),
        )


def _may_be_split(kwargs: dict[str, Any]) -> bool:
    """Return whether no argument of ``tf.get_variable`` applies to the variable as a whole."""
    regularizer = kwargs.get("regularizer")
    adds_up = regularizer is None or type(regularizer).__name__ in _ADDITIVE
    return adds_up and kwargs.get("partitioner") is None and kwargs.get("constraint") is None


def _of_slices(initializer: Initializer) -> Initializer:
    """Return an initializer for slices that works as a given initializer does for the whole variable."""
    made = initializer() if inspect.isclass(initializer) else initializer
    if not callable(made):
        return made  # TensorFlow's default, which draws each element, or a tensor, which TensorFlow slices
    wholes: list[Variable] = []  # at most one, shared by all slices: without a seed, another would be another draw

    def first(shape: Sequence[int], dtype: DType = tf.float32, partition_info: Any = None) -> Tensor:
        if partition_info is None:
            return made(shape, dtype=dtype)
        if type(made) in _EACH_BY_ITSELF:
            return _with_seed_of(made, partition_info.var_offset[0])(shape, dtype=dtype, partition_info=partition_info)
        whole = _constant(made, partition_info.full_shape)
        if whole is not None:  # add only the slice to the graph
            return tf.constant(whole[partition_info.var_offset[0] :][: shape[0]], dtype)
        if not wholes:
            wholes.append(made(partition_info.full_shape, dtype=dtype))
        return tf.slice(wholes[0], partition_info.var_offset, shape)

    return first


def _constant(initializer: Initializer, shape: Sequence[int]) -> Any:
    """Return the numbers of a constant initializer (TensorFlow repeats the last one), or ``None`` for any other."""
    if type(initializer) is not tf.constant_initializer:
        return None
    numbers = np.ravel(initializer.value)
    missing = int(np.prod(shape)) - numbers.size
    return np.pad(numbers, (0, missing), mode="edge").reshape(shape) if numbers.size > 1 and missing >= 0 else None


def _with_seed_of(initializer: Initializer, offset: int) -> Initializer:
    """Return an initializer with another seed for the slice that starts at a row, if the initializer has a seed."""
    if getattr(initializer, "seed", None) is None:
        return initializer
    other = copy.copy(initializer)
    other.seed = (initializer.seed + offset) % 2**31
    return other


def patch_embedding_lookup() -> None:
    """Make ``tf.nn.embedding_lookup`` find a row of a split variable in the slice that holds it.

    Slices are runs of rows, but the default ``partition_strategy`` of TensorFlow 1.x, "mod", assigns rows to slices in
    turn. Training would work, but the table would be wrong in every checkpoint and for every other number of PS,
    without a message. Sparse lookups and sampled losses first make a list of the slices. Variables that the model
    splits itself, and lists of tables, for which "mod" was made, are unchanged. Call this once, before the graph of a
    model is built.
    """
    original = embedding_ops._embedding_lookup_and_transform
    if hasattr(original, "finds_rows_in_slices"):
        return

    def lookup(params: object, ids: Tensor, partition_strategy: str = "mod", **kwargs: Any) -> Tensor:
        is_split = _whole_name(params) in tf.get_collection(_SPLIT)
        return original(params, ids, partition_strategy="div" if is_split else partition_strategy, **kwargs)

    lookup.finds_rows_in_slices = True  # type: ignore[attr-defined]
    embedding_ops._embedding_lookup_and_transform = lookup


def _whole_name(params: object) -> str | None:
    """Return the name of the variable whose slices are looked up. TensorFlow's functions may have listed the slices."""
    if isinstance(params, PartitionedVariable):
        return str(params.name)
    if not isinstance(params, list) or not all(may_be_slice(one) for one in params):
        return None
    names = {part.full_name if part else None for part in (slice_info(one) for one in params)}
    return names.pop() if len(params) > 1 and len(names) == 1 else None
