"""What a mode gives to the training loop. Does not import TensorFlow.

The loop knows nothing of modes. It holds tickets, integers; for each that is below ``max_steps`` it takes a step, and
in the run of the last of these it draws as many again::

    tickets = run(draw(n, 0))
    while all(ticket < max_steps for ticket in tickets):
        tickets = run([train_op of n steps, draw_after(n, the last of them)])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Copy = Callable[[Any], Any]
"""From a tensor or an operation of a step to that of a copy of the step."""


@dataclass(frozen=True)
class SyncRecovery:
    """What steps that were broken off leave on the PS, in a mode whose workers wait for one another.

    What a lost worker has asked for may still wait on a PS that does not know that it is lost, and would take what is
    meant for its successor. It is given something else before: ``fill``, until what was put in stays there.

    Attributes:
        era: int64 placeholder: how often workers have begun anew; ``chief_init`` and ``update`` are run with it.
        counts: int64 [n]: how much each of n queues and accumulators holds.
        fill: n operations: each puts something into one that is of no effect.
        enough: How often to run ``fill``: when each then holds so many, nobody waits any more.
        clear: n operations: each takes one out, or all.
        torn: Scalar bool: an update has begun and not ended: some variables may have it and others not.
    """

    era: Any
    counts: Any
    fill: Sequence[Any]
    enough: int
    clear: Sequence[Any]
    torn: Any


@dataclass(frozen=True)
class PartialUpdates:
    """Updates that are made in part: their step was broken off when some variables had them, and others had not.

    Attributes:
        untold: int64 [workers]: how many of each worker's, when no run of it is under way, that it has not told yet.
        total: int64 variable: how many of all workers' the variables hold, as these have told.
        first: int64 scalar placeholder: how many the variables hold in the beginning, for ``Step.chief_init``.
        settle: Adds to the graph, and returns, an operation by which this worker has told its own.
    """

    untold: Any
    total: Any
    first: Any
    settle: Callable[[], Any]


@dataclass(frozen=True)
class Fence:
    """What keeps updates off that workers which were taken for lost may still have on their way.

    Attributes:
        workers: int64 [n] placeholder: which workers.
        raise_: Operation after which none of these workers changes anything any more, until it has begun anew.
    """

    workers: Any
    raise_: Any


@dataclass(frozen=True)
class Step:
    """The operations of one mode in one worker's graph.

    Attributes:
        train_op: Operation; one step: read the parameters, compute gradients, hand them over.
        gate: Operations of a step that have to end before the next one reads any parameter.
        draw: Adds to the graph, and returns, n tickets, int64 [n], as they are between steps, for a worker with so many
            others in its hand.
        draw_after: Tickets drawn at the end of a run whose last step is a copy of this one, int64 [n]; where
            ``tells_step``, int64 [1 + n]: before them, the global step that the run has reached.
        tells_step: Whether a run tells the global step that it has reached: where a ticket does not, because others
            take the steps of earlier ones later, or never.
        chief_init: Operation that the chief runs when the variables have their values and before any worker takes a
            step; with ``leftovers``, also when the workers begin together anew. What was begun before does not count.
        worker_init: Operation that every worker runs before its first step, and when they begin anew.
        fence: What another worker runs before it takes the steps that some have left undone; ``None`` where what they
            may have on their way changes nothing.
        update: Operation that the chief keeps running in the background, or ``None``; in an era that is over, it fails.
        begins: Operations with which an update begins: what it reads of the PS besides, it has to read after them.
        leftovers: ``None`` where no worker waits for another: what one leaves behind hinders nobody.
        ahead: int64 [workers]: for how many updates to come each has handed over its part; the others wait for those
            that have for none. ``None`` where no worker waits for another.
        staleness: int64 [n]: how many of the job's steps have seen 0, 1, ... other updates between reading the
            parameters and updating them; the last counts those with so many or more. ``None`` where it is 0.
        give_back: Adds to the graph, and returns, what a worker runs whose input has ended, with n tickets in its hand.
        any_can_finish: Whether any worker alone can take the steps that others have left undone.
        may_overlap: Whether a worker may have several runs under way at once.
        taken: int64 [workers]: how many steps each worker has taken in this run; ``None`` where only they know.
        moments: ``atomic_update.Moments``, which keep updates off a PS while its variables are read; ``None`` where no
            update can come while the chief saves.
    """

    train_op: Any
    gate: Sequence[Any]
    draw: Callable[[int, int], Any]
    draw_after: Callable[[int, Copy], Any]
    tells_step: bool
    chief_init: Any
    worker_init: Any
    fence: Fence | None
    update: Any
    begins: Sequence[Any]
    leftovers: SyncRecovery | None
    ahead: Any
    staleness: Any
    give_back: Callable[[int], Any]
    any_can_finish: bool
    may_overlap: bool
    taken: Any
    moments: Any
    partial: PartialUpdates | None
