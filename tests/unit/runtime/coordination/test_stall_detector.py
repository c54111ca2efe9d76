"""A worker that takes no step any more."""

import logging
import time
from collections.abc import Callable

import pytest

from tfps.errors import StallError
from tfps.runtime.coordination import stall_detector
from tfps.runtime.coordination.stall_detector import StallDetector


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a time in seconds that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def look(
    clock: list[float], watched: StallDetector, secs: int, others: Callable[[], list[str]] = list
) -> Exception | None:
    """Let seconds pass, with a look in each as a worker's main thread has them; returns the last."""
    error = None
    for _ in range(secs):
        clock[0] += 1.0
        error = watched.error(7, 120, others)
    return error


def test_it_is_reported_now_and_then_and_ends(
    clock: list[float], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker without a step says so after 30 s and 60 s and ends after its timeout, its stacks in the log."""
    caplog.set_level(logging.INFO)
    watched = StallDetector(100.0)
    assert watched.error(7, 120, list) is None
    assert look(clock, watched, 100) is None
    assert caplog.messages == [
        "waiting: no step for 31 s, the last was 120",
        "waiting: no step for 61 s, the last was 120",
    ]
    error = look(clock, watched, 1)
    assert isinstance(error, StallError)
    assert error.exit_code == 172
    assert str(error).startswith("no step for 101 s, the last was 120: ")
    assert "(most recent call first):" in capfd.readouterr().err


def test_a_step_begins_it_anew(clock: list[float]) -> None:
    """Whoever takes a step now and then never ends."""
    watched = StallDetector(100.0)
    for steps in range(5):
        assert watched.error(steps, steps, list) is None
        for _ in range(90):
            clock[0] += 1.0
            assert watched.error(steps, steps, list) is None
    assert stall_detector._REPORT_AFTER_SECS < 90.0


def test_time_suspended_is_no_stall(clock: list[float]) -> None:
    """A process that was stopped for an hour has its whole timeout when it goes on, less a few seconds."""
    watched = StallDetector(100.0)
    assert watched.error(7, 120, list) is None
    clock[0] += 3600.0
    assert look(clock, watched, 95) is None
    assert isinstance(look(clock, watched, 6), StallError)


def test_who_waits_names_the_others_and_gives_them_time(clock: list[float]) -> None:
    """A worker that waits for others is not the one to end first."""
    watched = StallDetector(100.0)
    others = lambda: ["worker/3 (last step 119, 150 s ago)"]  # noqa: E731
    assert watched.error(7, 120, others) is None
    assert look(clock, watched, 200, others) is None
    error = look(clock, watched, 1, others)
    assert "the last was 120: waiting for worker/3 (last step 119, 150 s ago)" in str(error)
