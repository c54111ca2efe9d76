"""Build the graph that evaluates a model: on a cluster's live parameters, or on one machine from a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.models.model import Model
from tfps.models.spec import ModeKeys
from tfps.runtime.graph import inputs, model_calls, placement
from tfps.runtime.graph.checks import variable_check
from tfps.runtime.graph.graph_scope import new_graph, on_cluster
from tfps.tf_types import Graph, InputIterator, Operation, Tensor, Variable

_KERAS_METRIC = "keras/src/metrics/metric.py"


@dataclass(frozen=True)
class EvalGraph:
    """The graph that evaluates a model, on live parameters or on those of a checkpoint.

    Attributes:
        model: The model.
        graph: The graph.
        global_step: The variable of the global step.
        iterator: Iterator over the evaluation input.
        batches: int64 scalar: the number of batches in that input. Negative if it is unknown or infinite.
        metrics: Maps a name to the value of a metric and the operation that adds a batch to it.
        on_cluster: Whether the variables live on the PS of a cluster, which may be lost.
        batch_size: The batch size of the job.
    """

    model: Model
    graph: Graph
    global_step: Variable
    iterator: InputIterator
    batches: Tensor
    metrics: Mapping[str, tuple[Tensor, Operation]]
    on_cluster: bool
    batch_size: int


def evaluation_graph(
    config: JobConfig, cluster: Cluster | None, task: Task, model: Model, like: Graph | None = None
) -> EvalGraph | None:
    """Build an evaluation graph.

    Args:
        config: The job.
        cluster: The cluster that holds the variables; ``None`` means this machine.
        task: The worker that evaluates.
        model: The model.
        like: A training graph on the same cluster. Its variables are evaluated, each on the PS where it lives.

    Returns:
        The graph, or ``None`` if the model's ``input_fn`` returns ``None`` for ``mode='eval'``.

    Raises:
        ModelError: If the model fails, or returns something that its contract does not allow.
    """
    strategy = placement.same_as(like) if like is not None else None
    with new_graph(config) as graph, on_cluster(config, cluster, task, strategy):
        global_step = tf.train.get_or_create_global_step()
        device = task.device if cluster else "/cpu:0"
        source = inputs.input_of(model, ModeKeys.EVAL, config, device, 1, 0)
        if source is None:
            return None
        iterator, batches, batch = source
        spec = model_calls.spec(model, ModeKeys.EVAL, config, *batch)
        size = inputs.examples_of(*batch)
        loss = tf.metrics.mean(spec.loss, weights=size if tf.is_tensor(size) else 1)  # the last batch may be smaller
        metrics = {"loss": loss, **(spec.eval_metric_ops or {})}
        read = inputs.next_of(iterator)
        inputs.only_with(read, [update for _, update in metrics.values()])
        _check_values(model, read, metrics)
        variable_check.check_feeds(model, graph, placement.ancestors(update for _, update in metrics.values()))
    if like is not None:
        variable_check.check(model, ModeKeys.EVAL, graph, like)
    return EvalGraph(model, graph, global_step, iterator, batches, metrics, cluster is not None, config.batch_size)


def _check_values(model: Model, read: Tensor, metrics: Mapping[str, tuple[Tensor, Operation]]) -> None:
    """Check that no metric's value needs a batch, because values are read after the last one, and none is of Keras."""
    of_batch = [
        name for name, (value, _) in metrics.items() if read in placement.ancestors([tf.convert_to_tensor(value)])
    ]
    if of_batch:
        raise ModelError(
            f"--model={model.name}: {model.line_of('model_fn')}: model_fn(mode='eval') returned eval_metric_ops with "
            f"{of_batch[0]!r}, whose value depends on the batch; a value is read after the last batch: use "
            "tf.metrics.mean(...), or give a pair of a variable's value and its update."
        )
    of_keras = [
        name
        for name, (value, update) in metrics.items()
        if any(_is_of_keras_metric(op) for op in placement.ancestors([tf.convert_to_tensor(value), update]))
    ]
    if of_keras:
        raise ModelError(
            f"--model={model.name}: {model.line_of('model_fn')}: model_fn(mode='eval') returned eval_metric_ops with "
            f"{of_keras[0]!r} of a Keras metric, whose totals are those of training, and are not reset: use tf.metrics."
        )


def _is_of_keras_metric(variable: Operation) -> bool:
    """Return whether an operation creates a variable of a Keras metric."""
    files = (frame.filename.replace("\\", "/") for frame in variable.traceback or ())
    return variable.type in placement.VARIABLES and any(name.endswith(_KERAS_METRIC) for name in files)
