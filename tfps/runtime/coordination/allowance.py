"""How many steps a worker may take now, where its mode limits that: ``modes.base.StepLimit``."""

import contextlib
import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from tfps.modes.base import StepLimit
from tfps.tf_types import Session


class Allowance:
    """The steps that one worker may take.

    Args:
        session: Session on this worker's server.
        limit: The mode's limit.

    Attributes:
        most: A run has no more steps.
        waited_secs: How long the worker has waited in all, without the present wait.
        ends_rounds: See ``StepLimit``.
        has_ended_round: Whether the last wait has ended a round.
    """

    def __init__(self, session: Session, limit: StepLimit) -> None:
        self._limit, self.most = limit, limit.most
        self.waited_secs, self.ends_rounds, self.has_ended_round = 0.0, limit.ends_rounds, False
        self._left: int | None = None  # not known
        self.use(session)

    def use(self, session: Session) -> None:
        """Continue in another session."""
        self._read = session.make_callable(self._limit.allowed)
        self._renew = session.make_callable(self._limit.renew, accept_options=True)
        self.set(None)

    def set(self, left: int | None) -> None:
        """Note how many steps are allowed; ``None``: that has to be read."""
        self._left = left

    def wait(self, goes_on: Callable[[], bool]) -> int:
        """Return how many steps are allowed. While none is, renew and look again, as long as ``goes_on()``.

        Returns:
            At least 1, or 0 if the wait was given up.
        """
        began, self.has_ended_round = time.monotonic(), False
        if (allowed := self._allowed()) > 0:
            return allowed
        while allowed <= 0 and goes_on():
            self._renew_once()
            self.has_ended_round = self.ends_rounds
            allowed = self._allowed()
        self.waited_secs += time.monotonic() - began
        return max(allowed, 0)

    def part(self, wanted: int, usual: int) -> int:
        """Return how many of some wanted steps the next run takes: few lengths, as each is a graph of its own.

        Args:
            wanted: At least 1.
            usual: The usual number of steps of a run.
        """
        allowed = self._allowed()
        if allowed >= wanted == usual:
            return wanted
        return 1 << (min(allowed, wanted).bit_length() - 1)

    def _allowed(self) -> int:
        if self._left is None:
            self._left = int(self._read())
        return self._left

    def _renew_once(self) -> None:
        secs = self._limit.patience_secs
        options = None if secs is None else tf.RunOptions(timeout_in_ms=int(1000 * secs))
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            self._renew(options)
        self.set(None)
