"""What a worker is made of: its training graph, and what works with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models.model import Model
from tfps.runtime.coordination.eviction import Eviction
from tfps.runtime.coordination.heartbeat import EVERY_SECS, Heartbeat
from tfps.runtime.coordination.job_state import JobState, WorkerTotals
from tfps.runtime.coordination.partial_updates import PartialUpdates
from tfps.runtime.coordination.restart_barrier import RestartBarrier
from tfps.runtime.coordination.state_reader import JobStateReader
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.graph import builder
from tfps.runtime.graph.builder import TrainGraph
from tfps.runtime.graph.placement import ancestors
from tfps.runtime.graph.towers import devices
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.training.chief import Chief
from tfps.runtime.training.connection import Connection
from tfps.runtime.training.other_workers import OtherWorkers
from tfps.runtime.training.peer_monitor import PeerMonitor
from tfps.runtime.training.worker_progress import Progress
from tfps.tf_types import Graph, Operation, Session, Tensor


@dataclass(frozen=True)
class InitOperations:
    """Operations that a session of the worker starts with.

    Attributes:
        tables: Initializes the lookup tables.
        input: Initializes the tables and the input.
        local: Initializes the local variables; their values may come from variables on the PS.
    """

    tables: Operation
    input: Operation
    local: Operation


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker.

    Attributes:
        config: The job.
        cluster: Its tasks.
        task: The worker.
        model: The model.
        built: The training graph.
        init: The operations that initialize what is not on the PS.
        connection: The worker's sessions.
        state: The job's state on the PS.
        partial: The partial updates of this worker.
        chief: The chief's duties; ``None`` on other workers.
        heartbeat: Tells the PS that this worker is alive.
        reader: Reads the job's state while the training session is blocked.
        monitor: Finds lost tasks and stalls.
        others: The other workers.
        barrier: Lets all workers start and restart together.
        eviction: Evicts lost workers that others wait for.
    """

    config: JobConfig
    cluster: Cluster
    task: Task
    model: Model
    built: TrainGraph
    init: InitOperations
    connection: Connection
    state: JobState
    partial: PartialUpdates
    chief: Chief | None
    heartbeat: Heartbeat
    reader: JobStateReader
    monitor: PeerMonitor
    others: OtherWorkers
    barrier: RestartBarrier
    eviction: Eviction

    def global_step(self) -> int:
        """Return the global step on the PS."""
        return int(self.connection.session.run(self.built.global_step))

    def has_trained_all(self, progress: Progress) -> bool:
        """Return whether this worker takes no further step though others may: its input has ended."""
        return self.built.step.any_worker_can_finish and (progress.input_ended or self.barrier.over)

    def is_at_end(self) -> bool:
        """Return whether ``--max_steps`` or ``--epochs`` is reached."""
        position = self.built.iterator.position
        is_read = position is not None and position.is_read(self.connection.session)
        return is_read or self.global_step() >= self.config.max_steps

    def send_heartbeats(self, session: Session) -> None:
        """Send heartbeats from now on, through this session or one that needs no other worker.

        A session that trains may not open until a cut between two workers is over.
        """
        if self.heartbeat.graph is None:
            self.heartbeat.use(session)
        elif not self.heartbeat.is_used:
            self.heartbeat.use(self.connection.new_session(self.heartbeat.graph))

    def leave(self) -> None:
        """Let no other worker wait for this one any more: it takes no further step, or none for now."""
        if self.built.step.leave is not None:
            self.connection.session.run(self.built.step.leave)

    def rejoin(self) -> None:
        """Let others wait for this worker again, which takes a step after all."""
        if self.built.step.rejoin is not None:
            self.connection.session.run(self.built.step.rejoin)

    def write_phase(self, phase: int, progress: Progress) -> None:
        """Write this worker's phase and its work so far on the PS."""
        self.state.write(self.connection.session, phase, self.totals(progress))

    def totals(self, progress: Progress) -> WorkerTotals:
        """Return the work of this worker so far, with that of lost processes that it has replaced."""
        before, unreported = self.heartbeat.before, self.heartbeat.unreported
        timed = before.steps + progress.steps
        secs = before.secs + (progress.seconds if progress.steps else 0.0)
        more = min(unreported * secs / timed, EVERY_SECS) if timed else 0.0  # at their pace, since the last heartbeat
        return WorkerTotals(
            steps=timed + unreported,
            skipped=before.skipped + progress.skipped,
            secs=secs + more if timed else 0.0,
            batches=before.batches + progress.batches,
            examples=before.examples + progress.examples,
        )

    def totals_of_workers(self, progress: Progress) -> Sequence[WorkerTotals]:
        """Return the work of all workers so far, on the chief."""
        return [self.totals(progress), *self.state.totals(self.connection.session)[1:]]

    def counted_steps(self, first: int) -> Sequence[int]:
        """Return how many steps each worker has taken in a run from step ``first`` on, as the PS know it.

        Empty where they do not. Where an update has one gradient of each worker, it is a step of each.
        """
        session, workers = self.connection.session, self.cluster.num_workers
        if self.built.step.steps_taken is not None:
            return [int(steps) for steps in session.run(self.built.step.steps_taken)]
        if self.built.mode.is_blocking and self.built.mode.gradients_per_update(self.config, workers) == workers:
            return [self.global_step() - first] * workers
        return []

    def own_steps(self, progress: Progress) -> int:
        """Return how many steps this worker has taken: as the PS counted them, or else as it did."""
        taken = self.built.step.steps_taken
        if taken is None:
            return self.totals(progress).steps
        return int(self.connection.session.run(taken)[self.task.index])

    def steps_of_workers(self, first: int, progress: Progress) -> Sequence[int]:
        """Return how many steps each worker has taken, on the chief, when the others have signed off or are gone.

        What one that is gone has reported may be too low.
        """
        steps, counted = [totals.steps for totals in self.totals_of_workers(progress)], self.counted_steps(first)
        gone = self.others.not_done(self.connection.session) if counted else []
        return [counted[index] if Task("worker", index) in gone else own for index, own in enumerate(steps)]


