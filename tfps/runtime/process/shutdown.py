"""End a task on request, or after it has lost a peer, even while it is blocked inside TensorFlow.

A blocked ``session.run`` does not return to Python, so Python would never see a signal. Therefore a thread does the
work, and the main thread supervises it.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from tfps.errors import StoppedError, TfpsError, stopping_signals
from tfps.timeouts import SECOND_THOUGHT_SECS, WORKER_GRACE_SECS

_LOOK_SECS = 1.0
_POLL_SECS = 0.02

log = logging.getLogger(__name__)


class StopRequest:
    """A request that this task end early, and the reason. Shared by all its threads."""

    def __init__(self) -> None:
        self._error: TfpsError | None = None
        self._since = 0.0
        self._handles_signals = False

    def request(self, error: TfpsError) -> None:
        """Ask the task to end with ``error``; the first reason counts."""
        if self._error is None:
            self._since = time.monotonic()
            self._error = error

    @property
    def error(self) -> TfpsError | None:
        """The reason to end, or ``None``."""
        return self._error

    @property
    def waited_secs(self) -> float:
        """The seconds since the task was asked to end; 0 if it was not."""
        return time.monotonic() - self._since if self._error is not None else 0.0

    def wait_until(
        self, condition: Callable[[], bool], max_secs: float = math.inf, every_secs: float = _POLL_SECS
    ) -> bool:
        """Wait until a condition holds; return whether it does within ``max_secs``.

        Raises:
            TfpsError: The reason to end, if the task is asked to end before.
        """
        deadline = time.monotonic() + max_secs
        while not condition():
            if self._error:
                raise self._error
            if time.monotonic() > deadline:
                return False
            time.sleep(every_secs)
        return True

    def on_signals(self) -> None:
        """Request an end on a stop signal; SIGINT after ``SECOND_THOUGHT_SECS`` ends the process immediately.

        A second SIGTERM does not: platforms send several, and use SIGKILL if a process does not end. In a process that
        the model forks, as in a pool's, the signals keep their former effect: nothing there checks ``StopRequest``.
        """
        self._handles_signals = True
        before = {number: signal.signal(number, self._on_signal) or signal.SIG_DFL for number in stopping_signals()}
        os.register_at_fork(after_in_child=lambda: _handle(before))

    def take_back_signals(self) -> None:
        """Handle the stop signals again if the model, or what it imports, has set other handlers: a stop must save."""
        taken = [number for number in stopping_signals() if signal.getsignal(number) != self._on_signal]
        if taken and self._handles_signals:
            names = ", ".join(number.name for number in taken)
            log.warning("the model's handlers of %s are not used: tfps saves and ends on these signals", names)
            self.on_signals()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.waited_secs > SECOND_THOUGHT_SECS and number == signal.SIGINT:
            os._exit(StoppedError.exit_code)
        self.request(StoppedError(f"stopped by {signal.Signals(number).name}"))


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_supervised(
    work: Callable[[], None],
    stop: StopRequest,
    watch: Callable[[], TfpsError | None] = lambda: None,
    emergency_save: Callable[[], None] = lambda: None,
    grace_secs: Callable[[], float] = lambda: WORKER_GRACE_SECS,
) -> None:
    """Run ``work`` in a thread until it ends, or must be ended.

    Args:
        work: The task's work. Checks ``stop`` between steps and raises its error.
        stop: Set by signals and by ``watch``.
        watch: Called every second; returns an error when the task cannot go on.
        emergency_save: Called if ``work`` does not end in time after a request; saves as much as possible.
        grace_secs: Returns how long ``work`` may take to end after a request.

    Raises:
        TfpsError: The error that ``work`` raised, or the reason why it was ended.
    """
    failures: list[BaseException] = []
    thread = threading.Thread(target=_keep_failure, args=(work, failures), name="work", daemon=True)
    thread.start()
    next_look = time.monotonic() + _LOOK_SECS
    while thread.is_alive() and (stop.error is None or stop.waited_secs < grace_secs()):
        thread.join(0.1)
        if time.monotonic() > next_look and stop.error is None:
            next_look = time.monotonic() + _LOOK_SECS
            if error := watch():
                stop.request(error)
    if thread.is_alive() and stop.error:
        emergency_save()
        raise stop.error
    if failures:
        raise failures[0]


def _keep_failure(work: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failures.append(error)
