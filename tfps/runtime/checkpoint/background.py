"""Do something beside training, and hear of what goes wrong there."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tfps.runtime.process.thread_pool import ThreadPool


class BackgroundThread:
    """Does one thing at a time in a thread of its own; what goes wrong there is raised where somebody looks."""

    def __init__(self) -> None:
        self._pool: ThreadPool[Any] = ThreadPool("save")
        self._under_way: Future[Any] | None = None

    def start(self, act: Callable[[], Any]) -> None:
        """Do something; only when nothing is under way."""
        self._under_way = self._pool.submit(act)

    def is_idle(self) -> bool:
        """Return whether nothing is under way; raises what the last thing raised."""
        idle = self._under_way is None or self._under_way.done()
        if idle:
            self.wait()
        return idle

    def wait(self) -> None:
        """Wait until nothing is under way; raises what the last thing raised."""
        last, self._under_way = self._under_way, None
        if last is not None:
            last.result()
