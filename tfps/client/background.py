"""Threads of a client that are started when they are first needed: most clients of one server need none."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_Found = TypeVar("_Found")


class Background:
    """Some threads.

    Args:
        count: How many there are at most.
        name: What their names begin with.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, act: Callable[..., _Found], *args: Any, **named: Any) -> "Future[_Found]":
        """Call a function in a thread, and return the future of what it returns."""
        with self._lock:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  slow to import

                self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        return self._pool.submit(act, *args, **named)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Take no more calls, and wait for those that were made, or cancel those that have not begun."""
        with self._lock:
            if self._pool:
                self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
