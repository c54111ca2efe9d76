"""Find what is wrong with a model before anything starts, by building all that worker 0 of its job will build."""

from typing import Any

from tfps.cluster.resolver import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models.loader import Model
from tfps.runtime.graph import builder, variable_check

_ALONE = Cluster(("ps:1",), ("worker:1",))  # of which nothing is started


def build_once(
    config: JobConfig, cluster: Cluster, model: Model
) -> tuple[builder.TrainGraph, builder.EvalGraph | None]:
    """Build the graphs of worker 0, of training and of evaluation; start nothing.

    Returns:
        Both; ``None`` for that of evaluation if the model's ``input_fn`` returns ``None`` for ``mode='eval'``.

    Raises:
        ModelError: If the model fails, gives back something else than its contract says, or evaluates variables that
            it does not train.
    """
    task = Task("worker", 0)
    training = builder.training(config, cluster, task, model)
    return training, builder.evaluation(config, cluster, task, model, like=training.graph)


def explain_misfit(config: JobConfig, model: Model, mode: str, built: Any) -> None:
    """Tell why no checkpoint of a model fits a graph of it, if training does not have what the graph has.

    Args:
        config: The job.
        model: The model.
        mode: What the graph was built for.
        built: The graph, which has found no value for a variable.

    Raises:
        ModelError: If the model makes other variables in training.
    """
    training = builder.training(config, _ALONE, Task("worker", 0), model)
    variable_check.check(model, mode, built, training.graph)
