"""Build the graph in which a worker trains: the model, the mode, and the passes over both, in their order."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.converters import INT32_MAX
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.models.loader import Model
from tfps.models.spec import ModeKeys, ModelSpec
from tfps.modes.atomic_update import leaves
from tfps.modes.base import Mode, ModeContext, Step
from tfps.modes.registry import mode_of
from tfps.runtime.graph import inputs, layout, model_calls, placement, variable_check
from tfps.runtime.graph.background_updates import unrolled
from tfps.runtime.graph.graph_scope import new_graph, on_cluster
from tfps.runtime.graph.layout import Layout
from tfps.runtime.graph.passes import (
    embedding_rows,
    loop_hoisting,
    model_updates,
    nan_guard,
    variable_splitting,
    wire_packing,
)
from tfps.runtime.graph.passes.snapshot import Place, saved_name
from tfps.runtime.graph.passes.variable_packing import Packing, can_pack
from tfps.tf_types import Graph, Operation, Optimizer, Variable

_T = TypeVar("_T")
_WORKER_STRIDE = 7_368_787  # difference between the seeds of two workers


@dataclass(frozen=True)
class TrainGraph:
    """The graph in which one worker trains.

    Attributes:
        batches: int64 scalar: the number of batches in the input, or INFINITE or UNKNOWN_CARDINALITY of
            ``tf.data.experimental``.
        examples: int64 scalar: the number of examples in the batch of a step.
        next_ticket: int64 [1], drawn at the end of a step.
        updates: Operation that the chief repeats in the background, several updates of the mode, or ``None``.
        load: Operation to run when the variables have their first values; see ``variable_packing``.
        store: Operation to run before the variables are read by their names.
        places: Maps the name of a packed variable to its place.
        layout: The place of each variable, in readable form. It is the same on all workers.
        may_be_inf: Names of the model's variables that no optimizer updates. Inf in them may be intended.
        keeps_order: Whether a step must start after the one before it has ended, because the model itself makes changes
            that two concurrent steps could lose; see ``model_updates.need_order``.
    """

    graph: Graph
    global_step: Variable
    iterator: Any
    batches: Any
    examples: Any
    spec: ModelSpec
    mode: Mode
    step: Step
    next_ticket: Any
    updates: Any
    load: Any
    store: Any
    places: Mapping[str, Place]
    layout: Layout
    may_be_inf: Collection[str]
    summary: Any
    num_workers: int
    keeps_order: bool

    @property
    def fetches(self) -> list[Any]:
        """The fetches of one step in the training loop."""
        return [self.next_ticket, self.spec.loss, self.step.train_op]


def training(config: JobConfig, cluster: Cluster, task: Task, model: Model) -> TrainGraph:
    """Build a worker's training graph.

    Raises:
        ModelError: If the model fails, or returns something that its contract does not allow.
    """
    mode = mode_of(config)
    with new_graph(config) as graph:
        with on_cluster(config, cluster, task):
            global_step = tf.train.get_or_create_global_step()
            source = inputs.input_of(model, ModeKeys.TRAIN, config, task.device, cluster.num_workers, task.index)
            iterator, batches, batch = source
            with model_calls.seeded(_seed(config, task)):  # after the input, which must be the same on all workers
                spec = model_calls.spec(model, ModeKeys.TRAIN, config, *batch)
            own = {saved_name(variable) for variable in tf.global_variables()}
            if task.is_chief:
                variable_splitting.tell(graph, spec.optimizer, config)
            examples = tf.convert_to_tensor(inputs.examples_of(*batch), tf.int64)
            loop_hoisting.hoist_loop_reads(graph)  # before there are gradients
            checked = model_updates.check(graph)
            spec, updates = _with_own_updates(graph, spec, on_ps=task.is_chief or not mode.is_blocking)
            inputs.only_with(inputs.next_of(iterator), [spec.loss, *updates])
            summary = tf.summary.merge_all()
        shown = [spec.loss, *spec.log_tensors.values(), *([] if summary is None else [summary])]
        if problem := embedding_rows.problem([*shown, *updates]):
            raise ModelError(f"--model={model.name}: {model.line_of('model_fn')}: {problem}")
        variable_check.check_first_values(model, graph, placement.ancestors([*shown, *updates]))
        # Slots live with their variables, so the strategy must not count them again.
        with (
            tf.device(placement.device_setter(cluster, task, lambda _op: 0)),
            placement.local_variables_on(task.device),
        ):
            context = ModeContext(config, cluster, task)
            packing = _packing(spec.optimizer, config)
            used = set(placement.ancestors([*shown, *updates]))
            optimizer = nan_guard.CheckedOptimizer(
                packing or spec.optimizer,
                packing.name_of if packing else _name_of,
                room=_room(config, mode.gradients_per_update(cluster.num_workers)),
                sent=[inputs.next_of(iterator), *(tensor for tensor, _ in checked if tensor.op in used)],
            )
            known = set(graph.get_operations())
            step = _built(model, lambda: mode.build_step(optimizer, spec.loss, global_step, context))
            made = [op for op in graph.get_operations() if op not in known]
            model_updates.put_before(graph, updates, made, optimizer.gates, step.update)
            model_updates.put_after(graph, updates, optimizer.checks)
            step = _with_updates(step, updates) if updates else step
            next_ticket = step.draw_after(1, lambda op: op)
        placement.place_unplaced_ops(graph, task.device)
        if packing:
            apart = [] if step.update is None else [step.update]
            # Initializers of local variables may read packed variables, too.
            first = [variable.initializer for variable in tf.local_variables()]
            packing.redirect(placement.ancestors([step.train_op, *apart, *shown, *first]))
        if config.wire != "plain":
            halved = None
            if config.wire == "bfloat16":
                trained = [*optimizer.updated, *(packing.wholes if packing else [])]
                halved = model_updates.Exact(graph, updates, trained).may_be_halved
            wire_packing.pack(graph, [next_ticket, spec.loss, step.train_op], halved)
        background = _built(model, lambda: unrolled(graph, step, config.wire != "plain"))
        places = packing.places() if packing else {}
        return TrainGraph(
            graph=graph,
            global_step=global_step,
            iterator=iterator,
            batches=batches,
            examples=examples,
            spec=spec,
            mode=mode,
            step=step,
            next_ticket=next_ticket,
            updates=background,
            load=packing.load() if packing else tf.no_op(),
            store=packing.store() if packing else tf.no_op(),
            places=places,
            layout=layout.of(graph, places),
            may_be_inf=own - {saved_name(variable) for variable in optimizer.updated},
            summary=summary if task.is_chief else None,
            num_workers=cluster.num_workers,
            keeps_order=model_updates.need_order(graph, [spec.loss, *updates], optimizer.updated),
        )


def _with_own_updates(graph: Graph, spec: ModelSpec, on_ps: bool) -> tuple[ModelSpec, Sequence[Operation]]:
    """Return the model's spec and its own updates. Unless ``on_ps``, drop logged tensors that change a PS."""
    logged = {n: t for n, t in spec.log_tensors.items() if on_ps or not model_updates.changes_ps(graph, t)}
    summaries = graph.get_collection(tf.GraphKeys.SUMMARIES)
    updates = model_updates.of_step(graph, on_ps, spec.loss, [*logged.values(), *summaries])
    # Passes cannot redirect a fetched tensor, so fetch an identity of each logged tensor.
    return dataclasses.replace(spec, log_tensors={n: tf.identity(t) for n, t in logged.items()}), updates


