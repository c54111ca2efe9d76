"""The parts of pushes that a server has, until it knows of which update they are. Does not import TensorFlow."""

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tfps.errors import ServiceError
from tfps.runtime.service.pushes import PushId

_KEPT_SECS = 600.0
_MOST_HELD = 8  # pushes of one client that are under way at a time: it was interrupted in all of them but one

_Part = TypeVar("_Part")


@dataclass
class _Staged(Generic[_Part]):
    """A part, until when it is kept, whether an update may want it, and how many requests are about it."""

    part: _Part
    until: float = math.inf
    is_held: bool = False
    requests: int = 0


class StagedParts(Generic[_Part]):
    """The parts, by push. Of each client, the newest part is kept, and those that are *held*: an update may want them.

    A client has one push under way, but one that was interrupted may push again while its last push still waits. A
    client that is gone may come back for a while. Then its parts are forgotten.

    Args:
        is_open: Returns whether an update may want a push, where that is known.
    """

    def __init__(self, is_open: Callable[[PushId], bool] | None = None) -> None:
        self._is_open = is_open or (lambda _: False)
        self._parts: dict[str, dict[int, _Staged[_Part]]] = {}
        self._lock = threading.RLock()

    def put(self, push: PushId, part: _Part) -> None:
        """Keep a part; not one that a broken connection delivers after a later one."""
        with self._lock:
            own = self._parts.setdefault(push.client, {})
            known = own.get(push.number)
            if known and known.is_held:
                known.until = math.inf  # sent again: the same
            elif push.number >= max(own, default=0):
                self._keep(push.client, [number for number, one in own.items() if one.is_held])
                self._parts.setdefault(push.client, {})[push.number] = _Staged(part)

    def hold(self, push: PushId, others: Collection[int]) -> None:
        """Keep a part until an update takes it.

        Args:
            push: Its push.
            others: The numbers of the client's other pushes that are under way: of no earlier others are parts kept.

        Raises:
            ServiceError: If it is not here, or too many of the client are under way.
        """
        with self._lock:
            own = self._parts.get(push.client, {})
            if push.number not in own:
                raise ServiceError(f"push {push.number}: a part of it is not here: stage all parts, in order.")
            if sum(number != push.number for number in others) >= _MOST_HELD:
                raise ServiceError(f"push {push.number}: {_MOST_HELD} pushes of this client are under way already.")
            self._keep(push.client, [number for number in own if number >= push.number or number in others])
            own[push.number].is_held = True

    def use(self, push: PushId, part: _Part) -> Callable[[], None]:
        """Put and hold a part for a request about its push; return what ends that. An open push is held beyond it.

        Raises:
            ServiceError: As ``hold`` does.
        """
        with self._lock:
            self.put(push, part)
            self.hold(push, self.held(push.client))
            one = self._parts[push.client][push.number]
            one.requests += 1

        def end() -> None:
            with self._lock:
                one.requests -= 1
                own = self._parts.get(push.client, {})
                if own.get(push.number) is one and push.number not in self.held(push.client):
                    self._keep(push.client, [number for number in own if number != push.number])

        return end

    def held(self, client: str) -> list[int]:
        """Return the numbers of a client's pushes whose parts an update may want, where that is known."""
        with self._lock:
            own = self._parts.get(client, {})
            return [n for n, one in own.items() if one.is_held and (one.requests or self._is_open(PushId(client, n)))]

    def left(self, client: str) -> None:
        """Note that a client has no connection any more; forget the parts of those that left long ago."""
        now = time.monotonic()
        with self._lock:
            for one in self._parts.get(client, {}).values():
                one.until = now + _KEPT_SECS
            for name, own in list(self._parts.items()):
                held = self.held(name)
                self._keep(name, [number for number, one in own.items() if one.until >= now or number in held])

    def part(self, push: PushId) -> _Part:
        """Return a part, and keep it.

        Raises:
            ServiceError: If it is not there.
        """
        with self._lock:
            own = self._parts.get(push.client, {})
            if push.number not in own:
                raise ServiceError(f"push {push.number}: a part of it is not here.")
            return own[push.number].part

    def take(self, pushes: Sequence[PushId], left_out: Sequence[PushId] = ()) -> list[_Part]:
        """Return the parts of some pushes, and forget them and those of the pushes that are left out.

        Raises:
            ServiceError: If one is not there; then nothing is forgotten.
        """
        with self._lock:
            every = [*pushes, *left_out]
            found = {push: own for push in every if push.number in (own := self._parts.get(push.client, {}))}
            if len(found) < len(every):
                raise ServiceError(f"{len(every) - len(found)} of {len(every)} parts of an update are not here.")
            parts = [found[push].pop(push.number).part for push in every]
            for push in every:
                self._keep(push.client, list(found[push]))
            return parts[: len(pushes)]

    def clear(self) -> None:
        """Forget all parts."""
        with self._lock:
            self._parts.clear()

    def _keep(self, client: str, numbers: Collection[int]) -> None:
        """Forget the parts of a client but some."""
        own = self._parts.get(client, {})
        for number in [number for number in own if number not in numbers]:
            del own[number]
        if not own:
            self._parts.pop(client, None)
