"""How the gradients of the workers come together on the PS for one update."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.tf_types import Gradient, Operation, Tensor, Variable


@dataclass(frozen=True)
class Held:
    """A queue or an accumulator, where a request of a lost worker may be pending; see ``SyncRecovery``.

    Attributes:
        count: The number of elements.
        unblock: Operation that adds one element that has no effect.
        clear: Operation that removes one element, or all.
    """

    count: Tensor
    unblock: Operation
    clear: Operation


class Collector(abc.ABC):
    """Collects a gradient of each worker and variable, and combines them.

    Attributes:
        devices: The PS that have a variable with a gradient, in order.
        pushes: Operations that hand over this worker's gradients. An update has all of them or none.
        held: Where requests may be pending.
    """

    devices: Sequence[str]
    pushes: Sequence[Operation]
    held: Sequence[Held]

    @abc.abstractmethod
    def begin(self, first: Tensor) -> Operation:
        """Return an operation after which only gradients count whose stamp is ``first`` or more: int64 scalar."""

    @abc.abstractmethod
    def arrived(self, device: str) -> Sequence[Operation]:
        """Return operations that end when one PS has all gradients of an update."""

    @abc.abstractmethod
    def combined(self, starts: Mapping[str, Operation]) -> Sequence[tuple[Gradient, Variable]]:
        """Return the combined gradients of an update, each with its variable.

        Args:
            starts: For each PS, the operation that starts the update there; all gradients have arrived before.
        """
