"""Find errors in a model before anything starts, by building all graphs that worker 0 of its job will build."""

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models.model import Model
from tfps.modes.registry import mode_of
from tfps.runtime.graph import builder
from tfps.runtime.graph.checks import variable_check
from tfps.runtime.graph.evaluation import EvalGraph, evaluation_graph
from tfps.tf_types import Graph

_ALONE = Cluster(("ps:1",), ("worker:1",))  # its tasks are never started


def build_once(config: JobConfig, cluster: Cluster, model: Model) -> tuple[builder.TrainGraph, EvalGraph | None]:
    """Build the training and evaluation graphs of worker 0, without starting anything.

    Returns:
        Both graphs. The evaluation graph is ``None`` if the model's ``input_fn`` returns ``None`` for ``mode='eval'``.

    Raises:
        ModelError: If the model fails, returns something that its contract does not allow, or evaluates variables that
            it does not train.
    """
    task = Task("worker", 0)
    training = builder.training(config, cluster, task, model)
    return training, evaluation_graph(config, cluster, task, model, like=training.graph)


def explain_misfit(config: JobConfig, model: Model, mode: str, built: Graph) -> None:
    """Explain why no checkpoint of a model fits a graph of it, if training lacks variables of the graph.

    Args:
        config: The job.
        model: The model.
        mode: The mode for which the graph was built.
        built: The graph, which has found no value for a variable.

    Raises:
        ModelError: If the model creates other variables in training.
    """
    cluster = _ALONE if mode_of(config).uses_ps else Cluster((), _ALONE.workers)
    training = builder.training(config, cluster, Task("worker", 0), model)
    variable_check.check(model, mode, built, training.graph)
