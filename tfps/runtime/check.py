"""Find what is wrong with a model before anything starts, by building all that worker 0 of its job will build."""

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.models import Model
from tfps.runtime import graph


def build_once(config: JobConfig, cluster: Cluster, model: Model) -> tuple[graph.TrainGraph, graph.EvalGraph | None]:
    """Build the graphs of worker 0, of training and of evaluation; start nothing.

    Returns:
        Both; ``None`` for that of evaluation if the model's ``input_fn`` returns ``None`` for ``mode='eval'``.

    Raises:
        ModelError: If the model fails, gives back something else than its contract says, or evaluates variables that
            it does not train.
    """
    task = Task("worker", 0)
    training = graph.training(config, cluster, task, model)
    return training, graph.evaluation(config, cluster, task, model, like=training.graph)