def _with_updates(step: Step, updates: Sequence[Operation]) -> Step:
    """Return a step that also runs the model's own updates.

    The chief's background update may read what they change, so the next step waits for them.
    """
    barrier = (
        step.read_barrier
        if step.update is None
        else (*step.read_barrier, *(leaf for op in updates for leaf in leaves(op)))
    )
    return dataclasses.replace(step, train_op=tf.group(step.train_op, *updates), read_barrier=barrier)


def _seed(config: JobConfig, task: Task) -> int:
    """Return the random seed of a worker. Noise that is equal on all workers would not average out."""
    return (config.seed + _WORKER_STRIDE * task.index) % (INT32_MAX - 1)


def _room(config: JobConfig, summed: int) -> float:
    """Return the factor by which gradients may grow and must stay finite: some are summed, and bfloat16 rounds up."""
    return summed * (1.01 if config.wire == "bfloat16" else 1.0)


def _packing(optimizer: Optimizer, config: JobConfig) -> Packing | None:
    if config.wire == "plain" or not can_pack(optimizer):
        return None
    return Packing(optimizer, scalars=config.wire != "bfloat16")


def _name_of(variable: Variable) -> str:
    return str(variable.op.name)


def _built(model: Model, build: Callable[[], _T]) -> _T:
    """Build what a mode adds for a model. Errors in there come from the model's loss or optimizer."""
    try:
        return build()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"--model={model.name}: {model.line_of('model_fn')}: no gradient step can be built: {error}"
        ) from error
