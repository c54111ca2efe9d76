"""Run a task beside training, and raise its errors later."""

from collections.abc import Callable
from concurrent.futures import Future

from tfps.runtime.process.thread_pool import ThreadPool


class BackgroundThread:
    """Run one task at a time in a separate thread; ``is_idle`` and ``wait`` raise what it raised."""

    def __init__(self) -> None:
        self._pool: ThreadPool[object] = ThreadPool("save")
        self._under_way: Future[object] | None = None

    def start(self, act: Callable[[], object]) -> None:
        """Start a task; call this only when none is running."""
        self._under_way = self._pool.submit(act)

    def is_idle(self) -> bool:
        """Return whether no task is running; raise what the last one raised."""
        idle = self._under_way is None or self._under_way.done()
        if idle:
            self.wait()
        return idle

    def wait(self) -> None:
        """Wait until no task is running; raise what the last one raised."""
        last, self._under_way = self._under_way, None
        if last is not None:
            last.result()
