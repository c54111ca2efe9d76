"""Build the graph in which a worker trains: the model, the mode, and the passes over both.

The passes run in this order:

1. ``variable_splitting`` is active while the model creates its variables, because it decides how many there are, and
   ``exclusive_updates`` while it adds to their rows.
2. ``function_calls`` keeps the order of calls on the finished model. Passes after it add control edges to calls.
3. ``loop_hoisting`` runs on the finished model, before there are gradients. Later, their sums would change order.
4. ``model_updates.check`` and ``of_step`` find the model's own changes while the graph has no changes by an optimizer.
5. ``inputs.only_with`` makes these changes wait for the batch. It needs to know all of them.
6. ``keras_variables.freeze`` decides what the optimizer trains. ``embedding_rows.problem`` and ``variable_check`` check
   what a step uses. The checks precede the costly gradients.
7. ``Packing`` and ``nan_guard`` wrap the optimizer before the mode uses it: packing inside, so that checks see few
   gradients.
8. The mode builds the step: gradients, which ``towers`` copies for other devices, their way to the PS, tickets.
9. ``update_order.put_before`` and ``put_after`` need the gates and checks of the gradients. ``put_after`` is second,
   because it excludes what the gradients now wait for. ``with_late_summaries`` needs the checks, too.
10. ``place_unplaced_ops`` gives each operation a device. The passes after it ask on which task an operation runs.
11. ``Packing.use_packed_reads`` or ``Step.copies`` changes which variables a step uses, and what crosses the wire.
12. ``wire_packing`` (with ``embedding_rows.make_unique``) packs what crosses the wire, but no operation added later.
13. ``Step.finish`` lets the mode use the final reads. ``background_updates.unrolled`` copies the finished update of the
    chief. The steps of a run are copied still later, by the training loop, with ``unrolling``.
14. ``inputs.read_when_started`` comes last, because no other pass may take its edges for a part of the model.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.config.wire_format import WireFormat
from tfps.models.model import Model, built_by
from tfps.models.spec import ModelSpec
from tfps.modes.base import Mode, ModeContext, Step
from tfps.modes.registry import mode_of
from tfps.modes.rounds import Rounds, Shares
from tfps.modes.updates.update_ops import leaves
from tfps.runtime.graph import forward_pass, inputs, layout, placement
from tfps.runtime.graph.background_updates import unrolled, use_worker_state
from tfps.runtime.graph.checks import variable_check
from tfps.runtime.graph.forward_pass import Forward, TrainJob
from tfps.runtime.graph.graph_scope import new_graph
from tfps.runtime.graph.layout import Layout
from tfps.runtime.graph.passes import (
    function_calls,
    keras_variables,
    model_updates,
    nan_guard,
    update_order,
    wire_packing,
)
from tfps.runtime.graph.passes.snapshot import Place, saved_name
from tfps.runtime.graph.passes.variable_packing import Packing, can_pack
from tfps.tf_types import Fetch, Graph, InputIterator, Operation, Optimizer, Tensor, Variable


@dataclass(frozen=True)
class TrainGraph:
    """The graph in which one worker trains.

    Attributes:
        batches: int64 scalar: the number of batches in the input, or INFINITE or UNKNOWN_CARDINALITY of
            ``tf.data.experimental``.
        examples: int64 scalar: the number of examples in the batch of a step.
        reads_rate: Whether the model reads ``--learning_rate``.
        rounds: The rounds of the mode; ``None`` if it has none.
        next_ticket: int64 [1], drawn at the end of a step.
        updates: Operation that the chief repeats in the background, several updates of the mode, or ``None``.
        load: Operation to run when the variables have their first values; see ``variable_packing``.
        store: Operation to run before the variables are read by their names.
        places: Maps the name of a packed variable to its place.
        layout: The place of each variable, in readable form. It is the same on all workers.
        may_be_inf: Names of the model's variables that no optimizer updates. Inf in them may be intended.
        keeps_order: Whether a step must start after the one before it has ended, because the model itself makes changes
            that two concurrent steps could lose; see ``model_updates.need_order``.
        updates_use_worker_state: Whether ``updates`` use what the chief's own steps may change; see
            ``background_updates``.
    """

    graph: Graph
    global_step: Variable
    iterator: InputIterator
    batches: Tensor
    examples: Tensor
    spec: ModelSpec
    reads_rate: bool
    mode: Mode
    step: Step
    rounds: Rounds | None
    next_ticket: Tensor
    updates: Operation | None
    load: Operation
    store: Operation
    places: Mapping[str, Place]
    layout: Layout
    may_be_inf: Collection[str]
    summary: Tensor | None
    num_workers: int
    keeps_order: bool
    updates_use_worker_state: bool

    @property
    def fetches(self) -> list[Fetch]:
        """The fetches of one step in the training loop."""
        return [self.next_ticket, self.spec.loss, self.step.train_op]

    @property
    def remedy(self) -> str:
        """What to try if training diverges: a model that does not read ``--learning_rate`` refuses it."""
        rate = "--learning_rate" if self.reads_rate else "learning rate in the model's optimizer"
        return f"try a smaller {rate}"


def training(config: JobConfig, cluster: Cluster, task: Task, model: Model) -> TrainGraph:
    """Build a worker's training graph, in the order of the module's docstring.

    Raises:
        ModelError: If the model fails, or returns something that its contract does not allow.
    """
    job = TrainJob(config, cluster, task, model, mode_of(config), WireFormat.of(config.wire))
    with new_graph(config) as graph, keras_variables.noted() as of_keras:
        forward = forward_pass.build(job, graph)
        frozen = keras_variables.freeze(model, graph, of_keras)
        forward_pass.check(job, forward)
        forward, backward = _backward(job, forward)
        variable_check.check_trained(model, graph, backward.optimizer.updated, frozen)
        forward = forward_pass.with_late_summaries(job, forward, backward.optimizer, backward.step)
        _check_counters(job, forward, backward)
        placement.place_unplaced_ops(graph, task.device)
        built_by(model, lambda: _redirect(forward, backward))
        _pack_transfers(job, forward, backward)
        if forward.towers:
            forward.towers.receive_once([backward.next_ticket, backward.step.train_op, *forward.shown], task.device)
        built_by(model, backward.step.finish or (lambda: None))
        updates = built_by(model, lambda: unrolled(graph, backward.step, job.wire.pack))
        inputs.read_when_started([backward.next_ticket, backward.step.train_op, *forward.shown], forward.batches)
        return _train_graph(job, forward, backward, updates)


@dataclass(frozen=True)
class _Backward:
    """What the optimizer and the mode add to the graph.

    Attributes:
        optimizer: The optimizer, with the checks.
        packing: The packed variables; ``None`` if variables are not packed.
        step: The step of the mode, with the model's own updates.
        next_ticket: See ``TrainGraph``.
        used: The operations of the model that the step needs, such as a learning rate that it changes.
    """

    optimizer: nan_guard.CheckedOptimizer
    packing: Packing | None
    step: Step
    next_ticket: Tensor
    used: Sequence[Operation]


def _backward(job: TrainJob, forward: Forward) -> tuple[Forward, _Backward]:
    """Build the gradients and the step of the mode, and put the model's own updates in order with them."""
    graph, shares = forward.graph, _shares(forward)
    context = ModeContext(job.config, job.cluster, job.task, forward.examples, shares)
    # Slots live with their variables, so the strategy must not count them again.
    with (
        tf.device(placement.device_setter(job.cluster, job.task, lambda _op: 0)),
        placement.local_variables_on(job.task.device),
    ):
        packing = None if job.mode.trains_on_copies else _packing(forward.spec.optimizer, job.wire)
        optimizer = _checked_optimizer(job, forward, packing)
        known = set(graph.get_operations())
        step = built_by(
            job.model, lambda: job.mode.build_step(optimizer, forward.spec.loss, forward.global_step, context)
        )
        step = forward.fenced(step)
        loss, forward = forward.spec.loss, forward_pass.of_all_towers(forward)
        updates, of_towers = forward.updates, forward.towers.ops if forward.towers else ()
        # What a step on copies exchanges is no part of it.
        inside = graph.get_operations() if step.copies is None else placement.ancestors([step.train_op])
        made = [op for op in inside if op not in known and op not in of_towers]
        if forward.towers:
            forward.towers.use_mean(loss, forward.spec.loss, made)
        certain = update_order.put_before(graph, updates, made, optimizer.gates, optimizer.updated, step)
        # A mean may never be made: an input has ended, or a worker is lost and all take the step again.
        applied = [*certain, step.train_op] if job.mode.may_repeat_steps else []
        update_order.put_after(graph, updates, [*optimizer.checks, *applied])
        step = _with_updates(step, updates) if updates or step.end else step
        next_ticket = step.draw_after(1, lambda op: op)
        function_calls.order_inputs(graph)
        used = [op for op in placement.ancestors([step.train_op]) if op in known]
    return forward, _Backward(optimizer, packing, step, next_ticket, used)