def build(
    config: JobConfig,
    cluster: Cluster,
    task: Task,
    model: Model,
    stop: StopRequest,
    pace: Callable[[], WorkerPace | None],
) -> WorkerParts:
    """Build the graphs of a worker, and its parts. Opens no connection, so that a wrong model is reported early.

    ``pace`` returns the worker's progress; ``None`` if it does not train yet.

    Raises:
        ConfigError: If the model is wrong, or the worker has fewer devices than it is to use.
    """
    devices.check(config)
    built = builder.training(config, cluster, task, model)
    connection = Connection(built.graph)
    with built.graph.as_default():
        state = JobState(cluster, task.index)
        tables = tf.tables_initializer()
        init = InitOperations(tables, tf.group(tables, built.iterator.initializer), tf.local_variables_initializer())
        partial = PartialUpdates(built.step, task.index)
        chief = Chief(config, cluster, model, built, connection) if task.is_chief else None
    heartbeat = _heartbeat(cluster, task, built, state, pace)
    reader = _reader(built, connection, heartbeat)
    monitor = PeerMonitor(config, cluster, task, built.mode, reader, heartbeat.silent_secs)
    return WorkerParts(
        *(config, cluster, task, model, built, init, connection, state, partial, chief),
        heartbeat=heartbeat,
        reader=reader,
        monitor=monitor,
        others=OtherWorkers(cluster, task, state, monitor.are_gone, built.step.fence),
        barrier=RestartBarrier(
            *(state, chief, built.mode.is_blocking, stop.wait_until, built.step.updates_ahead, built.step.ended),
            can_spare=monitor.can_spare,
        ),
        eviction=Eviction(cluster, task, built.step.fence, heartbeat, reader),
    )


def _heartbeat(
    cluster: Cluster, task: Task, built: TrainGraph, state: JobState, pace: Callable[[], WorkerPace | None]
) -> Heartbeat:
    """Return the heartbeat. A session on a graph that calls other workers waits for them, so then it has its own."""
    if not built.step.calls_workers:
        return Heartbeat(state, pace)
    with tf.Graph().as_default() as graph:
        return Heartbeat(JobState(cluster, task.index), pace, graph)


def _reader(built: TrainGraph, connection: Connection, heartbeat: Heartbeat) -> JobStateReader:
    """Return what reads the job's state, also while another worker is lost: in the graph of the heartbeat."""
    graph, ahead, awaited = heartbeat.graph, built.step.updates_ahead, built.step.limit and built.step.limit.awaited
    if graph is None:
        return JobStateReader(connection.new_session, heartbeat.state, ahead, heartbeat.is_heard, awaited)
    with graph.as_default():
        ahead, awaited = _copied(built.graph, [ahead, awaited])
    return JobStateReader(lambda: connection.new_session(graph), heartbeat.state, ahead, heartbeat.is_heard, awaited)


def _copied(graph: Graph, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return copies of some tensors of another graph, in the default graph."""
    given = [tensor for tensor in tensors if tensor is not None]
    needed = tf.GraphDef(node=[op.node_def for op in ancestors(given)], versions=graph.graph_def_versions)
    made = iter(tf.import_graph_def(needed, return_elements=[one.name for one in given], name="training"))
    return [None if tensor is None else next(made) for tensor in tensors]
