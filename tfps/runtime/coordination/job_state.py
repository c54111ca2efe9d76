"""The job's state, held on the PS as TensorFlow resources, so that the tasks agree among themselves on the end.

Each PS holds a vector with a phase for each worker; PS 0 also holds each worker's totals. Start-up::

    ps         sets its state to zero, and stores the options with which it was started
    worker     same options? (``compatibility``) -> reads which PS it joined before -> joins all PS
    chief      initializes the variables (first values, or a checkpoint's) -> released = generation 0
    workers    wait until released >= 0 -> train

The end:

1. In ``async``, a worker that has drawn all tickets is IDLE until ``max_steps`` updates are applied: another worker may
   be lost, or have no more input, while it holds a ticket. When no other worker is RUNNING, the first IDLE one takes
   those steps. The chief is EXHAUSTED when its own input has ended, and waits for the others. Then it is FINISHING:
   a worker that comes back from now on takes no step. Such a worker writes RUNNING before it reads the chief's phase,
   and the chief looks at the workers again after it has written FINISHING, so at least one of them sees the other.
2. A worker that is done (or asked to stop) writes DONE (or STOPPED) on every PS, and exits. The chief does so last,
   when the final checkpoint, the evaluation and the summary are written. A worker that cannot continue, and could not
   after a restart either, writes minus its exit code.
3. A PS exits when every worker is DONE, or one has failed.

A worker that finds that it has joined before was restarted, by a platform or a person. If it has joined every PS, the
PS hold everything, and no step is lost:

- If it had come to its end (DONE, EXHAUSTED, FINISHING, STOPPED_AT_END), it takes no further step.
- Where no worker waits for another (``async``; before the first step; all others are DONE), it continues alone.
- In ``sync``, where all steps are taken or the input of any worker has ended, training has ended for all. Nobody waits
  for a worker then. A restarted chief still requests the restart below: it interrupts those who wait for what the lost
  chief has not sent, and they find that nothing is left.
- In ``sync`` the others wait for what the lost worker held, so all workers restart together::

      restarted worker   generation += 1 on PS 0
      every worker       checks the generation regularly -> interrupts its step -> arrived[i] = generation
      chief              all RUNNING workers have arrived -> lets the update finish that has started
                         -> clears the remains of interrupted steps -> released = generation
      every worker       continues at the present step

  A worker that is lost during a restart requests the next one.

If it has joined only some PS, the others were restarted and lack their variables. If the chief was lost in an update
that one PS had finished and another had not, the variables are of two steps. Then the job has to restart from its
checkpoint: the worker sets ``aborted`` on the PS that it had joined, and exits. Every task that then misses a PS exits,
too. The platform restarts them all, and no worker has joined.

A process that was taken for lost (it was frozen, or cut off) may come back after it was replaced. When its replacement
opened its first session, the PS forgot the sessions of the process before (TensorFlow's ``SessionMgr``, by the task's
name and incarnation). Therefore its requests fail, and it exits. A session that it opened would end its replacement's.
So a worker opens a session only if the PS have just answered its heartbeat.
"""

import dataclasses
import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster
from tfps.runtime.coordination.job_variables import every_ps_variables, first_ps_variables
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.tf_types import Session


class Phase(enum.IntEnum):
    """What a worker is doing, as it writes it on every PS; a negative number is minus the exit code of a failure."""

    RUNNING = 0
    STOPPED = 1
    DONE = 2
    IDLE = 3
    EXHAUSTED = 4
    FINISHING = 5
    STOPPED_AT_END = 6


AT_WORK = (Phase.RUNNING, Phase.IDLE, Phase.EXHAUSTED, Phase.FINISHING)
AT_ITS_END = (Phase.DONE, Phase.EXHAUSTED, Phase.FINISHING, Phase.STOPPED_AT_END)
_WHEN = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # the place of ``WorkerPace.when`` in a heartbeat


@dataclass(frozen=True)
class WorkerTotals:
    """The work of a worker so far, all its processes together.

    Attributes:
        steps: How many steps it has taken.
        skipped: How many batches it has skipped.
        secs: For how many seconds it has trained.
        batches: How many of its steps had a known batch size.
        examples: How many examples were in these batches.
    """

    steps: int = 0
    skipped: int = 0
    secs: float = 0.0
    batches: int = 0
    examples: int = 0

    @property
    def batch_size(self) -> float:
        """The mean number of examples in a batch; 0 if that is not known."""
        return self.examples / self.batches if self.batches else 0.0


