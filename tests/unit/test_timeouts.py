"""The grace periods: whoever waits outlasts whoever is waited for."""

import pytest

from tfps import timeouts
from tfps.cluster import rendezvous

# Each period must be shorter than those on its right.
ORDERS = (
    ("WORKER_GRACE_SECS", "SAVED_WITHIN_SECS", "PS_GRACE_SECS", "TASK_END_SECS", "KILL_AFTER_SECS"),
    ("KILL_AFTER_SECS", "ORPHANED_SECS"),
    ("KILL_AFTER_SECS", "RAY_ACTOR_END_SECS", "RAY_STOP_SECS", "RAY_DRIVER_STOP_SECS", "CANCEL_SECS"),
    ("KILL_AFTER_SECS", "SSH_CLOSE_SECS"),
    ("KILL_AFTER_SECS", "CONTAINER_STOP_SECS", "POD_STOP_SECS", "POD_DELETE_SECS", "CLIENT_SECS"),
    ("KILL_AFTER_SECS", "SLURM_STOP_SECS", "CANCEL_SECS"),
    ("PS_BLOCKED_GRACE_SECS", "CONTAINER_STOP_SECS"),
    ("SECOND_THOUGHT_SECS", "WORKER_GRACE_SECS"),
    ("LONGEST_RESTART_PAUSE_SECS", "REPLACED_AFTER_SECS", "REPLACED_AT_END_SECS"),
    ("STALLED_AFTER_SECS", "MUTE_AFTER_SECS", "BUSY_MUTE_AFTER_SECS"),
    ("PLATFORM_SILENT_SECS", "RAY_LOGS_SILENT_SECS"),
)


@pytest.mark.parametrize("names", ORDERS, ids="-".join)
def test_each_period_outlasts_the_one_below_it(names: tuple[str, ...]) -> None:
    """A period is longer than the one that it waits for."""
    periods = [getattr(timeouts, name) for name in names]
    assert periods == sorted(set(periods))


def test_every_period_has_its_place() -> None:
    """Every period of the module is in an order, or equals one that is: else it would not have to be there."""
    ordered = {name for names in ORDERS for name in names}
    assert {name for name in vars(timeouts) if name.isupper()} - ordered == {"TCP_TIMEOUT_SECS"}
    assert timeouts.TCP_TIMEOUT_SECS == timeouts.MUTE_AFTER_SECS
    assert rendezvous.LEAVING_SECS == timeouts.TASK_END_SECS


def test_a_task_promises_ten_seconds() -> None:
    """The promise that the pages make, and what platforms get as text, are what they were."""
    assert (timeouts.TASK_END_SECS, timeouts.KILL_AFTER_SECS) == (10.0, 12.0)
    assert (str(timeouts.CONTAINER_STOP_SECS), str(timeouts.POD_STOP_SECS)) == ("20", "30")
    assert (str(timeouts.RAY_DRIVER_STOP_SECS), str(timeouts.POD_DELETE_SECS)) == ("30", "90")
