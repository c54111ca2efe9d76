"""The interface between a mode and the training loop. Does not import TensorFlow.

The loop is independent of the mode. It holds tickets, which are integers. For each ticket below ``max_steps`` it takes
one step. The run that takes the last of these steps also draws the same number of new tickets::

    tickets = run(draw(n, 0))
    while all(ticket < max_steps for ticket in tickets):
        tickets = run([train_op of n steps, draw_after(n, the last of them)])
"""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.recovery import Fence, PartialUpdates, Pause, SyncRecovery
from tfps.modes.rounds import Rounds, Shares
from tfps.tf_types import Fetch, Operation, Optimizer, Session, Tensor, Variable

Copy = Callable[[Fetch], Fetch]
"""Maps a tensor or an operation of a step to its counterpart in a copy of the step."""


@dataclass(frozen=True)
class StepLimit:
    """How many steps a worker may take before it has to wait for other workers, or to do something else.

    The loop starts no run of more steps than are allowed. Where none is, it runs ``renew``, and looks again.

    Attributes:
        allowed: int64 scalar: the number of steps that this worker may take now; 0 or less for none. It never falls
            while the worker takes none.
        most: The largest possible number. A run has no more steps.
        renew: Operation that the worker runs when no step is allowed.
        patience_secs: Interrupt ``renew`` after so long, and look again. ``None``: let it end.
        awaited: bool [workers]: for which workers this one waits now. ``None`` where it waits for none.
        ends_rounds: Whether ``renew`` ends a round of steps that count only then. Then the worker runs it at its last
            step, too, and afterwards its tickets are void.
    """

    allowed: Tensor
    most: int
    renew: Operation
    patience_secs: float | None = None
    awaited: Tensor | None = None
    ends_rounds: bool = False


