"""The plan of a job, made before anything starts: each variable's PS, and the transfers of a worker's step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.config.wire_format import WireFormat
from tfps.models.model import Model
from tfps.modes.rounds import Rounds
from tfps.runtime.graph import builder, graph_editor, placement
from tfps.runtime.graph.checks import model_check
from tfps.runtime.graph.passes import variable_packing
from tfps.tf_types import Graph


@dataclass(frozen=True)
class Plan:
    """The placement of a model on a cluster.

    Attributes:
        variables: Every variable or slice, in the order of creation.
        ps_bytes: Bytes by PS index.
        packed_bytes: Bytes by PS index of the packed variables, which hold small variables and exist beside them.
        pulled: The tensors that the PS send to one worker in a step.
        pushed: The tensors that one worker sends to the PS in a step.
        to_next: The tensors that one worker sends to other workers in a step, where a mode has such steps.
        round_pulled: The tensors that the PS send to one worker at the end of a round, where a mode has rounds.
        round_pushed: The tensors that one worker sends to the PS at the end of a round.
        waiting_pulled: The tensors that the PS send to one worker in a round in which it waits. ``None`` where all
            workers train in each round.
        waiting_pushed: The tensors that one worker sends to the PS in such a round.
        kept: The names of the optimizer's variables that stay with each worker.
        rounds: The rounds of the job; ``None`` where the mode has none.
        plain: The plan of the same job with ``--wire=plain``; ``None`` if this is that plan.
    """

    variables: Sequence[placement.PlacedVariable]
    ps_bytes: Mapping[int, int]
    packed_bytes: Mapping[int, int]
    pulled: Sequence[placement.Transfer]
    pushed: Sequence[placement.Transfer]
    to_next: Sequence[placement.Transfer] = ()
    round_pulled: Sequence[placement.Transfer] = ()
    round_pushed: Sequence[placement.Transfer] = ()
    waiting_pulled: Sequence[placement.Transfer] | None = None
    waiting_pushed: Sequence[placement.Transfer] | None = None
    kept: Sequence[str] = ()
    rounds: Rounds | None = None
    plain: "Plan | None" = None


def make(config: JobConfig, cluster: Cluster, model: Model) -> Plan:
    """Build the graphs of worker 0, start nothing, and derive the plan from the training graph.

    Raises:
        ModelError: If building the graphs for training or its evaluation finds an error in the model.
    """
    built, _ = model_check.build_once(config, cluster, model)
    variables = placement.variables(built.graph)
    totals = Counter(dict.fromkeys(range(len(cluster.state_tasks)), 0))
    for variable in variables:
        totals[variable.ps] += variable.num_bytes
    task, packs = Task("worker", 0), WireFormat.of(config.wire).pack and not built.step.calls_workers
    packed = variable_packing.sizes(built.graph)
    if built.step.calls_workers:  # the chief's own variables are on its device, and other workers have copies
        task = Task("worker", 1)
        built = builder.training(config, cluster, task, model)
    limit, (pulled, pushed, to_next) = built.step.limit, _of_step(built, str(task))
    of_round = placement.transfers([limit.renew]) if limit and limit.ends_rounds else []
    pulled_in_round, pushed_in_round = _of_worker(of_round, str(task))
    waiting = [one for one in of_round if _is_certain(built.graph, one)]
    waiting_pulled, waiting_pushed = _of_worker(waiting, str(task)) if waiting != of_round else (None, None)
    return Plan(
        variables=variables,
        ps_bytes=dict(sorted(totals.items())),
        packed_bytes=packed,
        pulled=pulled,
        pushed=pushed,
        to_next=to_next,
        round_pulled=pulled_in_round,
        round_pushed=pushed_in_round,
        waiting_pulled=waiting_pulled,
        waiting_pushed=waiting_pushed,
        kept=[slot.op.name for slot in built.step.kept_slots],
        rounds=built.rounds,
        plain=make(config.replace(wire="plain"), cluster, model) if packs else None,
    )


def _of_worker(
    transfers: Sequence[placement.Transfer], task: str
) -> tuple[Sequence[placement.Transfer], Sequence[placement.Transfer]]:
    """Return what a worker gets, and what it sends."""
    return [one for one in transfers if one.target == task], [one for one in transfers if one.source == task]


def _is_certain(graph: Graph, transfer: placement.Transfer) -> bool:
    """Return whether a tensor is sent whenever its operation runs: it is in no branch of a condition."""
    op = graph.get_operation_by_name(transfer.tensor.lstrip("^").split(":")[0])
    return graph_editor.is_in_every_step(op)


def _of_step(built: builder.TrainGraph, task: str) -> Sequence[Sequence[placement.Transfer]]:
    """Return what a worker gets from PS or the chief in a step, what it sends them, and what it sends to a worker."""
    transfers = placement.transfers(built.fetches)
    # Fetched tensors cross the wire like any others.
    fetched = [placement.fetched(tensor, task) for tensor in (built.next_ticket, built.spec.loss)]
    transfers += [transfer for transfer in fetched if transfer is not None and transfer not in transfers]
    sent = [transfer for transfer in transfers if transfer.source == task]
    pulled = [one for one in transfers if one.target == task and not one.source.startswith("worker/")]
    to_next = [one for one in sent if one.target.startswith("worker/")]
    return pulled, [one for one in sent if one not in to_next], to_next
