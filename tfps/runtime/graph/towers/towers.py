"""The towers of a worker: each computes loss and gradients of its batch on its device, and the worker sends their mean.

The rule, for N towers with the weights w of their batches (``batches``: 1, or 0 for one that stands in)::

    loss       sum of w loss / sum of w           examples     sum of w examples
    dense      sum of w gradient / sum of w       sparse       the rows of all, each times w / sum of w

So N devices are equal to one with N times the batch, if the loss is the mean over equally large batches. Batch norm is
not: its mean and variance are of one device's batch, as in each program with several devices.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.runtime.graph import graph_editor
from tfps.runtime.graph.placement import ancestors, task_of
from tfps.runtime.graph.towers import batches
from tfps.runtime.graph.towers.copies import Copies
from tfps.runtime.graph.towers.region import Region
from tfps.tf_types import Fetch, Gradient, Graph, Nested, Operation, Optimizer, Tensor, Variable

log = logging.getLogger(__name__)

_BUILDING = threading.Lock()  # a test may build the graphs of several workers in one process

_OWN_GRADIENTS = (
    "the optimizer's compute_gradients does not call that of tf.train.Optimizer: what it does with the gradients, such "
    "as clipping, it does with those of each device, before the worker takes their mean."
)

_PYTHON = (
    "--devices_per_worker: Python keeps the gradient of a tf.py_function for one call at a time. Use TensorFlow's own "
    "operations or tf.custom_gradient, or give --devices_per_worker=1."
)

Pairs = list[tuple[Gradient, Variable]]


class Towers:
    """The towers of one worker.

    Args:
        graph: The graph, with the model on the first batch.
        devices: The device of each tower.
        given: The batch of each tower, as the input gives it.
        weights: float64 [towers].
        of_all: Whether each tower makes the model's own changes.
    """

    def __init__(
        self, graph: Graph, devices: Sequence[str], given: Sequence[Nested], weights: Tensor, of_all: bool
    ) -> None:
        self._graph, self._devices, self._of_all = graph, devices, of_all
        self._batches = [batches.flat(batch) for batch in given]
        self._weights = weights
        self._shares = tf.unstack(weights / tf.reduce_sum(weights), num=len(devices))
        self._copies: Copies | None = None
        self._region: Region | None = None
        self._more: Sequence[Fetch] = ()
        self._updates: Sequence[Operation] = ()

    def prepare(self, loss: Tensor, shown: Sequence[Tensor], updates: Sequence[Operation]) -> None:
        """Note what the towers compute beside the gradients."""
        self._updates = updates if self._of_all else ()
        self._more = [loss, *shown, *self._updates]

    def examples(self, counts: Sequence[Any]) -> Tensor:
        """Return the number of examples of a step, from those of each batch: int64 scalar."""
        numbers = tf.stack([tf.cast(count, tf.int64) for count in counts])
        return tf.reduce_sum(tf.where(self._weights > 0, numbers, tf.zeros_like(numbers)))

    def compute_gradients(self, compute: Callable[..., Any], overrides: bool, *args: Any, **kwargs: Any) -> Pairs:
        """Return the mean of the towers' gradients, each with its variable.

        An optimizer that overrides ``compute_gradients`` and calls that of its base class gets the mean from there.

        Args:
            compute: The method of the optimizer.
            overrides: Whether the model's optimizer overrides it.
            *args: Of ``compute_gradients``.
            **kwargs: Likewise.

        Raises:
            ValueError: If the model cannot have several towers.
        """
        with _BUILDING:
            if overrides:
                return self._within(compute, *args, **kwargs)
            return self._mean_of(list(compute(*args, **kwargs)))

    def _within(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Pairs:
        """Compute gradients with an optimizer that gets the mean from the method of its base class."""
        called: list[bool] = []
        base = tf.train.Optimizer.compute_gradients

        def of_towers(one: Optimizer, *given: Any, **named: Any) -> Pairs:
            pairs = list(base(one, *given, **named))
            if called:
                raise ValueError("--devices_per_worker: the optimizer computes gradients twice. Give 1 device.")
            called.append(True)
            return self._mean_of(pairs)

        tf.train.Optimizer.compute_gradients = of_towers
        try:
            pairs = list(compute(*args, **kwargs))
        finally:
            tf.train.Optimizer.compute_gradients = base
        if called:
            return pairs
        log.warning(_OWN_GRADIENTS)
        return self._mean_of(pairs)

    def _mean_of(self, pairs: Pairs) -> Pairs:
        parts = [part for gradient, _ in pairs if gradient is not None for part in _parts(gradient)]
        region = Region(self._graph, self._batches[0], [*parts, *self._more], self._of_all)
        region.check([*parts, self._more[0]])
        forward = set(ancestors(self._more))
        if any(op.type == "EagerPyFunc" and op not in forward for op in region.ops):
            raise ValueError(_PYTHON)
        self._region = region
        self._copies = Copies(self._graph, region, self._batches, self._devices)
        with tf.name_scope("tfps/towers/"):
            return [(None if gradient is None else self._mean_gradient(gradient), one) for gradient, one in pairs]

    def _mean_gradient(self, gradient: Gradient) -> Gradient:
        copies = self._made
        if not any(copies.varies(part) for part in _parts(gradient)):
            return gradient
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.add_n(self._weighted(gradient))
        indices = [copies.copy(number)(gradient.indices) for number in range(len(self._devices))]
        return tf.IndexedSlices(
            tf.concat(self._weighted(gradient.values), 0), tf.concat(indices, 0), gradient.dense_shape
        )

    def _weighted(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of each tower, times the share of its batch."""
        found = []
        for number, (device, share) in enumerate(zip(self._devices, self._shares, strict=True)):
            with tf.device(device):
                found.append(self._made.copy(number)(tensor) * tf.cast(share, tensor.dtype))
        return found

    @property
    def _made(self) -> Copies:
        assert self._copies is not None
        return self._copies

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over the towers of a float scalar that they compute.

        Of another one, return the first's; of one that depends on the model's own changes, that of the last to change.
        """
        assert self._region is not None
        if not self._made.varies(tensor):
            return tensor
        if self._region.depends(tensor):
            return self._made.copy(len(self._devices) - 1 if self._of_all else 0)(tensor)
        if not tensor.dtype.is_floating:
            return tensor
        with tf.name_scope("tfps/towers/"):
            return tf.add_n(self._weighted(tensor))

    def also(self, ops: Sequence[Fetch]) -> list[Fetch]:
        """Return the other towers' own of operations or tensors of the first."""
        return [self._made.copy(n)(op) for n in range(1, len(self._devices)) for op in ops if self._made.varies(op)]

    def use_mean(self, loss: Tensor, mean: Tensor, made: Sequence[Operation]) -> None:
        """Let an optimizer that uses the loss, as for its rate, use the mean loss.

        Args:
            loss: The loss of the first tower.
            mean: The mean loss.
            made: The operations of the optimizer.
        """
        assert self._region is not None
        inside, outside = self._region.ops, set(made)
        graph_editor.replace(
            loss, mean, lambda op: op in outside and op not in inside and not op.name.startswith("tfps/towers/")
        )

    @property
    def ops(self) -> set[Operation]:
        """The operations of all towers but the first."""
        return self._made.ops

    def receive_once(self, fetches: Sequence[Fetch], task: str) -> None:
        """Let what a PS sends to several devices of this worker cross the wire once."""
        users: dict[str, tuple[Tensor, set[str]]] = {}
        for op in ancestors(fetches):
            for tensor in op.inputs:
                comes = task_of(tensor.op).startswith("ps/") and task_of(op).startswith("worker/")
                if comes and not graph_editor.is_handle(tensor):
                    users.setdefault(tensor.name, (tensor, set()))[1].add(op.device)
        for tensor, devices in users.values():
            if len(devices) > 1 and graph_editor.is_in_every_step(tensor.op):
                with self._graph.as_default(), tf.device(None), tf.device(task), tf.control_dependencies(None):
                    received = tf.identity(tensor, name="tfps/received")
                on_worker = {op for op in tensor.consumers() if task_of(op).startswith("worker/")}
                graph_editor.replace(tensor, received, (on_worker - {received.op}).__contains__)


def _parts(gradient: Gradient) -> Sequence[Tensor]:
    return [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]