def _shares(forward: Forward) -> Shares | None:
    stream = forward.iterator.stream
    sizes = stream.share_sizes() if stream else None
    return Shares(sizes, stream.batch_size) if sizes else None


def _checked_optimizer(job: TrainJob, forward: Forward, packing: Packing | None) -> nan_guard.CheckedOptimizer:
    """Return the model's optimizer with checks of the loss, the gradients, and what the model's own updates send."""
    used, read = set(placement.ancestors([*forward.shown, *forward.updates])), inputs.next_of(forward.iterator)
    return nan_guard.CheckedOptimizer(
        packing or forward.spec.optimizer,
        packing.name_of if packing else _name_of,
        room=job.mode.gradients_per_update(job.config, job.cluster.num_workers) * (1.01 if job.wire.halves else 1.0),
        sent=[read, *(tensor for tensor, _ in forward.checked if tensor.op in used)],
        towers=forward.towers,
        also=forward.counted,
    )


def _check_counters(job: TrainJob, forward: Forward, backward: _Backward) -> None:
    """Check the model's own counters on the chief, whose step has all of the model's updates in each mode."""
    if job.task.is_chief:
        own = [variable for variable in tf.global_variables() if saved_name(variable) in forward.own]
        step = backward.step
        run = placement.ancestors([step.train_op, *([] if step.update is None else [step.update]), *forward.shown])
        variable_check.check_counters(job.model, [v for v in own if v is not forward.global_step], run)


