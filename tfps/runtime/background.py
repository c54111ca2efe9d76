"""Do something beside training, and hear of what goes wrong there."""

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Does one thing at a time in a thread of its own; what goes wrong there is raised where somebody looks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], Any]) -> None:
        """Do something; only when nothing is under way."""
        self._thread = threading.Thread(target=self._run, args=(act,), name="save", daemon=True)
        self._thread.start()

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error

    def is_idle(self) -> bool:
        """Tell whether nothing is under way; raises what the last thing raised."""
        idle = self._thread is None or not self._thread.is_alive()
        if idle:
            self.wait()
        return idle

    def wait(self) -> None:
        """Wait until nothing is under way; raises what the last thing raised."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
