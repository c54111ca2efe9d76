"""What goes where before anything starts: each variable's PS, and what a worker's step moves over the wire."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.resolver import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models.loader import Model
from tfps.runtime.graph import model_check, placement
from tfps.runtime.graph.passes import variable_packing


@dataclass(frozen=True)
class Plan:
    """The placement of a model on a cluster.

    Attributes:
        variables: Every variable or slice, in the order of creation.
        ps_bytes: Bytes by PS index.
        packed_bytes: By PS index, those of the variables beside these that small ones live in.
        pulled: What the PS send one worker in a step.
        pushed: What one worker sends the PS in a step.
        plain: The same job with ``--wire=plain``; ``None`` if it is that.
    """

    variables: Sequence[placement.PlacedVariable]
    ps_bytes: Mapping[int, int]
    packed_bytes: Mapping[int, int]
    pulled: Sequence[placement.Transfer]
    pushed: Sequence[placement.Transfer]
    plain: "Plan | None" = None


def make(config: JobConfig, cluster: Cluster, model: Model) -> Plan:
    """Build the graphs of worker 0, start nothing, and read the plan off that of training.

    Raises:
        ModelError: If training, or its evaluation, would find a mistake in the model as it builds its graphs.
    """
    task = Task("worker", 0)
    built, _ = model_check.build_once(config, cluster, model)
    variables = placement.variables(built.graph)
    totals = Counter(dict.fromkeys(range(cluster.num_ps), 0))
    for variable in variables:
        totals[variable.ps] += variable.num_bytes
    transfers = placement.transfers(built.fetches)
    # What a fetch brings home crosses the wire like any other tensor.
    fetched = [placement.fetched(tensor, str(task)) for tensor in (built.next_ticket, built.spec.loss)]
    transfers += [transfer for transfer in fetched if transfer is not None and transfer not in transfers]
    return Plan(
        variables=variables,
        ps_bytes=dict(sorted(totals.items())),
        packed_bytes=variable_packing.sizes(built.graph),
        pulled=[transfer for transfer in transfers if transfer.target == str(task)],
        pushed=[transfer for transfer in transfers if transfer.source == str(task)],
        plain=None if config.wire == "plain" else make(config.replace(wire="plain"), cluster, model),
    )