def _redirect(forward: Forward, backward: _Backward) -> None:
    """Make the step use the packed variables, or the worker's copies."""
    step = backward.step
    if step.copies is not None:
        step.copies.use(placement.ancestors([step.train_op, *forward.shown]))
    if backward.packing is None:
        return
    apart = [] if step.update is None else [step.update]
    # Initializers of local variables may read packed variables, too.
    first = [variable.initializer for variable in tf.local_variables()]
    backward.packing.use_packed_reads(placement.ancestors([step.train_op, *apart, *forward.shown, *first]))


def _pack_transfers(job: TrainJob, forward: Forward, backward: _Backward) -> None:
    """Make the tensors that a step sends travel together."""
    if not job.wire.pack or backward.step.calls_workers:
        return
    halved = None
    if job.wire.halves:
        wholes = backward.packing.wholes if backward.packing else []
        trained = [*backward.optimizer.updated, *wholes]
        halved = model_updates.Exact(forward.graph, forward.updates, trained).may_be_halved
    wire_packing.pack(forward.graph, [backward.next_ticket, forward.spec.loss, backward.step.train_op], halved)


def _train_graph(job: TrainJob, forward: Forward, backward: _Backward, updates: Operation | None) -> TrainGraph:
    graph, packing, updated = forward.graph, backward.packing, backward.optimizer.updated
    places = packing.places() if packing else {}
    return TrainGraph(
        graph=graph,
        global_step=forward.global_step,
        iterator=forward.iterator,
        batches=forward.batches,
        examples=forward.examples,
        spec=forward.spec,
        reads_rate=forward.reads_rate,
        mode=job.mode,
        step=backward.step,
        rounds=job.mode.rounds(job.config, job.cluster.num_workers, _shares(forward)),
        next_ticket=backward.next_ticket,
        updates=updates,
        load=packing.load() if packing else tf.no_op(),
        store=packing.store() if packing else tf.no_op(),
        places=places,
        layout=layout.of(graph, places),
        may_be_inf=set(forward.own) - {saved_name(variable) for variable in updated},
        summary=forward.summary if job.task.is_chief else None,
        num_workers=job.cluster.num_workers,
        keeps_order=model_updates.need_order(graph, [forward.spec.loss, *forward.updates, *backward.used], updated),
        updates_use_worker_state=use_worker_state(backward.step),
    )


def _with_updates(step: Step, updates: Sequence[Operation]) -> Step:
    """Return a step that also runs the model's own updates.

    The chief's background update may read what they change, so the next step waits for them. So it does where the loss
    of another worker, or the end of its input, can interrupt the next step of a run.
    """
    waits = step.update is not None or step.calls_workers
    barrier = (*step.read_barrier, *(leaf for op in updates for leaf in leaves(op))) if waits else step.read_barrier
    train_op = (step.end or tf.group)([step.train_op, *updates])
    return dataclasses.replace(step, train_op=train_op, read_barrier=barrier)


def _packing(optimizer: Optimizer, wire: WireFormat) -> Packing | None:
    """Return an optimizer of packed variables, if they may be packed. bfloat16 is not for scalars: these stay apart."""
    if not wire.pack or not can_pack(optimizer):
        return None
    return Packing(optimizer, scalars=not wire.halves)


def _name_of(variable: Variable) -> str:
    return str(variable.op.name)
