"""Which pushes make which update: counted by what ``make`` was called with."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from typing import Any

import pytest

from tfps.errors import NotReadyError, ServiceError
from tfps.runtime.service.pushes import Decisions, Outcome, Push, PushId, Rules, State
from tfps.runtime.service.sequencer import Sequencer


class Made(list[list[tuple[str, int]]]):
    """The updates that were made: of each, the pushes."""

    def make(self, number: int, pushes: Sequence[Push]) -> None:
        """Make an update."""
        assert number == len(self) + 1
        self.append([(one.id.client, one.id.number) for one in pushes])


def push_of(worker: int, number: int, computed_at: int, client: str | None = None) -> Push:
    """Return a push of a worker that is one client."""
    return Push(PushId(client or f"c{worker}", number), worker, computed_at)


def started(pool: ThreadPoolExecutor, sequencer: Sequencer, push: Push) -> "Future[Outcome]":
    """Push on another thread, and wait until the push waits there or is decided."""
    future = pool.submit(sequencer.push, push)
    until(lambda: future.done() or push.id in sequencer._waiting)
    return future


def until(holds: Callable[[], Any], secs: float = 30.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_push_that_waits_for_too_long_is_not_applied() -> None:
    """It names the workers that are missing, its place is free, and the next one of its worker counts."""
    made, now = Made(), [0.0]
    rules = Rules("sync", num_workers=3, stall_timeout_secs=600.0)
    sequencer = Sequencer(rules, made.make, clock=lambda: now[0])
    for worker in range(3):
        sequencer.connected(worker, 1)
    with ThreadPoolExecutor(3) as pool:
        early, late = (started(pool, sequencer, push_of(worker, 1, 0)) for worker in (0, 2))
        now[0] = 599.0
        with pytest.raises(FuturesTimeoutError):
            early.result(1)
        now[0] = 601.0
        errors = " ".join(str(one.exception(30)) for one in (early, late))
        assert (
            errors.count("the push is not applied: worker 1 is without a push for 600 s (--stall_timeout_secs).") == 2
        )
        assert not sequencer._waiting
        again = [started(pool, sequencer, push_of(worker, 2, 0)) for worker in range(3)]
        assert {one.result(30) for one in again} == {Outcome(1, True)}
    assert made == [[("c0", 2), ("c1", 2), ("c2", 2)]]


def test_a_push_that_is_decided_after_a_later_one_leaves_its_record() -> None:
    """The client was interrupted in the first. The second one is sent again, and counts once."""
    made, decisions = Made(), Decisions({})
    decisions.add(PushId("a", 2), Outcome(1, True))
    decisions.add(PushId("a", 1), Outcome(2, True))
    sequencer = Sequencer(Rules(), made.make, State(2, decisions.by_client()))
    assert sequencer.push(push_of(0, 2, 0, "a")) == Outcome(1, True)
    assert made == []


def test_a_worker_that_is_behind_for_too_long_is_named() -> None:
    """In ssp the push is applied, and says so."""
    made, now = Made(), [0.0]
    rules = Rules("ssp", staleness=0, stall_timeout_secs=5.0)
    sequencer = Sequencer(rules, made.make, clock=lambda: now[0])
    for worker in (0, 1):
        sequencer.connected(worker, 1)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(sequencer.push, push_of(0, 1, 0))
        until(lambda: made)
        now[0] = 6.0
        text = "the push is applied, but worker 1 is too far behind for 5 s"
        assert str(ahead.exception(30)).startswith(text)
    assert made == [[("c0", 1)]]


def test_async_applies_each_push() -> None:
    """Each is an update of its own, whatever step it was computed at."""
    made = Made()
    sequencer = Sequencer(Rules(), made.make)
    assert [sequencer.push(push_of(0, number, 0)).step for number in (1, 2)] == [1, 2]
    assert sequencer.push(push_of(1, 1, 0)) == Outcome(3, True)
    assert made == [[("c0", 1)], [("c0", 2)], [("c1", 1)]]


def test_a_push_that_is_sent_again_counts_once() -> None:
    """The answer is that of the first time; also after a checkpoint."""
    made = Made()
    sequencer = Sequencer(Rules(), made.make)
    first = sequencer.push(push_of(0, 1, 0))
    assert sequencer.push(push_of(0, 1, 0)) == first
    with sequencer.paused() as state:
        again = Sequencer(Rules(), made.make, state)
    assert again.push(push_of(0, 1, 0)) == first
    assert again.push(push_of(0, 2, 1)).step == 2
    with pytest.raises(ServiceError, match="push 1 comes after push 2 of the same client"):
        again.push(push_of(0, 1, 0))
    assert made == [[("c0", 1)], [("c0", 2)]]


def test_sync_waits_for_different_workers() -> None:
    """The pushes of an update are in the order of the workers, and not of their arrival."""
    made = Made()
    sequencer = Sequencer(Rules("sync", 3), made.make)
    with ThreadPoolExecutor() as pool:
        for step in range(2):
            futures = [started(pool, sequencer, push_of(worker, step + 1, step)) for worker in (2, 0)]
            assert not any(future.done() for future in futures)
            assert sequencer.push(push_of(1, step + 1, step)) == Outcome(step + 1, True)
            assert [future.result(30) for future in futures] == [Outcome(step + 1, True)] * 2
    assert made == [[("c0", 1), ("c1", 1), ("c2", 1)], [("c0", 2), ("c1", 2), ("c2", 2)]]


def test_a_late_push_is_dropped_and_counted() -> None:
    """With a backup worker, the first two make the update; the third learns that it came too late."""
    made = Made()
    sequencer = Sequencer(Rules("sync", 3, backup_workers=1), made.make)
    with ThreadPoolExecutor() as pool:
        future = started(pool, sequencer, push_of(2, 1, 0))
        sequencer.push(push_of(0, 1, 0))
        assert future.result(30).is_applied
    assert sequencer.push(push_of(1, 1, 0)) == Outcome(1, False)
    assert made == [[("c0", 1), ("c2", 1)]]
    assert sequencer.dropped() == {0: 0, 1: 1, 2: 0}


def test_a_worker_that_is_started_twice_counts_once() -> None:
    """A function that was run again pushes for the same step: it does not take another worker's place."""
    made = Made()
    sequencer = Sequencer(Rules("sync", 2), made.make)
    with ThreadPoolExecutor() as pool:
        first = started(pool, sequencer, push_of(0, 1, 0, "first"))
        second = started(pool, sequencer, push_of(0, 1, 0, "second"))
        assert made == []
        sequencer.push(push_of(1, 1, 0))
        assert (first.result(30), second.result(30)) == (Outcome(1, True), Outcome(1, False))
    assert made == [[("first", 1), ("c1", 1)]]


