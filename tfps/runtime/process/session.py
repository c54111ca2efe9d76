"""A session that tries again when TensorFlow takes two different requests for the same one.

Every RunGraph call carries a random id. A task rejects an id that is among the last 100,000 it has seen, as a repeated
request (tensorflow/core/distributed_runtime/recent_request_ids.cc). But the id is the first number of a generator that
each of the master's short-lived threads seeds with only 32 bits (ThreadLocalNew64 in tsl's random.cc). So one of 43,000
calls to a busy task is rejected although it is new. The error is Aborted, or Cancelled if the other tasks' parts of the
step are reported first. ``request_ids`` prevents that where it can.

The rejecting task has run no part of the step. Operations that depend on its part, such as ``global_step``, have not
run either, so the step can be repeated.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from tfps.cluster.spec import Cluster, Task
from tfps.tf_types import Tensor

_REFUSED = "was received twice"
_TRIES = 10


def config_of(cluster: Cluster, task: Task, inlined: bool = False) -> Any:
    """Return the ``tf.compat.v1.ConfigProto`` of a worker's sessions.

    Args:
        cluster: The cluster.
        task: The worker.
        inlined: Whether TensorFlow also replaces the calls within functions by what these do. An operation in a called
            function has its own state in each graph of a session, such as that of runs with and without logged values:
            random numbers would repeat. One that is in the graph itself keeps its state for all of them.
    """
    # Without the filter, creating a session would wait without end for every other worker.
    holders = ["/job:ps"] if cluster.ps else [holder.device for holder in cluster.state_tasks]
    config = tf.ConfigProto(device_filters=[*holders, task.device], allow_soft_placement=True)
    config.share_cluster_devices_in_session = True  # a tf.function may use variables on the PS
    # Grappler's arithmetic and folding passes round differently on a packed wire; no bit may depend on that.
    rewriting = config.graph_options.rewrite_options
    rewriting.arithmetic_optimization = rewriting.constant_folding = RewriterConfig.OFF
    rewriting.meta_optimizer_iterations = RewriterConfig.ONE  # a second pass is slow and made no step faster
    rewriting.memory_optimization = RewriterConfig.NO_MEM_OPT
    config.graph_options.optimizer_options.do_function_inlining = inlined
    return config


def with_workers(config: Any, others: Sequence[int]) -> Any:
    """Return the configuration of sessions whose steps call other workers' servers, too. Making one waits for these.

    Sessions of ``config`` run the other operations of the same graph from now on.
    """
    config.graph_options.place_pruned_graph = True  # a session could not place what is on another worker
    training = tf.ConfigProto()
    training.CopyFrom(config)
    training.device_filters.extend(Task("worker", index).device for index in others)
    return training


class Session(tf.Session):  # type: ignore[misc]
    """A ``tf.compat.v1.Session`` that repeats calls that were rejected as repeated."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run like ``tf.Session.run``, with retries."""
        return _persistently(super().run, *args, **kwargs)

    def make_once(self, fetches: Any) -> Callable[[], Any]:
        """Return a callable whose calls are not repeated: other tasks than the rejecting one have run their part."""
        return super().make_callable(fetches)  # type: ignore[no-any-return]

    def make_callable(self, fetches: Any, feed_list: Sequence[Any] = (), **kwargs: Any) -> Callable[..., Any]:
        """Return a callable like ``tf.Session.make_callable``; with a ``feed_list``, for one operation.

        On each call with feeds, TensorFlow's own callable adds new parts of the graph to the session, even those that
        another thread has half built. Control inputs that are added later then have no effect.
        """
        if not feed_list:
            call = super().make_callable(fetches, **kwargs)
            return lambda *inputs: _persistently(call, *inputs)
        self._extend_graph()  # only here, not on each call
        feeds = [(tensor._as_tf_output(), tensor.dtype.as_numpy_dtype) for tensor in feed_list]
        targets = [fetches._c_op]

        def run(*values: Any) -> None:
            fed = {output: np.asarray(value, dtype) for (output, dtype), value in zip(feeds, values, strict=True)}
            self._call_tf_sessionrun(None, fed, [], targets, None)

        return lambda *inputs: _persistently(run, *inputs)


def elements(session: tf.Session, tensor: Tensor | None) -> list[int]:
    """Return the elements of an integer tensor with one axis; empty if there is none."""
    found: list[int] = [] if tensor is None else session.run(tensor).tolist()
    return found


def is_refused(error: Any) -> bool:
    """Return whether an error says that a task rejected a request as repeated."""
    return _REFUSED in str(error)


def _persistently(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for _ in range(_TRIES - 1):
        try:
            return call(*args, **kwargs)
        except (tf.errors.AbortedError, tf.errors.CancelledError) as error:
            if _REFUSED not in error.message:
                raise
            print("TensorFlow rejected a call as a duplicate by mistake: retrying it.", file=sys.__stderr__, flush=True)
    return call(*args, **kwargs)