@dataclass(frozen=True)
class Step:
    """The operations of one mode in one worker's graph. Fields that a mode does not need keep their defaults.

    Attributes:
        train_op: Operation that takes one step: read the parameters, compute gradients, send them.
        draw: Adds n tickets to the graph and returns them, int64 [n], for use between steps. The second argument is the
            number of other tickets that the worker holds.
        draw_after: Returns tickets drawn at the end of a run whose last step is a copy of this one, int64 [n]. With
            ``reports_step``, the global step that the run has reached comes before them. With ``limit``, the number of
            steps that are allowed after the run comes directly before them. Each adds one element.
        give_back: Adds an operation to the graph and returns it. A worker runs it when its input has ended and n
            tickets are left.
        chief_init: Operation that the chief runs after the variables have their values and before any worker takes a
            step. With ``recovery``, it also runs when the workers restart together. Steps that started earlier do not
            count.
        worker_init: Operation that every worker runs before its first step, and when the workers restart.
        read_barrier: Operations of a step that must end before the next step reads any parameter.
        reports_step: Whether a run returns the global step that it has reached. Needed where a ticket does not give
            it, because other workers take the steps of earlier tickets later, or never.
        may_skip_steps: Whether others may take steps without this worker, while it takes one. Then a run takes one
            step: only after it does the worker know for which step the next one is.
        fence: Operations that another worker runs before it takes the steps that lost workers have left. ``None`` where
            requests in flight change nothing.
        update: Operation that the chief repeats in the background. It fails if its generation is over.
        update_starts: Operations that start ``update``. It must read the PS after them.
        hold: Makes each update wait, before it starts, for the given operations of the chief's step, and returns the
            operation of the step which ends when it is certain that there will be an update: the given ones should wait
            for it. ``None`` on other workers, and where there is no ``update``, or it may not wait.
        refuse: Raises ``ModelError`` for the given operations of the chief's step, which change what ``update`` uses.
            ``None`` where ``update`` always comes after them.
        recovery: How the workers restart together. ``None`` where no worker waits for another.
        updates_ahead: int64 [workers]: the number of future updates to which each worker has already contributed. The
            others wait for workers that have 0. ``None`` where no worker waits for another.
        ended: Scalar bool: training has ended for all workers: all steps are taken, or the input of one has ended.
            ``None`` where the others go on then.
        staleness: int64 [n]: how many steps of the job have seen 0, 1, ... other updates between reading and updating
            the parameters. The last element counts that many or more. ``None`` where staleness is always 0.
        any_worker_can_finish: Whether any single worker can take the steps that the others have left.
        steps_taken: int64 [workers]: the number of steps that each worker has taken in this run. ``None`` where only
            the workers know.
        rounds_made: int64 scalar: how many rounds of this run are in the variables. ``None`` where the mode has no
            rounds.
        dropped: int64 [workers]: the number of gradients of each worker that came too late. ``None`` where none can.
        pause: Keeps updates from starting while the chief saves. ``None`` where none can start then, or ``moments`` has
            a part of each.
        moments: ``updates.moments.Moments``, which block updates on a PS while its variables are read. ``None`` where
            no update can arrive while the chief saves.
        partial: Partially applied updates. ``None`` where only the chief applies updates.
        limit: How many steps the worker may take. ``None`` for no limit. Where there is one, runs may not overlap.
        leave: Operation that a worker runs when it takes no further step, so that no other waits for it.
        rejoin: Operation that a worker that has left runs before it takes a step after all. At least one is allowed
            then.
        copies: ``copies.WorkerCopies``: the step works on copies of variables on the worker. ``None`` where it works on
            the PS.
        kept_slots: The optimizer's own variables, where each worker keeps its own values and does not send them.
        calls_workers: The indices of the other workers whose servers a run calls. It fails if one is lost, and then
            this one waits until all restart together. What such a step sends is not packed.
        end: Adds an operation that ends the step when the given ones have ended: the mode's part, and the model's own
            updates. ``None`` where a step without the latter counts, too.
        before_save: Operation that the chief runs before it saves. ``None`` where there is nothing to do.
        finish: Function to call when all graph passes are done. It raises ``ValueError`` if the model reads its
            parameters in a way that the mode cannot use. ``None`` where there is nothing to do.
    """

    train_op: Operation
    draw: Callable[[int, int], Tensor]
    draw_after: Callable[[int, Copy], Tensor]
    give_back: Callable[[int], Operation]
    chief_init: Operation
    worker_init: Operation
    read_barrier: Sequence[Operation] = ()
    reports_step: bool = False
    may_skip_steps: bool = False
    fence: Fence | None = None
    update: Operation | None = None
    update_starts: Sequence[Operation] = ()
    hold: Callable[[Sequence[Operation]], Operation] | None = None
    refuse: Callable[[Sequence[Operation]], NoReturn] | None = None
    recovery: SyncRecovery | None = None
    updates_ahead: Tensor | None = None
    ended: Tensor | None = None
    staleness: Tensor | None = None
    any_worker_can_finish: bool = False
    steps_taken: Tensor | None = None
    rounds_made: Tensor | None = None
    dropped: Tensor | None = None
    pause: Pause | None = None
    moments: Any = None
    partial: PartialUpdates | None = None
    limit: StepLimit | None = None
    leave: Operation | None = None
    rejoin: Operation | None = None
    copies: Any = None
    kept_slots: Sequence[Variable] = ()
    calls_workers: Sequence[int] = ()
    end: Callable[[Sequence[Operation]], Operation] | None = None
    before_save: Operation | None = None
    finish: Callable[[], None] | None = None

    def prepare_save(self, session: Session) -> None:
        """Write to the PS, on the chief, what only its copies hold."""
        if self.before_save is not None:
            session.run(self.before_save)

    @contextlib.contextmanager
    def without_updates(self, session: Session) -> Iterator[None]:
        """Return a context of the chief, between two of its steps, in which no update starts."""
        self.prepare_save(session)
        if self.pause is None:
            yield
            return
        session.run(self.pause.begin)
        yield
        session.run(self.pause.end)


