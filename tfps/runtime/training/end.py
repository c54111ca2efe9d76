"""The end of a worker. Its work and an early end run on different threads, and only one of them signs off.

Otherwise the PS could see that the chief is done, and exit, while ``summary.json`` says that the job was stopped. A
restarted chief would then wait for PS that have exited.
"""

import contextlib
import threading
from collections.abc import Iterator

from tfps.runtime.process.shutdown import StopRequest

END_DONE, END_EARLY = "done", "early"


class End:
    """How a worker ends."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._kind = ""
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        """``END_DONE``, ``END_EARLY``, or empty while no end has started."""
        return self._kind

    @property
    def is_done(self) -> bool:
        """Whether the work has signed off as done, whatever happened later."""
        return self._done.is_set()

    def is_done_within(self, secs: float) -> bool:
        """Return whether the work signs off as done; if it has started to, wait for it up to ``secs``."""
        if self._kind == END_DONE:
            self._done.wait(max(secs, 0.0))
        return self.is_done

    def take(self, kind: str) -> bool:
        """Start an end; return whether it is the first, which makes it this worker's end."""
        with self._lock:
            is_first = not self._kind
            self._kind = self._kind or kind
            return is_first

    @contextlib.contextmanager
    def of_work(self, stop: StopRequest) -> Iterator[None]:
        """Return a context in which the work signs off as done; an exception there allows another end.

        Raises:
            TfpsError: The reason for the end that has already started, if there is one.
        """
        is_free = self.take(END_DONE)
        if stop.error and not is_free:
            raise stop.error
        try:
            yield
        except BaseException:
            self._kind = ""
            raise
        self._done.set()