def test_a_worker_that_is_gone_loses_its_place() -> None:
    """Its push is in no update, and another process of the worker may take its place."""
    made, now = Made(), [0.0]
    sequencer = Sequencer(Rules("sync", 2, worker_timeout_secs=5), made.make, clock=lambda: now[0])
    sequencer.connected(0, 1)
    with ThreadPoolExecutor() as pool:
        lost = started(pool, sequencer, push_of(0, 1, 0, "lost"))
        sequencer.connected(0, -1)
        now[0] = 6.0
        with pytest.raises(ServiceError, match="worker 0 had no connection for too long"):
            lost.result(30)
        sequencer.connected(0, 1)
        other = started(pool, sequencer, push_of(1, 1, 0))
        sequencer.push(push_of(0, 1, 0, "new"))
        assert other.result(30).is_applied
    assert made == [[("new", 1), ("c1", 1)]]


@pytest.mark.parametrize(
    ("push", "problem"),
    [
        (push_of(3, 1, 0), "worker=3, and the service has 3 workers: give an index from 0 to 2"),
        (push_of(-1, 1, 0), "worker=-1"),
        (push_of(0, 1, 1), "step=1, and the service is at step 0: pull before you push"),
    ],
)
def test_a_push_that_can_be_of_no_update_is_refused(push: Push, problem: str) -> None:
    """And nothing waits for it."""
    sequencer = Sequencer(Rules("sync", 3), Made().make)
    with pytest.raises(ServiceError, match=problem):
        sequencer.push(push)
    assert not sequencer._waiting


def test_an_update_that_fails_is_not_made() -> None:
    """Its clients get the error, and may push again."""
    calls: list[int] = []

    def make(number: int, pushes: Sequence[Push]) -> None:
        calls.append(number)
        if len(calls) == 1:
            raise ServiceError("w: a gradient has NaN")

    sequencer = Sequencer(Rules("sync", 2), make)
    with ThreadPoolExecutor() as pool:
        other = started(pool, sequencer, push_of(0, 1, 0))
        with pytest.raises(ServiceError, match="NaN"):
            sequencer.push(push_of(1, 1, 0))
        with pytest.raises(ServiceError, match="NaN"):
            other.result(30)
        other = started(pool, sequencer, push_of(0, 2, 0))
        assert sequencer.push(push_of(1, 2, 0)) == Outcome(1, True)
    assert calls == [1, 1]


