"""When lost tasks are started again: by a clock that the test sets."""

import pytest

from tfps.cluster.spec import Task
from tfps.launchers.local import restart_policy
from tfps.launchers.local.restart_policy import Alone, Grant, RestartPolicy

PS, WORKER = Task("ps", 0), Task("worker", 1)


class Clock:
    """Time, in seconds, that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return it."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that is used instead of the real one."""
    made = Clock()
    monkeypatch.setattr(restart_policy, "time", made)
    return made


def lost(policy: RestartPolicy, clock: Clock, lived: float) -> float:
    """Let a PS live so long, be killed and be started again; returns how long the pause was."""
    policy.began(PS)
    clock.now += lived
    assert policy.grant(PS, -9)
    assert PS in policy
    since = clock.now
    while not (due := list(policy.due())):
        clock.now += 0.5
    assert due == [PS]
    assert not policy
    return clock.now - since


def test_pauses_double_while_a_task_does_not_last(clock: Clock) -> None:
    """Up to 10 s; one that has lived for half a minute begins anew, but its budget does not."""
    policy = RestartPolicy([PS], 8)
    assert [lost(policy, clock, 2) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert [lost(policy, clock, 31), lost(policy, clock, 2)] == [1, 2]
    assert policy.counts == policy.used == {PS: 8}
    policy.began(PS)
    assert policy.grant(PS, -9) is None


def test_who_is_lost_with_another_pays_nothing(clock: Clock) -> None:
    """A worker that ends as its PS was lost comes back soon, without end; where nobody was lost, it pays itself."""
    policy = RestartPolicy([PS, WORKER], 2)
    for _ in range(2):
        policy.began(PS)
        policy.began(WORKER)
        assert policy.grant(PS, -9)
        for _ in range(3):
            clock.now += 5
            assert policy.grant(WORKER, 170) == Grant(None, policy.budget)
            clock.now += 0.3
            assert WORKER in list(policy.due())
    assert policy.used == {PS: 2, WORKER: 0}
    assert policy.counts == {PS: 2, WORKER: 6}
    for _ in range(2):
        clock.now += 31
        policy.began(WORKER)
        assert policy.grant(WORKER, 170)
    clock.now += 31
    assert policy.grant(WORKER, 170) is None


def test_who_loses_nobody_but_itself_pays(clock: Clock) -> None:
    """A worker that ends with 170 again and again, and no other: each time is its own."""
    policy = RestartPolicy([PS, WORKER], 3)
    pauses = []
    for turn in (1, 2, 3):
        policy.began(WORKER)
        clock.now += 2
        assert policy.grant(WORKER, 170) == Grant(turn, 3)
        since = clock.now
        while not list(policy.due()):
            clock.now += 0.5
        pauses.append(clock.now - since)
    assert pauses == [1, 2, 4]
    policy.began(WORKER)
    assert policy.grant(WORKER, 170) is None


def test_a_signal_while_one_is_started_gives_up_the_next(clock: Clock) -> None:
    """What is due is started one by one: who is not yet started when all is given up is not started."""
    policy = RestartPolicy([PS, WORKER], 3)
    for task in (PS, WORKER):
        policy.began(task)
        assert policy.grant(task, -9)
    clock.now += 5
    started = []
    for task in policy.due():
        started.append(task)
        assert policy.give_up() == {WORKER: -9}
    assert started == [PS]


@pytest.mark.parametrize(("code", "granted"), [(0, False), (2, False), (66, False), (170, True), (-9, True)])
def test_only_what_may_help_is_tried(clock: Clock, code: int, granted: bool) -> None:
    """A task is started again after a signal and the codes from 128 up, and no other."""
    del clock
    policy = RestartPolicy([PS], 3)
    policy.began(PS)
    assert (policy.grant(PS, code) is not None) == granted
    assert (PS in policy) == granted


def test_what_is_given_up_is_not_started(clock: Clock) -> None:
    """Those that were to be started again are reported with their codes; a recalled one costs nothing of its budget."""
    policy = RestartPolicy([PS, WORKER], 1)
    policy.began(PS)
    assert policy.grant(PS, 170)
    policy.recall(WORKER)
    assert policy.counts == {PS: 1, WORKER: 1}
    assert policy.used == {PS: 1, WORKER: 0}
    assert policy.give_up() == {PS: 170, WORKER: 0}
    clock.now += 60
    assert not list(policy.due())
    assert not policy


def test_alone_what_others_lose_costs_nothing(clock: Clock) -> None:
    """A task that had come to train and ends with 170 comes back soon, without end, and its budget is its own."""
    policy = Alone(WORKER, 1)
    for _ in range(20):
        policy.began(WORKER)
        policy.trained()
        clock.now += 60
        assert policy.grant(WORKER, 170) == Grant(None, policy.budget)
        clock.now += 0.3
        assert list(policy.due()) == [WORKER]
    assert policy.used == {WORKER: 0}
    assert policy.grant(WORKER, -9) == Grant(1, 1)
    assert policy.grant(WORKER, -9) is None


def test_alone_a_task_that_never_trains_pays(clock: Clock) -> None:
    """After a loss a task may meet others that are yet to leave, three times; then each 170 is its own."""
    del clock
    policy = Alone(WORKER, 2)
    reported = []
    for _ in range(6):
        policy.began(WORKER)
        reported.append(policy.grant(WORKER, 170))
    assert reported == [Grant(None, 2)] * 3 + [Grant(1, 2), Grant(2, 2), None]
    policy.trained()
    assert policy.grant(WORKER, 170) == Grant(None, policy.budget)


def test_alone_a_cluster_that_does_not_form_is_tried_twice(clock: Clock) -> None:
    """So a task that nobody comes to meet any more ends; once it has trained, it is tried twice again."""
    del clock
    policy = Alone(PS, 10)
    policy.began(PS)
    assert policy.grant(PS, 171) == Grant(1, 10)
    assert policy.grant(PS, 171) is None
    policy.trained()
    assert policy.grant(PS, 171) == Grant(2, 10)


def test_alone_a_ps_whose_workers_vanish_waits_three_times(clock: Clock) -> None:
    """Its process that has trained ends with 170, the next two with 171, each after ``--start_timeout_secs``."""
    del clock
    policy = Alone(PS, 10)
    policy.trained()
    granted = []
    for code in (170, 171, 171):
        policy.began(PS)
        granted.append(policy.grant(PS, code))
    assert granted == [Grant(None, 10), Grant(1, 10), None]


@pytest.mark.parametrize("code", range(128))
def test_alone_no_code_below_128_is_tried_again(clock: Clock, code: int) -> None:
    """Whatever a model ends its process with."""
    del clock
    policy = Alone(WORKER, 3)
    policy.began(WORKER)
    assert policy.grant(WORKER, code) is None


def test_a_cluster_that_does_not_form_is_tried_twice(clock: Clock) -> None:
    """Each try takes ``--start_timeout_secs``; a loss in between begins another count."""
    policy = RestartPolicy([PS], 9)
    for code in (171, -9, 171):
        policy.began(PS)
        assert policy.grant(PS, code)
        clock.now += 60
        assert list(policy.due()) == [PS]
    policy.began(PS)
    assert policy.grant(PS, 171) is None
