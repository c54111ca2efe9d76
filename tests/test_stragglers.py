"""Which worker is seen to be behind."""

import pytest

from tfps.runtime.stragglers import Beat, Stragglers


def test_in_step_the_one_that_all_wait_for_is_behind() -> None:
    """Only a worker that is waited for alone counts; after a few looks nothing is said."""
    seen = Stragglers()
    for ahead in ([1, 0, 1], [1, 0, 1], [0, 0, 1]):
        seen.look_in_step(ahead)
        assert seen.shares == {}
    seen.look_in_step([1, 1, 1])
    assert seen.shares == {1: 0.5}


@pytest.mark.parametrize(("pace", "share"), [(10, {}), (6, {}), (4, {1: 1.0}), (0, {1: 1.0})])
def test_apart_the_pace_tells(pace: int, share: dict[int, float]) -> None:
    """A worker at less than half the pace of the others is behind, also one that has given no sign since."""
    seen = Stragglers()
    for secs in range(6):
        own = Beat(pace * secs, 0, 1000.0 + (secs if pace else 0.0))
        seen.look_apart([Beat(10 * secs, 0, 1000.1 + secs), own], [0, 1])
    assert seen.shares == share


def test_before_all_have_begun_nobody_is_behind() -> None:
    """A worker that has taken no step yet, and a job that stands still, tell nothing."""
    seen = Stragglers()
    for secs in range(6):
        seen.look_apart([Beat(10 * secs, 0, 1000.0 + secs), Beat()], [0, 1])
        seen.look_apart([Beat(60, 0, 1006.0), Beat(60, 0, 1006.0)], [0, 1])
        seen.look_apart([Beat(60, 0, 1006.0), Beat(60, 0, 1006.0)], [0, 1])
    assert seen.shares == {}


def test_who_is_through_is_not_behind() -> None:
    """A worker whose input has ended before the others' takes no step any more, and holds nobody up."""
    seen = Stragglers()
    for secs in range(6):
        seen.look_apart(
            [Beat(10 * secs, 0, 1000.0 + secs), Beat(60, 0, 1000.0), Beat(9 * secs, 0, 1000.0 + secs)], [0, 2]
        )
    assert seen.shares == {}
