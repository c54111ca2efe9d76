"""The end of a worker: of its work and of who ends it early, on different threads, one signs off. The other does not.

Else the PS could be told that the chief is done, and leave, while ``summary.json`` says that the job was stopped: the
chief that is started again would wait for PS that are gone.
"""

import contextlib
import threading
from collections.abc import Iterator

from tfps.runtime.process.shutdown import StopRequest

END_DONE, END_EARLY = "done", "early"


class End:
    """Which end a worker comes to."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._kind = ""
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        """``END_DONE``, ``END_EARLY``, or empty while neither has begun."""
        return self._kind

    @property
    def is_done(self) -> bool:
        """Whether its work has signed off as done, whatever came then."""
        return self._done.is_set()

    def is_done_within(self, secs: float) -> bool:
        """Return whether its work signs off as done; waits so long for one that has begun that."""
        if self._kind == END_DONE:
            self._done.wait(max(secs, 0.0))
        return self.is_done

    def take(self, kind: str) -> bool:
        """Begin an end; return whether that is this worker's, which none has begun before."""
        with self._lock:
            is_first = not self._kind
            self._kind = self._kind or kind
            return is_first

    @contextlib.contextmanager
    def of_work(self, stop: StopRequest) -> Iterator[None]:
        """A context in which work signs off as done; what fails there leaves the end open.

        Raises:
            TfpsError: Why the worker has to end, if another has begun that end.
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
