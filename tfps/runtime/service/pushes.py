"""Pushes, and the rules about them, as values. Does not import TensorFlow.

A *push* is the gradient of one client. An *update* is one step of the optimizer, with the sum or mean of one push or
more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tfps.errors import ServiceError

_MOST_CLIENTS = 10_000  # that may send their last push again
RESTARTING = "the service begins again from its last checkpoint."
"""Why nothing can be decided about a push for now: the message of ``NotReadyError``."""


@dataclass(frozen=True, order=True)
class PushId:
    """The identity of a push.

    Attributes:
        client: The client.
        number: The number of the push among those of the client, from 1 on.
    """

    client: str
    number: int


@dataclass(frozen=True)
class Push:
    """A push, without its arrays.

    Attributes:
        id: Its identity.
        worker: The index of the worker that has computed it.
        computed_at: The step of the parameters that it was computed with.
        computed_in: The generation of these parameters; empty if the client has read none.
        staged_in: The generation in which the servers have got its parts.
        servers: The other servers that have a part of it.
    """

    id: PushId
    worker: int
    computed_at: int
    computed_in: str = ""
    staged_in: str = ""
    servers: Collection[int] = ()


@dataclass(frozen=True)
class Outcome:
    """What has become of a push.

    Attributes:
        step: The number of updates when it was decided.
        is_applied: Whether it is in the parameters; it is not if it came too late.
    """

    step: int
    is_applied: bool


@dataclass
class WaitingPush:
    """A push that waits for others, or for its update to end.

    Attributes:
        push: The push.
        since: When it came.
        outcome: What has become of it, if it is decided.
        error: Why it will not be decided, if it will not.
        is_taken: Whether it is in an update that is complete.
    """

    push: Push
    since: float
    outcome: Outcome | None = None
    error: Exception | None = None
    is_taken: bool = False


@dataclass(frozen=True)
class Rules:
    """When an update is made.

    Attributes:
        mode: ``async``, ``sync`` or ``ssp``.
        num_workers: The number of workers; sync needs it.
        backup_workers: How many pushes an update of sync does not wait for.
        staleness: By how many steps a worker of ssp may be ahead.
        worker_timeout_secs: After how long without a connection a worker is gone.
        stall_timeout_secs: After how long a push that waits for other workers ends with an error.
        max_steps: How many updates are made; ``None`` for no limit.
    """

    mode: str = "async"
    num_workers: int = 1
    backup_workers: int = 0
    staleness: int = 0
    worker_timeout_secs: float = 30.0
    stall_timeout_secs: float = 600.0
    max_steps: int | None = None

    @property
    def needed(self) -> int:
        """How many pushes an update takes."""
        return self.num_workers - self.backup_workers if self.mode == "sync" else 1


@dataclass(frozen=True)
class State:
    """What a checkpoint holds of the decisions.

    Attributes:
        step: The number of updates.
        decided: By client, the number of its last push that was decided, and what became of it.
    """

    step: int = 0
    decided: Mapping[str, tuple[int, Outcome]] = field(default_factory=dict)


class Decisions:
    """What has become of the last push of each client; of 10,000 clients, those that have pushed most recently.

    Args:
        decided: By client, the number of its last push that was decided, and what became of it.
    """

    def __init__(self, decided: Mapping[str, tuple[int, Outcome]]) -> None:
        self._decided = dict(decided)

    def outcome(self, push: PushId) -> Outcome | None:
        """Return what has become of a push; ``None`` if it was not decided.

        Raises:
            ServiceError: If a later push of the client was decided, so that nothing is known of this one.
        """
        number, outcome = self._decided.get(push.client, (0, None))
        if push.number < number:
            raise ServiceError(f"push {push.number} comes after push {number} of the same client: send them in order.")
        return outcome if push.number == number else None

    def has(self, push: PushId) -> bool:
        """Return whether a push was decided, or a later one of its client."""
        return push.number <= self._decided.get(push.client, (0, None))[0]

    def add(self, push: PushId, outcome: Outcome) -> None:
        """Note what has become of a push, unless a later one of its client was decided."""
        last = self._decided.pop(push.client, (0, outcome))
        self._decided[push.client] = max(last, (push.number, outcome), key=lambda each: each[0])  # the newest is last
        if len(self._decided) > _MOST_CLIENTS:
            del self._decided[next(iter(self._decided))]  # the client that has pushed nothing for the longest time

    def by_client(self) -> Mapping[str, tuple[int, Outcome]]:
        """Return a copy, for a checkpoint."""
        return dict(self._decided)


def check_terms(server: str, theirs: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Check that a server has the terms of the first server.

    Raises:
        ServiceError: If it has others.
    """
    differing = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    if differing:
        shown = ", ".join(f"{name} is {theirs.get(name)} there, {mine.get(name)} here" for name in differing)
        raise ServiceError(f"{server} was started with other flags than ps/0: {shown}.")
