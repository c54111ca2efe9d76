"""The forward part of a training graph: the input, the model, and the model's own updates. There are no gradients yet.

``builder`` has the order of all passes.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.converters import INT32_MAX
from tfps.config.job_config import JobConfig
from tfps.config.wire_format import WireFormat
from tfps.data.position import Position
from tfps.errors import ModelError
from tfps.models.model import Model
from tfps.models.params import TrackedFlags, tracked_flags, unread_flags
from tfps.models.spec import ModeKeys, ModelSpec
from tfps.modes.base import Mode, Step
from tfps.runtime.graph import graph_editor, inputs, model_calls, placement
from tfps.runtime.graph.cancel_safe_iterator import CancelSafeIterator
from tfps.runtime.graph.checks import variable_check
from tfps.runtime.graph.graph_scope import on_cluster
from tfps.runtime.graph.passes import (
    embedding_rows,
    exclusive_updates,
    function_calls,
    layer_updates,
    loop_hoisting,
    model_updates,
    side_effects,
    update_order,
    variable_splitting,
)
from tfps.runtime.graph.passes.nan_guard import CheckedOptimizer
from tfps.runtime.graph.passes.snapshot import saved_name
from tfps.runtime.graph.towers import batches as tower_batches
from tfps.runtime.graph.towers import devices as tower_devices
from tfps.runtime.graph.towers.towers import Towers
from tfps.tf_types import Graph, InputIterator, Nested, Operation, Tensor, Variable

log = logging.getLogger(__name__)

_NOT_WRITTEN = (
    "the optimizer's summary %r is not written: it shows the update, which --mode=%s makes apart from the steps. Make "
    "it in compute_gradients, from the gradients of a step."
)
_LATE_UPDATE = (
    "%s%s is not run: the optimizer has put it in tf.GraphKeys.UPDATE_OPS, which is read when model_fn returns. Make "
    "it part of the operation that apply_gradients returns."
)
_EARLY_CHANGE = (
    "model_fn changes %s%s before it is certain that the step counts: the loss or a gradient waits for the change, or "
    "reads the variable in the same tf.while_loop. %s. `tfps help models` says how to change it later."
)
_COUNTS_ITSELF = (
    "the optimizer raises global_step in a condition, but tfps raises it in each step: --max_steps and what depends on "
    "global_step count all steps."
)
_NOT_UNDONE = "--on_nan=skip does not undo the change"
_NOT_SHARED = "With --mode=%s, one update may make the change several times, and a step that is stopped makes it, too"
_WORKER_STRIDE = 7_368_787  # difference between the seeds of two workers


@dataclass(frozen=True)
class TrainJob:
    """What a graph is built for: the job, the worker, the model, and what follows from the flags."""

    config: JobConfig
    cluster: Cluster
    task: Task
    model: Model
    mode: Mode
    wire: WireFormat


@dataclass(frozen=True)
class Forward:
    """The graph before there are gradients.

    Attributes:
        graph: The graph.
        global_step: The variable of the global step.
        iterator: The iterator of the input.
        batches: See ``TrainGraph``.
        examples: See ``TrainGraph``.
        spec: The model's spec, with an identity of each logged tensor.
        reads_rate: Whether the model reads ``--learning_rate``.
        own: The names of the model's variables.
        updates: The model's own updates.
        checked: The tensors that a worker sends for them and that are checked for NaN, and what they are for.
        summary: The merged summaries, or ``None``.
        towers: The towers, if the worker has several devices; ``spec`` and the rest are of the first.
    """

    graph: Graph
    global_step: Variable
    iterator: InputIterator
    batches: Tensor
    examples: Tensor
    spec: ModelSpec
    reads_rate: bool
    own: Collection[str]
    updates: Sequence[Operation]
    checked: Sequence[tuple[Tensor, str]]
    summary: Tensor | None
    towers: Towers | None = None

    @property
    def counted(self) -> Callable[[], Operation | None] | None:
        """What adds the count of a batch's examples to an update, if there is such a count."""
        return self.iterator.position.counted if self.iterator.position else None

    def fenced(self, step: Step) -> Step:
        """Return a step after whose fence other workers take the examples that are dealt to a lost one."""
        position = self.iterator.position
        return dataclasses.replace(step, fence=position.fenced(step.fence)) if position else step

    @property
    def shown(self) -> list[Tensor]:
        """The loss, and what is read in some steps."""
        summary = [] if self.summary is None else [self.summary]
        return [self.spec.loss, *self.spec.log_tensors.values(), *summary]


