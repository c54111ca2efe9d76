"""How a worker gets steps where its mode limits them: it renews until some are allowed, or it is to stop."""

from collections.abc import Callable
from typing import Any

import pytest

from tfps.modes.base import StepLimit
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

from tfps.runtime.coordination.allowance import Allowance  # noqa: E402


class FakeSession:
    """Answers with the next of some numbers of allowed steps, and notes how ``renew`` is run."""

    def __init__(self, *answers: int, interrupts: bool = False) -> None:
        self._answers, self._interrupts = list(answers), interrupts
        self.renewed: list[Any] = []

    def make_callable(self, fetch: str, accept_options: bool = False) -> Callable[..., Any]:
        """Return what stands for a run of ``fetch``."""
        assert accept_options == (fetch == "renew")
        return {"allowed": lambda: self._answers.pop(0), "renew": self._renew}[fetch]

    def _renew(self, options: Any) -> None:
        self.renewed.append(options)
        if self._interrupts:
            raise tf.errors.DeadlineExceededError(None, None, "late")


def allowance(session: FakeSession, patience_secs: float | None = None) -> Allowance:
    """Return an allowance of a mode such as one that exchanges parameters every few steps."""
    return Allowance(session, StepLimit("allowed", 4, "renew", patience_secs))


def test_what_is_known_is_not_asked_for() -> None:
    """The end of a run has told; only after a failed one, say, the PS is asked."""
    session = FakeSession(2)
    steps = allowance(session)
    steps.set(3)
    assert steps.wait(lambda: True) == 3
    steps.set(None)
    assert steps.wait(lambda: True) == 2
    assert (session.renewed, steps.waited_secs) == ([], 0.0)


@pytest.mark.parametrize(("patience_secs", "interrupts"), [(None, False), (0.5, False), (0.5, True)])
def test_it_renews_until_some_are_allowed(patience_secs: float | None, interrupts: bool) -> None:
    """It looks again after each time, also where ``renew`` is interrupted, and goes on in between with other duties."""
    session, duties = FakeSession(-1, 0, 2, interrupts=interrupts), list[int]()
    steps = allowance(session, patience_secs)
    assert steps.wait(lambda: not duties.append(1)) == 2  # type: ignore[func-returns-value]
    assert len(duties) == len(session.renewed) == 2
    limits = [options and options.timeout_in_ms for options in session.renewed]
    assert limits == [None, None] if patience_secs is None else [500, 500]
    assert steps.waited_secs > 0


def test_it_gives_up_when_it_is_to_stop() -> None:
    """Then no step is allowed."""
    session = FakeSession(0, 0, 0)
    answers = iter([True, False])
    assert allowance(session).wait(lambda: next(answers)) == 0
    assert len(session.renewed) == 1
