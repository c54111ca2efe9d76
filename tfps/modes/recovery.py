"""What a mode offers for the time after a fault, and for a save. Does not import TensorFlow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfps.tf_types import Operation, Tensor, Variable


@dataclass(frozen=True)
class SyncRecovery:
    """How workers that wait for one another restart together after one of them is lost.

    A PS may not know yet that a worker is lost. The pending requests of that worker would take data meant for its
    replacement. So the chief first satisfies them with values that have no effect. It runs ``unblock`` until the added
    elements stay, and then runs ``clear``.

    Attributes:
        generation: int64 placeholder: the number of restarts of the workers. Feed it to ``Step.chief_init`` and
            ``Step.update``.
        counts: int64 [n]: the number of elements in each of n queues and accumulators.
        unblock: n operations, each of which adds one element that has no effect.
        unblock_count: When each holds this many elements, no request is pending any more.
        clear: n operations, each of which removes one element, or all.
        partially_applied: Scalar bool: an update has started but not finished, so some variables may lack it.
    """

    generation: Tensor
    counts: Tensor
    unblock: Sequence[Operation]
    unblock_count: int
    clear: Sequence[Operation]
    partially_applied: Tensor


@dataclass(frozen=True)
class PartialUpdates:
    """Updates that are partially applied: the step was interrupted after some variables had changed, but not all.

    Attributes:
        unreported: int64 [workers]: how many of them each worker has not reported yet. Valid while no run of it is
            in progress.
        total: int64 variable: the reported number in the variables, summed over all workers.
        first: int64 scalar placeholder for ``Step.chief_init``: the number that the variables hold at the start.
        settle: Adds an operation to the graph and returns it; it marks those of this worker as reported.
    """

    unreported: Tensor
    total: Variable
    first: Tensor
    settle: Callable[[], Operation]


@dataclass(frozen=True)
class Fence:
    """Blocks updates that may still be in flight from workers that were considered lost.

    Attributes:
        workers: int64 [n] placeholder: indices of the workers.
        raise_: Operation after which these workers change nothing any more, until they start again.
        held_by: bool [workers]: for which workers others wait while they train. These others raise the fence for one
            that is lost (``runtime.coordination.eviction``). ``None`` where no worker waits for another then.
    """

    workers: Tensor
    raise_: Operation
    held_by: Tensor | None = None


@dataclass(frozen=True)
class Pause:
    """Keeps updates from starting while the chief saves, where they do not need the chief's step.

    Attributes:
        begin: Operation that ends when no update is in progress, and none starts any more.
        end: Operation that lets updates start again.
    """

    begin: Operation
    end: Operation
