r"""The states of a worker, from its start to its end.

::

    BUILDING -> CONNECTING -> JOINED -> TRAINING <-> FINISHING <-> SIGNING_OFF -> DONE
                                  \________|____________/
                                           v
                                        STOPPING

A worker goes back from FINISHING to TRAINING when it takes the step of a lost worker, or when another worker was
replaced and all restart together. The latter also interrupts SIGNING_OFF.

The work and an early end run on different threads, and only one of them may sign off. Otherwise the PS could see that
the chief is done, and exit, while ``summary.json`` says that the job was stopped. A restarted chief would then wait for
PS that have exited. Therefore ``begin_end`` gives the end to the first that asks for it.
"""

import contextlib
import enum
import threading
from collections.abc import Iterator

from tfps.runtime.process.shutdown import StopRequest


class WorkerState(enum.Enum):
    """What a worker is doing."""

    BUILDING = "builds its graphs; no connection is open"
    CONNECTING = "waits for the other tasks"
    JOINED = "is known to the PS; waits for the variables' values and for the other workers"
    TRAINING = "takes steps, or waits for the other workers to restart with it between two steps"
    FINISHING = "takes no steps: waits for the other workers; the chief saves and evaluates"
    SIGNING_OFF = "reports to the PS that it is done; the chief writes the summary first"
    DONE = "has signed off as done"
    STOPPING = "ends early: saves and signs off as stopped, or as failed"


_BEFORE_JOINING = (WorkerState.BUILDING, WorkerState.CONNECTING)
_ENDS = (WorkerState.SIGNING_OFF, WorkerState.DONE, WorkerState.STOPPING)


class LifeCycle:
    """The present state of a worker. Its threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = WorkerState.BUILDING
        self._has_joined = False
        self._done = threading.Event()

    @property
    def state(self) -> WorkerState:
        """The present state."""
        return self._state

    @property
    def has_joined(self) -> bool:
        """Whether the PS know this worker."""
        return self._has_joined

    @property
    def is_done(self) -> bool:
        """Whether the work has signed off as done, whatever happened later."""
        return self._done.is_set()

    def is_done_within(self, secs: float) -> bool:
        """Return whether the work signs off as done; if it has started to, wait for it up to ``secs``."""
        if self._state is WorkerState.SIGNING_OFF:
            self._done.wait(max(secs, 0.0))
        return self.is_done

    def enter(self, state: WorkerState) -> None:
        """Enter a state that is not an end. An end that has begun goes on."""
        with self._lock:
            self._has_joined = self._has_joined or state not in _BEFORE_JOINING
            if self._state not in _ENDS:
                self._state = state

    def begin_end(self, state: WorkerState) -> bool:
        """Begin an end; return whether it is the first, which makes it this worker's end."""
        with self._lock:
            is_first = self._state not in _ENDS
            if is_first:
                self._state = state
            return is_first

    @contextlib.contextmanager
    def signing_off(self, stop: StopRequest) -> Iterator[None]:
        """Return a context in which the work signs off as done; an exception there allows another end.

        Raises:
            TfpsError: The reason for the end that has already begun, if there is one.
        """
        is_first = self.begin_end(WorkerState.SIGNING_OFF)
        if stop.error and not is_first:
            raise stop.error
        try:
            yield
        except BaseException:
            self._state = WorkerState.FINISHING
            raise
        self._state = WorkerState.DONE
        self._done.set()