def build(job: TrainJob, graph: Graph) -> Forward:
    """Build the input and the model, and prepare the model's own updates."""
    config, task, model = job.config, job.task, job.model
    with on_cluster(config, job.cluster, task):
        global_step = tf.train.get_or_create_global_step()
        params = tracked_flags(config)
        iterator, batches, given, towers = _input(job, graph, params)
        batch = given[0]
        variable_check.check_input(model, global_step)
        known = set(graph.get_operations())
        # After the input, which must be the same on all workers.
        seeded = model_calls.seeded(config.seed, _seed(config, task))
        with seeded, exclusive_updates.of_model():
            spec, read = model_calls.training_spec(model, config, *batch)
        own = {saved_name(variable) for variable in tf.global_variables()}
        if task.is_chief:
            variable_splitting.log_split(graph, config)
            _log_unread(job, params.read | set(read))
        batches = inputs.batches_with(graph, known, batches)
        counts = [inputs.examples_of(*one) for one in given]
        examples = towers.examples(counts) if towers else tf.convert_to_tensor(counts[0], tf.int64)
        exclusive_updates.lock_references(graph)
        function_calls.wait_for_inputs(graph)
        loop_hoisting.hoist_loop_reads(graph)
        checked = model_updates.check(graph)
        spec, updates = _with_own_updates(graph, spec, on_ps=task.is_chief or not job.mode.updates_are_shared)
        inputs.only_with(inputs.next_of(iterator), [spec.loss, *updates])
        summary = tf.summary.merge_all()
        iterator.position = _position(job, iterator, global_step)
    reads_rate = "learning_rate" in read
    if towers:
        towers.prepare(spec.loss, [*spec.log_tensors.values()], updates)
    return Forward(
        graph, global_step, iterator, batches, examples, spec, reads_rate, own, updates, checked, summary, towers
    )


def _input(
    job: TrainJob, graph: Graph, params: TrackedFlags
) -> tuple[InputIterator, Tensor, Sequence[Nested], Towers | None]:
    """Return the iterator, the number of steps in the input, and the batch of each tower, if there are several."""
    config, task, workers = job.config, job.task, job.cluster.num_workers
    devices, of_all = tower_devices.of_worker(config, task), config.tower_updates == "all"
    source = inputs.input_of(job.model, ModeKeys.TRAIN, config, task.device, workers, task.index, params)
    iterator, batches, batch = source
    if len(devices) == 1:
        return iterator, batches, [batch], None
    *given, weights = batch
    steps = tower_batches.steps(batches, len(devices), pad=not of_all)
    return iterator, steps, given, Towers(graph, devices, given, weights, of_all)


def _position(job: TrainJob, iterator: CancelSafeIterator, global_step: Variable) -> Position | None:
    """Add the position in the data to the graph, if it is part of a checkpoint."""
    config, workers, worker = job.config, job.cluster.num_workers, job.task.index
    if config.data_policy is None or iterator.stream is None:
        return None
    return Position(iterator.stream, iterator.indices, global_step, config, workers, worker, job.mode.is_blocking)


def _log_unread(job: TrainJob, read: Container[str]) -> None:
    if flags := unread_flags(job.config, read):
        log.warning(
            "%s: --model=%s has not read it from params for training; unless it does so later, it has no effect.",
            *(" and ".join(flags), job.model.name),
        )


def of_all_towers(forward: Forward) -> Forward:
    """Return the forward part with the loss, the logged tensors and the updates of all towers, once they are built."""
    towers = forward.towers
    if towers is None:
        return forward
    logged = {name: tf.identity(towers.mean(tensor)) for name, tensor in forward.spec.log_tensors.items()}
    spec = dataclasses.replace(forward.spec, loss=towers.mean(forward.spec.loss), log_tensors=logged)
    return dataclasses.replace(forward, spec=spec, updates=[*forward.updates, *towers.also(forward.updates)])


