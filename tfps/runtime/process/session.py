"""A session that goes on when TensorFlow takes two different requests for the same one.

Every RunGraph call carries a random id, and a task refuses an id that is among the last 100,000 it has seen, as a
repeated request (tensorflow/core/distributed_runtime/recent_request_ids.cc). But the id is the first number of a
generator that each of the master's short-lived threads seeds with 32 bits only (ThreadLocalNew64 in tsl's random.cc),
so of 43,000 calls to a busy task one is refused although it is new: Aborted, or Cancelled where the other tasks' parts
of the step are told first. ``request_ids`` keeps that from happening where it can.

The refused task has run no part of the step. What hangs on its part, such as ``global_step``, is not done either, and
the step can be taken again.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from tfps.cluster.resolver import Task

_REFUSED = "was received twice"
_TRIES = 10


def config_of(task: Task) -> Any:
    """Return the ``tf.compat.v1.ConfigProto`` of a worker's sessions."""
    # Without the filter, creating a session would wait for every other worker, for ever.
    config = tf.ConfigProto(device_filters=["/job:ps", task.device], allow_soft_placement=True)
    config.share_cluster_devices_in_session = True  # a tf.function may use variables on the PS
    # Grappler's algebra and folding round otherwise where the wire is packed: no bit may depend on that.
    rewriting = config.graph_options.rewrite_options
    rewriting.arithmetic_optimization = rewriting.constant_folding = RewriterConfig.OFF
    rewriting.meta_optimizer_iterations = RewriterConfig.ONE  # no step was faster for a second, which takes long
    rewriting.memory_optimization = RewriterConfig.NO_MEM_OPT
    return config


class Session(tf.Session):  # type: ignore[misc]
    """A ``tf.compat.v1.Session`` that repeats calls which were refused as repeated."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run as ``tf.Session.run`` does."""
        return _persistently(super().run, *args, **kwargs)

    def make_callable(self, fetches: Any, feed_list: Sequence[Any] = (), **kwargs: Any) -> Callable[..., Any]:
        """Return a callable as ``tf.Session.make_callable`` does; with a ``feed_list``, of one operation.

        TensorFlow's own takes in what has been added to the graph at each call that is fed, also what another thread
        has added by half: control inputs that come later are of no effect.
        """
        if not feed_list:
            call = super().make_callable(fetches, **kwargs)
            return lambda *inputs: _persistently(call, *inputs)
        self._extend_graph()
        feeds = [(tensor._as_tf_output(), tensor.dtype.as_numpy_dtype) for tensor in feed_list]
        targets = [fetches._c_op]

        def run(*values: Any) -> None:
            fed = {output: np.asarray(value, dtype) for (output, dtype), value in zip(feeds, values, strict=True)}
            self._call_tf_sessionrun(None, fed, [], targets, None)

        return lambda *inputs: _persistently(run, *inputs)


def _persistently(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for _ in range(_TRIES - 1):
        try:
            return call(*args, **kwargs)
        except (tf.errors.AbortedError, tf.errors.CancelledError) as error:
            if _REFUSED not in error.message:
                raise
            print("A call was refused as repeated, which it was not: made again.", file=sys.__stderr__, flush=True)
    return call(*args, **kwargs)