@dataclass(frozen=True)
class RestartState:
    """How far a restart of all workers has come.

    Attributes:
        generation: The newest generation.
        released: The generation in which all workers may continue.
        arrived: By worker, the generation in which it has arrived.
        phases: By worker, its phase.
    """

    generation: int
    released: int
    arrived: Sequence[int]
    phases: Sequence[int]


class JobState:
    """The state on all PS, as one worker accesses it. Build it while the worker's graph is the default one."""

    def __init__(self, cluster: Cluster, worker: int) -> None:
        servers, first = every_ps_variables(cluster), first_ps_variables(cluster)
        self._phase = tf.placeholder(tf.int32, [], name="tfps/phase")
        self._totals = tf.placeholder(tf.float64, [5], name="tfps/totals")
        totals = first.totals.scatter_update(tf.IndexedSlices(self._totals, worker)).op
        with tf.control_dependencies([totals]):  # it is on the same PS; the others do not wait for it
            phases = [servers[0].phase.scatter_update(tf.IndexedSlices(self._phase, worker))]
        phases += [ps.phase.scatter_update(tf.IndexedSlices(self._phase, worker)) for ps in servers[1:]]
        self._write = tf.group(*phases)
        self._at = tf.placeholder(tf.float64, [9], name="tfps/beat")
        self._beats, self._signed = first.beats.read_value(), first.totals.read_value()
        self._generation = tf.placeholder(tf.int64, [], name="tfps/generation")
        self._release = first.released.assign(self._generation, read_value=False)
        self._request_restart = first.generation.assign_add(1, read_value=False)
        generation = first.generation.read_value()
        with tf.device(first.generation.device):
            self._arrive = first.arrived.scatter_update(tf.IndexedSlices(generation, worker)).op, generation
            self._now = tf.timestamp()  # by the clock of PS 0, as the workers' may differ
            self._beat = first.beats.scatter_update(tf.IndexedSlices(self._at + self._now * _WHEN, worker)).op
            beaten = first.pulse.scatter_add(tf.IndexedSlices(tf.constant(1, tf.int64), worker)).op
            with tf.control_dependencies([beaten]):
                self._pulses = first.pulse.read_value()
        phase = servers[0].phase.read_value()
        self._look = [*(v.read_value() for v in (first.generation, first.released, first.arrived)), phase]
        self._read = phase, self._signed
        self._joined = [ps.joined.read_value() for ps in servers]
        self._sent, self._find = tf.placeholder(tf.int64, [], name="tfps/sent"), []
        for ps in servers:
            with tf.device(ps.phase.device):
                self._find.append(tf.identity(self._sent).op)
        self._mark = tf.group(*(ps.joined.scatter_update(tf.IndexedSlices(True, worker)) for ps in servers))
        self._abort = [ps.aborted.assign(True, read_value=False) for ps in servers]
        self._terms = [ps.terms.read_value() for ps in servers]
        self._run = tf.placeholder(tf.string, [], name="tfps/run")
        self._set_run = first.run.assign(self._run, read_value=False)
        self._present_run = first.run.read_value()
        self._worker = worker
        self._up = tf.group(
            *(variable.read_value().op for held in (*servers, first) for variable in vars(held).values())
        )

    def write(self, session: Session, phase: int, totals: WorkerTotals) -> None:
        """Write this worker's totals to PS 0, and then its phase to every PS."""
        session.run(self._write, {self._phase: phase, self._totals: dataclasses.astuple(totals)})

    def heartbeat_writer(self, session: Session) -> Callable[[WorkerPace], None]:
        """Return a function that writes this worker's heartbeat; ``restart_state_reader`` explains why a function."""
        beat = session.make_callable(self._beat, [self._at])
        return lambda pace: beat(dataclasses.astuple(replace(pace, when=(pace.when or -math.inf) - time.time())))

    def beats(self, session: Session) -> Callable[[], list[WorkerPace]]:
        """Return a function that reads each worker's last heartbeat; ``restart_state_reader`` explains why.

        Their times are of the clock of PS 0, which ``now`` reads.
        """
        read = session.make_callable(self._beats)
        return lambda: list(map(_pace, read().tolist()))

    def now(self, session: Session) -> float:
        """Return the time of PS 0, in seconds since 1970."""
        return float(session.run(self._now))

    def totals(self, session: Session) -> list[WorkerTotals]:
        """Return each worker's totals: as it wrote them with its phase, or its last heartbeat if that has more."""
        signed, beats = session.run([self._signed, self._beats])
        return [_totals(row, _pace(beat)) for row, beat in zip(signed.tolist(), beats.tolist(), strict=True)]

    def release(self, session: Session, generation: int = 0) -> None:
        """Let the workers continue: the variables have their values, and nothing is left of an earlier generation."""
        session.run(self._release, {self._generation: generation})

    def request_restart(self, session: Session) -> None:
        """Request a restart of all workers."""
        session.run(self._request_restart)

    def arrive(self, session: Session) -> int:
        """Arrive in the newest generation, and return it."""
        return int(session.run(self._arrive)[1])

    def restart_state_reader(self, session: Session) -> Callable[[], RestartState]:
        """Return a function that reads how far a restart of all workers has come.

        It can be called while another thread adds to the graph. ``session.run`` cannot, because it would take in
        incomplete operations.
        """
        look = session.make_callable(self._look)

        def read() -> RestartState:
            generation, released, arrived, phases = look()
            return RestartState(int(generation), int(released), arrived.tolist(), phases.tolist())

        return read

    def restart_state(self, session: Session) -> RestartState:
        """Return how far a restart of all workers has come."""
        return self.restart_state_reader(session)()

    def is_up(self, session: Session) -> bool:
        """Return whether every PS has initialized its state."""
        try:
            session.run(self._up)
        except tf.errors.FailedPreconditionError:
            return False
        return True

    def is_found(self, session: Session) -> bool:
        """Return whether every PS can receive from this worker, for which it connects to the worker's address.

        Raises:
            tf.errors.UnavailableError: If a PS cannot be reached. TensorFlow's master keeps a graph that it failed to
                register there in that state for good (master_session.cc), so no later run would show more.
        """
        try:
            session.run(self._find, {self._sent: 0})
        except tf.errors.UnavailableError as error:
            if f"remote target /job:worker/replica:0/task:{self._worker} " not in f"{error} ":
                raise
            return False
        return True

    def terms(self, session: Session) -> list[str]:
        """Return the terms of each PS."""
        return [terms.decode() for terms in session.run(self._terms)]

    def set_run(self, session: Session, run: str) -> None:
        """Store the identity of the run whose variables the PS hold; see ``compatibility``."""
        session.run(self._set_run, {self._run: run})

    def run(self, session: Session) -> str:
        """Return what ``set_run`` stored last, or an empty string."""
        run: str = session.run(self._present_run).decode()
        return run

    def marked(self, session: Session) -> list[bool]:
        """Return for each PS whether this worker has joined it before."""
        return [bool(joined[self._worker]) for joined in session.run(self._joined)]

    def join(self, session: Session) -> None:
        """Mark this worker as joined on every PS."""
        session.run(self._mark)

    def pulse(self, session: Session) -> Callable[[], list[int]]:
        """Return a function that sends a heartbeat, and returns how many each worker has sent."""
        give = session.make_callable(self._pulses)
        return lambda: [int(pulse) for pulse in give()]

    def abort_job(self, session: Session, which: Sequence[bool] | None = None) -> None:
        """Ask all PS, or those in ``which``, to exit."""
        chosen = which or [True] * len(self._abort)
        session.run([abort for abort, is_chosen in zip(self._abort, chosen, strict=True) if is_chosen])

    def is_ready(self, session: Session) -> bool:
        """Return whether the variables have their values."""
        return self.restart_state(session).released >= 0

    def read(self, session: Session) -> tuple[list[int], list[int]]:
        """Return every worker's phase and steps."""
        phase, totals = session.run(self._read)
        return phase.tolist(), [int(steps) for steps, *_ in totals]


def _pace(row: Sequence[float]) -> WorkerPace:
    steps, global_step, when, secs, *counts, waited, is_waiting = row
    skipped, batches, examples = map(int, counts)
    own = (int(steps), int(global_step), max(when, 0.0), secs, skipped, batches, examples)
    return WorkerPace(*own, waited=waited, is_waiting=bool(is_waiting))


def _totals(signed: Sequence[float], beat: WorkerPace) -> WorkerTotals:
    """Return the totals of a worker. Every number only grows, so the larger one is the later one."""
    beaten = (beat.steps, beat.skipped, beat.secs, beat.batches, beat.examples)
    steps, skipped, secs, *rest = map(max, signed, beaten)
    return WorkerTotals(int(steps), int(skipped), secs, *map(int, rest))