def check(job: TrainJob, forward: Forward) -> None:
    """Check what the model has built.

    Raises:
        ModelError: If a step reads all of a table whose rows it looks up, or a variable has no first value, or the
            model changes ``global_step``, or a Keras layer changes a variable in a loop, or a queue would be empty.
    """
    used = [*forward.shown, *forward.updates]
    if problem := embedding_rows.problem(used):
        raise ModelError(f"--model={job.model.name}: {job.model.line_of('model_fn')}: {problem}")
    run = placement.ancestors(used)
    variable_check.check_first_values(job.model, forward.graph, run)
    variable_check.check_global_step(job.model, forward.global_step, run)
    variable_check.check_layers(job.model, forward.graph, run)
    variable_check.check_feeds(job.model, forward.graph, run)


def with_late_summaries(job: TrainJob, forward: Forward, optimizer: CheckedOptimizer, step: Step) -> Forward:
    """Return the forward part with the chief's summaries that the optimizer has made, such as histograms of gradients.

    The updates that the optimizer has collected are not run; a warning says so.

    They wait for the checks, because a histogram of NaN fails with an error of its own. A summary is left out if it
    would change what the step does not: in sync, only the chief's update takes the mean of the gradients.

    Args:
        job: The job.
        forward: The forward part, with the summaries of the model.
        optimizer: The optimizer, which has applied its gradients.
        step: The step of the mode.
    """
    checks = optimizer.checks
    known = [] if forward.summary is None else list(forward.summary.op.inputs)
    late = forward.graph.get_collection(tf.GraphKeys.SUMMARIES)[len(known) :]
    if not job.task.is_chief:
        return forward
    run, early = set(placement.ancestors([step.train_op])), set(placement.ancestors(checks))
    if optimizer.counts_some_steps:
        log.warning(_COUNTS_ITSELF)
    _warn_of_early_changes(job, forward, checks)
    _warn_of_late_updates(forward, run.union(placement.ancestors([step.update] if step.update is not None else [])))
    if not late:
        return forward
    lasting = side_effects.Lasting(forward.graph)
    for summary in late:
        if any(lasting.changed(op) for op in placement.ancestors([summary]) if op not in run):
            log.warning(_NOT_WRITTEN, summary.op.name, job.mode.name)
            continue
        if summary.op not in early and graph_editor.can_wait(summary.op):
            graph_editor.add_control_inputs(summary.op, checks)
        known.append(summary)
    return dataclasses.replace(forward, summary=tf.summary.merge(known) if known else None)


def _warn_of_late_updates(forward: Forward, run: Container[Operation]) -> None:
    """Warn of updates that the optimizer has collected after those of the model were taken, and does not run itself."""
    collected = layer_updates.collected(forward.graph)
    late = [update.name for update in collected if update not in forward.updates and update not in run]
    if late:
        log.warning(_LATE_UPDATE, late[0], f" and {len(late) - 1} more" if len(late) > 1 else "")


def _warn_of_early_changes(job: TrainJob, forward: Forward, checks: Sequence[Operation]) -> None:
    """Warn of the model's changes that ``update_order.put_after`` could not make wait, where a result depends on it."""
    skips = job.config.on_nan == "skip"
    shares = job.mode.updates_are_shared and job.cluster.num_workers > 1
    if not skips and not shares:
        return
    early = update_order.early_changes(forward.graph, [forward.spec.loss, *forward.updates], checks)
    names = [maker.name for maker in early if skips or placement.holds_state(maker)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning(_EARLY_CHANGE, names[0], more, _NOT_UNDONE if skips else _NOT_SHARED % job.mode.name)


def _with_own_updates(graph: Graph, spec: ModelSpec, on_ps: bool) -> tuple[ModelSpec, Sequence[Operation]]:
    """Return the model's spec and its own updates. Unless ``on_ps``, drop logged tensors that alone change a PS."""
    loss, shown = spec.loss, spec.log_tensors
    logged = {n: t for n, t in shown.items() if on_ps or not model_updates.changes_ps(graph, t, loss)}
    summaries = graph.get_collection(tf.GraphKeys.SUMMARIES)
    updates = model_updates.of_step(graph, on_ps, spec.loss, [*logged.values(), *summaries])
    # Passes cannot redirect a fetched tensor, so fetch an identity of each logged tensor.
    return dataclasses.replace(spec, log_tensors={n: tf.identity(t) for n, t in logged.items()}), updates


def _seed(config: JobConfig, task: Task) -> int:
    """Return the random seed of a worker. Noise that is equal on all workers would not average out."""
    return (config.seed + _WORKER_STRIDE * task.index) % (INT32_MAX - 1)