@dataclass(frozen=True)
class ModeContext:
    """The job and the worker for which a step is built.

    Attributes:
        config: The job.
        cluster: The tasks of the job.
        task: The worker that owns the graph.
        examples: int64 scalar: the number of examples in the batch of a step. ``None`` where it does not matter.
        shares: The workers' shares of the examples. ``None`` where tfps does not divide them.
    """

    config: JobConfig
    cluster: Cluster
    task: Task
    examples: Tensor | None = None
    shares: Shares | None = None


class Mode(abc.ABC):
    """The rule by which gradients become updates.

    A mode has one instance, without state. Its module must not import TensorFlow at the top level, where that would
    slow down the command line. ``build_step`` may import what it needs. Another package adds a mode with an entry point
    in the group ``tfps.modes``.

    Attributes:
        name: The value of ``--mode``.
        is_blocking: Whether workers wait for one another. If so, they restart together when one is lost, and
            checkpoints are saved between two steps.
        trains_on_copies: Whether the step works on copies on the worker: ``Step.copies``.
        flags: The flags of the group ``mode`` that this mode uses. In other modes they are refused.
        uses_ps: Whether the job has PS. If not, the chief has the place of the only PS: it holds the variables and the
            job's state, on ``Cluster.state_devices``, and a job with PS is refused.

    Example, ``pyproject.toml`` of a package that has ``class MyMode(Mode)`` in ``my_package/my_mode.py``::

        [project.entry-points."tfps.modes"]
        mine = "my_package.my_mode:MyMode"
    """

    name: ClassVar[str]
    is_blocking: ClassVar[bool]
    trains_on_copies: ClassVar[bool] = False
    flags: ClassVar[Collection[str]] = ()
    uses_ps: ClassVar[bool] = True

    @property
    def can_overlap(self) -> bool:
        """Whether a worker may have several runs in flight."""
        return not self.is_blocking

    @property
    def updates_are_shared(self) -> bool:
        """Whether an update combines steps of several workers, so that no step of a worker is an update itself."""
        return self.is_blocking and not self.trains_on_copies

    @property
    def may_repeat_steps(self) -> bool:
        """Whether a step that another worker's loss has interrupted is taken again, so that what it did must not count.

        The model's own changes wait for the update then.
        """
        return self.updates_are_shared

    def of_job(self, config: JobConfig) -> "Mode":
        """Return the mode that a job trains in: this one, or a variant with other attributes that an option chooses."""
        del config
        return self

    def defaults(self, config: JobConfig) -> Mapping[str, object]:
        """Return the values of those ``flags`` that decide how a job trains even if they are not given.

        Args:
            config: The job.
        """
        del config
        return {}

    def gradients_per_update(self, config: JobConfig, num_workers: int) -> int:
        """Return the number of workers' gradients in an update, which is also the number of batches per global step."""
        del config, num_workers
        return 1

    def spare_workers(self, config: JobConfig) -> int:
        """Return how many workers may be lost before the others cannot go on, where workers wait for one another."""
        del config
        return 0

    def rounds(self, config: JobConfig, num_workers: int, shares: Shares | None) -> Rounds | None:
        """Return the job's rounds, in a mode whose workers exchange only after several steps; ``None`` in others.

        Args:
            config: The job.
            num_workers: The number of its workers.
            shares: See ``ModeContext``.

        Raises:
            ValueError: If the job needs shares, and tfps does not divide the examples.
        """
        del config, num_workers, shares
        return None

    def why_idle(self, config: JobConfig, num_workers: int, num_idle: int) -> str:
        """Return why some workers may have taken no step of a job that has ended, to follow "took no step:"."""
        del config, num_workers
        return f"no batch was left for {'it' if num_idle == 1 else 'them'}, or the others were faster"

    def validate(self, config: JobConfig, num_workers: int) -> Sequence[str]:
        """Return the problems of a job's options in this mode, one message each: flag, value, and how to fix it."""
        del config, num_workers
        return ()

    @abc.abstractmethod
    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Add a step to the default graph, and return it.

        Args:
            optimizer: ``tf.compat.v1.train.Optimizer``.
            loss: Scalar float tensor.
            global_step: int64 resource variable that counts the applied updates.
            context: The job and the worker.

        Raises:
            ValueError: If the loss depends on no variable.
        """
