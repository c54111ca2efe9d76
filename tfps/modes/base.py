"""What a mode gives to the training loop. Does not import TensorFlow.

The loop knows nothing of modes. It holds tickets, integers; for each that is below ``max_steps`` it takes a step, and
in the run of the last of these it draws as many again::

    tickets = run(draw(n, 0))
    while all(ticket < max_steps for ticket in tickets):
        tickets = run([train_op of n steps, draw_after(n, the last of them)])
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfps.cluster.resolver import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.tf_types import Operation, Optimizer, Tensor, Variable

Copy = Callable[[Any], Any]
"""From a tensor or an operation of a step to that of a copy of the step."""


@dataclass(frozen=True)
class SyncRecovery:
    """How workers that wait for one another restart together after one of them was lost.

    A PS may not know yet that a worker is lost. The requests of that worker still wait there, and would take what is
    meant for its replacement. So the chief first satisfies them with values of no effect: it runs ``unblock`` until
    what it adds is no longer taken, and then ``clear``.

    Attributes:
        generation: int64 placeholder: how often the workers have restarted. Feed it to ``Step.chief_init`` and
            ``Step.update``.
        counts: int64 [n]: how many elements each of n queues and accumulators holds.
        unblock: n operations: each adds one element of no effect.
        unblock_count: Once each holds this many elements, no request waits any more.
        clear: n operations: each removes one element, or all.
        partially_applied: Scalar bool: an update has started and not finished, so some variables may have it and
            others not.
    """

    generation: Tensor
    counts: Tensor
    unblock: Sequence[Operation]
    unblock_count: int
    clear: Sequence[Operation]
    partially_applied: Tensor


@dataclass(frozen=True)
class PartialUpdates:
    """Updates that are made in part: their step was broken off when some variables had them, and others had not.

    Attributes:
        untold: int64 [workers]: how many of each worker's, when no run of it is under way, that it has not told yet.
        total: int64 variable: how many of all workers' the variables hold, as these have told.
        first: int64 scalar placeholder: how many the variables hold in the beginning, for ``Step.chief_init``.
        settle: Adds to the graph, and returns, an operation by which this worker has told its own.
    """

    untold: Tensor
    total: Variable
    first: Tensor
    settle: Callable[[], Operation]


@dataclass(frozen=True)
class Fence:
    """What keeps updates off that workers which were taken for lost may still have on their way.

    Attributes:
        workers: int64 [n] placeholder: which workers.
        raise_: Operation after which none of these workers changes anything any more, until it has begun anew.
    """

    workers: Tensor
    raise_: Operation


@dataclass(frozen=True)
class Step:
    """The operations of one mode in one worker's graph. What a mode does not need keeps its default.

    Attributes:
        train_op: Operation; one step: read the parameters, compute gradients, send them.
        draw: Adds to the graph, and returns, n tickets, int64 [n], as they are between steps. Its second argument is
            how many other tickets the worker holds.
        draw_after: Tickets drawn at the end of a run whose last step is a copy of this one, int64 [n]; where
            ``tells_step``, int64 [1 + n]: before them, the global step that the run has reached.
        give_back: Adds to the graph, and returns, what a worker runs whose input has ended, with n tickets left.
        chief_init: Operation that the chief runs when the variables have their values and before any worker takes a
            step; with ``recovery``, also when the workers restart together. What was started before does not count.
        worker_init: Operation that every worker runs before its first step, and when the workers restart.
        read_barrier: Operations of a step that have to end before the next one reads any parameter.
        tells_step: Whether a run tells the global step that it has reached. Needed where a ticket does not tell it,
            because other workers take the steps of earlier tickets later, or never.
        fence: What another worker runs before it takes the steps that lost ones have left; ``None`` where requests
            that are still on their way change nothing.
        update: Operation that the chief keeps running in the background; in a generation that is over, it fails.
        update_starts: Operations with which ``update`` starts: what it reads of the PS, it has to read after them.
        recovery: How the workers restart together; ``None`` where no worker waits for another.
        updates_ahead: int64 [workers]: for how many updates to come each worker has sent its part. The others wait
            for those that have sent none. ``None`` where no worker waits for another.
        staleness: int64 [n]: how many of the job's steps have seen 0, 1, ... other updates between reading the
            parameters and updating them; the last counts those with so many or more. ``None`` where it is 0.
        any_worker_can_finish: Whether any worker alone can take the steps that others have left.
        steps_taken: int64 [workers]: how many steps each worker has taken in this run; ``None`` where only they know.
        moments: ``moments.Moments``, which keep updates off a PS while its variables are read; ``None`` where no
            update can arrive while the chief saves.
        partial: Updates that were made in part; ``None`` where an update is made by the chief alone.
    """

    train_op: Operation
    draw: Callable[[int, int], Tensor]
    draw_after: Callable[[int, Copy], Tensor]
    give_back: Callable[[int], Operation]
    chief_init: Operation
    worker_init: Operation
    read_barrier: Sequence[Operation] = ()
    tells_step: bool = False
    fence: Fence | None = None
    update: Operation | None = None
    update_starts: Sequence[Operation] = ()
    recovery: SyncRecovery | None = None
    updates_ahead: Tensor | None = None
    staleness: Tensor | None = None
    any_worker_can_finish: bool = False
    steps_taken: Tensor | None = None
    moments: Any = None
    partial: PartialUpdates | None = None


@dataclass(frozen=True)
class ModeContext:
    """For whom a step is built.

    Attributes:
        config: The job.
        cluster: Its tasks.
        task: The worker in whose graph the step is.
    """

    config: JobConfig
    cluster: Cluster
    task: Task


class Mode(abc.ABC):
    """How gradients become updates.

    A mode has one instance, without state. Its module does not import TensorFlow at its top level where the command
    line should stay quick: ``build_step`` may import what it needs. Another package adds a mode with an entry point in
    the group ``tfps.modes``.

    Attributes:
        name: The value of ``--mode``.
        is_blocking: Whether workers wait for one another. They then restart together when one is lost, and a
            checkpoint is saved between two steps.

    Example, ``pyproject.toml`` of a package that has ``class MyMode(Mode)`` in ``my_package/my_mode.py``::

        [project.entry-points."tfps.modes"]
        mine = "my_package.my_mode:MyMode"
    """

    name: ClassVar[str]
    is_blocking: ClassVar[bool]

    @property
    def can_overlap(self) -> bool:
        """Whether a worker may have several runs in flight."""
        return not self.is_blocking

    def gradients_per_update(self, num_workers: int) -> int:
        """Return of how many workers' gradients an update is made, which is also how many batches a global step has."""
        del num_workers
        return 1

    def validate(self, config: JobConfig) -> Sequence[str]:
        """Return what is wrong with a job's options in this mode, one message each: flag, value, and what to do."""
        del config
        return ()

    @abc.abstractmethod
    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Add a step to the default graph, and return it.

        Args:
            optimizer: ``tf.compat.v1.train.Optimizer``.
            loss: Scalar float tensor.
            global_step: int64 resource variable; counts the updates applied.
            context: For whom.

        Raises:
            ValueError: If the loss depends on no variable.
        """
