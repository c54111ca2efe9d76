"""Which workers live, by a clock of the test."""

from tfps.runtime.service.live_workers import LiveWorkers


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_a_worker_without_a_connection_is_gone_after_a_while() -> None:
    """Not before; one that was never seen lives."""
    clock = Clock()
    workers = LiveWorkers(10.0, clock)
    assert workers.lives(7)
    workers.connected(0, 1)
    workers.connected(0, 1)
    clock.now = 100.0
    assert workers.lives(0)
    workers.connected(0, -1)
    assert workers.lives(0)
    workers.connected(0, -1)
    clock.now = 109.9
    assert workers.lives(0)
    clock.now = 110.0
    assert not workers.lives(0)
    workers.connected(0, 1)
    assert workers.lives(0)


def test_a_worker_that_is_done_holds_nobody() -> None:
    """From its last connection on, until it connects again."""
    workers = LiveWorkers(10.0, Clock())
    workers.connected(0, 1)
    workers.connected(0, 1)
    workers.connected(0, -1)
    workers.leave(0)
    assert workers.lives(0)
    workers.connected(0, -1)
    workers.leave(0)
    assert not workers.lives(0)
    workers.connected(0, 1)
    assert workers.lives(0)


def test_the_lead_is_over_those_that_live() -> None:
    """One that comes late, or comes back, goes on where the slowest is."""
    clock = Clock()
    workers = LiveWorkers(10.0, clock)
    for index in range(2):
        workers.connected(index, 1)
    for _ in range(5):
        workers.stepped(0)
    workers.stepped(1)
    assert workers.lead(0) == 4
    workers.connected(2, 1)
    assert workers.lead(2) == 0
    workers.connected(1, -1)
    clock.now = 20.0
    workers.stepped(2)
    assert workers.lead(0) == 3
    workers.connected(1, 1)
    assert workers.lead(1) == 0
    assert workers.lead(0) == 3
    workers.restart()
    assert [workers.lead(index) for index in range(3)] == [0, 0, 0]


def test_what_came_too_late_is_counted_by_worker() -> None:
    """All that were seen are in the list."""
    workers = LiveWorkers(10.0, Clock())
    workers.seen(0)
    workers.seen(1)
    workers.drop(1)
    workers.drop(1)
    assert workers.dropped == {0: 0, 1: 2}


def test_workers_that_are_gone_are_forgotten_when_they_are_many() -> None:
    """But none that lives, or whose dropped pushes are reported; a late word of one that is forgotten does no harm."""
    clock = Clock()
    workers = LiveWorkers(10.0, clock)
    workers.connected(0, 1)
    workers.connected(1, 1)
    workers.drop(1)
    workers.connected(1, -1)
    for index in range(2, 3_000):
        clock.now += 1.0
        workers.connected(index, 1)
        workers.connected(index, -1)
    assert len(workers.dropped) < 1_100
    assert workers.dropped[0] == 0
    assert workers.dropped[1] == 1
    workers.stepped(2)
    workers.leave(3)
    assert workers.lead(0) == 0