def test_a_failure_ends_all_waits() -> None:
    """As when a server is lost."""
    sequencer = Sequencer(Rules("sync", 2), Made().make)
    with ThreadPoolExecutor() as pool:
        waits = [started(pool, sequencer, push_of(0, 1, 0)), pool.submit(sequencer.wait, 5, 60.0)]
        sequencer.fail(ServiceError("ps/1 is lost"))
        for wait in waits:
            with pytest.raises(ServiceError, match="ps/1 is lost"):
                wait.result(30)


def test_wait_ends_when_the_updates_are_made() -> None:
    """Or when the time is over."""
    sequencer = Sequencer(Rules(), Made().make)
    assert not sequencer.wait(1, 0.01)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(sequencer.wait, 2, 60.0)
        for number in (1, 2):
            sequencer.push(push_of(0, number, 0))
        assert waits.result(30)


@pytest.mark.parametrize("seed", range(20))
def test_ssp_keeps_its_bound(seed: int) -> None:
    """No worker gets an answer more than s steps ahead of the slowest; one that leaves holds nobody."""
    made, random_, staleness, steps = Made(), random.Random(seed), seed % 4, 15
    sequencer = Sequencer(Rules("ssp", staleness=staleness, worker_timeout_secs=0.0), made.make)
    done, ahead, lock = [0, 0, 0], [0], threading.Lock()

    def work(worker: int) -> None:
        pauses = random.Random(seed * 10 + worker)
        for number in range(1, steps + 1):
            time.sleep(pauses.random() * 0.002 * (worker + 1))
            sequencer.push(push_of(worker, number, 0))
            with lock:
                done[worker] = number
                ahead[0] = max(ahead[0], number - min(max(done[i], 0) for i in range(3)) if min(done) < steps else 0)
        sequencer.connected(worker, -1)

    for worker in range(3):
        sequencer.connected(worker, 1)
    threads = [threading.Thread(target=work, args=(worker,)) for worker in random_.sample(range(3), 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(itertools.chain(*made)) == sorted((f"c{w}", n) for w in range(3) for n in range(1, steps + 1))
    assert ahead[0] <= staleness + 1  # of what the others have been told, which is one step behind what they have done


@pytest.mark.parametrize("seed", range(5))
def test_each_push_counts_once_under_resends(seed: int) -> None:
    """Clients send each push once or more, from several threads: each is in exactly one update."""
    made = Made()
    sequencer = Sequencer(Rules(), made.make)

    def work(worker: int) -> None:
        random_ = random.Random(seed * 100 + worker)
        for number in range(1, 41):
            with ThreadPoolExecutor() as pool:
                sends = [pool.submit(sequencer.push, push_of(worker, number, 0)) for _ in range(random_.randint(1, 3))]
                assert len({send.result(60) for send in sends}) == 1

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(itertools.chain(*made)) == sorted((f"c{w}", n) for w in range(4) for n in range(1, 41))


def test_the_state_of_a_new_service_is_empty() -> None:
    """It begins at step 0."""
    with Sequencer(Rules(), Made().make).paused() as state:
        assert state == State()


def test_a_push_of_ssp_that_is_sent_again_waits_as_before() -> None:
    """The bound holds for it, too."""
    sequencer = Sequencer(Rules("ssp", staleness=0), Made().make)
    for worker in range(2):
        sequencer.connected(worker, 1)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(sequencer.push, push_of(0, 1, 0))
        until(lambda: sequencer.step == 1)
        again = pool.submit(sequencer.push, push_of(0, 1, 0))
        time.sleep(0.2)
        assert not first.done()
        assert not again.done()
        sequencer.push(push_of(1, 1, 0))
        assert first.result(30) == again.result(30)


def test_a_push_of_ssp_that_waits_is_not_told_of_lost_updates() -> None:
    """Its update was made, and is lost, as the servers begin again: it has to be sent again."""
    sequencer = Sequencer(Rules("ssp", staleness=0), Made().make)
    for worker in range(2):
        sequencer.connected(worker, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(sequencer.push, push_of(0, 1, 0))
        until(lambda: sequencer.step == 1)
        sequencer.restart(State(), "next")
        with pytest.raises(NotReadyError):
            waiting.result(30)


def test_what_was_applied_is_told_at_the_end() -> None:
    """A push that is sent again after the end was applied before."""
    sequencer = Sequencer(Rules(), Made().make)
    first = sequencer.push(push_of(0, 1, 0))
    sequencer.fail(ServiceError("over"))
    assert sequencer.push(push_of(0, 1, 0)) == first
    with pytest.raises(ServiceError, match="over"):
        sequencer.push(push_of(0, 2, 1))
