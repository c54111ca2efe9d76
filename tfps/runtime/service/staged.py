"""The parts of pushes that a server has, until it knows of which update they are. Does not import TensorFlow."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from tfps.errors import ServiceError
from tfps.runtime.service.pushes import PushId

_KEPT_SECS = 600.0

_Part = TypeVar("_Part")


class StagedParts(Generic[_Part]):
    """The parts, by push. A client has one push under way, so a later one of it replaces an earlier one.

    A client that is gone may come back for a while. Then its part is forgotten.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, _Part, float]] = {}
        self._lock = threading.Lock()

    def put(self, push: PushId, part: _Part) -> None:
        """Keep a part; not one that a broken connection delivers after a later one."""
        with self._lock:
            if push.client not in self._parts or push.number >= self._parts[push.client][0]:
                self._parts[push.client] = push.number, part, math.inf

    def left(self, client: str) -> None:
        """Note that a client has no connection any more; forget the parts of those that left long ago."""
        now = time.monotonic()
        with self._lock:
            if client in self._parts:
                self._parts[client] = *self._parts[client][:2], now + _KEPT_SECS
            for old in [name for name, (_, _, until) in self._parts.items() if until < now]:
                del self._parts[old]

    def take(self, pushes: Sequence[PushId]) -> list[_Part]:
        """Return the parts of some pushes, and forget them.

        Raises:
            ServiceError: If one is not there; then nothing is forgotten.
        """
        with self._lock:
            found: Mapping[str, tuple[int, _Part, float]] = {
                push.client: self._parts[push.client]
                for push in pushes
                if push.client in self._parts and self._parts[push.client][0] == push.number
            }
            if len(found) < len(pushes):
                raise ServiceError(f"{len(pushes) - len(found)} of {len(pushes)} parts of an update are not here.")
            for client in found:
                del self._parts[client]
            return [found[push.client][1] for push in pushes]

    def drop(self, push: PushId) -> None:
        """Forget the part of a push, if it is there."""
        with self._lock:
            if push.client in self._parts and self._parts[push.client][0] == push.number:
                del self._parts[push.client]

    def clear(self) -> None:
        """Forget all parts."""
        with self._lock:
            self._parts.clear()
