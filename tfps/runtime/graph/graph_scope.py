"""The surroundings in which a model builds its graph: seeds, names, and the devices of variables."""

import contextlib
import sys
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.runtime.graph import placement
from tfps.runtime.graph.passes import exclusive_updates, variable_splitting
from tfps.tf_types import Context, Graph


@contextlib.contextmanager
def new_graph(config: JobConfig) -> Iterator[Graph]:
    """Make a graph with the job's seed, the default one in the context.

    A model that calls ``tf.disable_v2_behavior()`` turns resource variables off, when it is imported or within its
    functions. They stay the default here, unless a variable or a scope asks for the others.
    """
    variable_splitting.patch_embedding_lookup()
    exclusive_updates.patch_scatter()
    _reset_keras_names()
    tf.enable_resource_variables()
    graph = tf.Graph()
    with graph.as_default(), placement.keras_seeds_local(), _with_resource_variables():
        tf.set_random_seed(config.seed)
        yield graph


def _with_resource_variables() -> Context:
    return tf.variable_scope(tf.get_variable_scope(), use_resource=True)


def _reset_keras_names() -> None:
    """Reset Keras's layer counters, as TensorFlow does in a new graph.

    Keras counts layers across the whole process. Without a reset, unnamed layers would get other names in each graph,
    and evaluation other variables than training. Keras is imported only when it is used; see ``tensorflow_import``.
    """
    if naming := sys.modules.get("keras.src.utils.naming"):
        naming.reset_uids()


@contextlib.contextmanager
def on_cluster(
    config: JobConfig, cluster: Cluster | None, task: Task, strategy: placement.Strategy | None = None
) -> Iterator[None]:
    """Place variables on the PS and split large ones. Without a cluster, leave everything on this machine."""
    if cluster is None:
        yield
        return
    strategy = strategy or placement.STRATEGIES[config.ps_strategy](len(cluster.state_tasks))
    with (
        tf.device(placement.device_setter(cluster, task, strategy)),
        placement.local_variables_on(task.device),
        tf.variable_scope(tf.get_variable_scope(), custom_getter=variable_splitting.getter(config, cluster)),
    ):
        yield
