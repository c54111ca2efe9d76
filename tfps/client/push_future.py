"""The future of a push in the background, which knows whether anybody has asked for its outcome."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tfps.errors import TfpsError


class PushFuture(Future[int]):
    """The future of the number of updates after a push."""

    def __init__(self) -> None:
        super().__init__()
        self._was_read = False

    def result(self, timeout: float | None = None) -> int:
        """Return the number of updates, as ``concurrent.futures.Future`` does."""
        try:
            return super().result(timeout)
        finally:
            self._was_read = self.done()  # and not after a timeout

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the push, ``None`` if there is none, as ``concurrent.futures.Future`` does."""
        try:
            return super().exception(timeout)
        finally:
            self._was_read = self.done()

    def run(self, push: Callable[..., int], *args: Any) -> None:
        """Push, unless this was cancelled."""
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(push(*args))
            except BaseException as error:
                self.set_exception(error)

    def follow(self, call: "Future[None]") -> None:
        """End as cancelled if the call of ``run`` is cancelled before it has begun."""
        call.add_done_callback(lambda ended: self._cancel() if ended.cancelled() else None)

    def _cancel(self) -> None:
        self.cancel()
        self.set_running_or_notify_cancel()

    def check(self) -> None:
        """Check that the push has not failed without anybody having asked.

        Raises:
            Exception: That of the push.
        """
        if self._was_read or not self.done() or self.cancelled():
            return
        self._was_read = True
        if isinstance(error := super().exception(), TfpsError):
            raise type(error)(f"an earlier push in the background failed: {error}") from error
        if error:
            raise error
