"""Which pushes make which update, and in which order: the decisions of the first server of a service.

``Sequencer`` gives each update its number and decides what belongs to it. The modes::

    async   each push is an update
    sync    the pushes of N - k different workers, computed at the same step; late ones are dropped and counted
    ssp     each push is an update, and its client gets the answer when it is at most s steps ahead of the slowest

A push has an identity, that of its client and a number. One that is sent again, because the connection broke before the
answer came, counts once. Does not import TensorFlow.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tfps.errors import NotReadyError, ServiceEndedError, ServiceError
from tfps.runtime.service.live_workers import LiveWorkers, named
from tfps.runtime.service.pushes import RESTARTING, Decisions, Outcome, Push, PushId, Rules, State, WaitingPush
from tfps.text import plural

_LOOK_SECS = 0.5


class Sequencer:
    """Decide about pushes; threads call it, and it calls ``make`` for one update at a time.

    Args:
        rules: When an update is made.
        make: Makes an update of some pushes: gets its number, from 1 on, and the pushes in the order of the workers.
        state: Where to begin.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        rules: Rules,
        make: Callable[[int, Sequence[Push]], None],
        state: State | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        state = state or State()
        self._rules, self._make, self._clock = rules, make, clock
        self._step = self._forming = state.step
        self._decided = Decisions(state.decided)
        self._changed, self._making = threading.Condition(threading.RLock()), threading.Lock()
        self._waiting: dict[PushId, WaitingPush] = {}
        self._stalled: set[int] = set()  # the workers that have waited too long in this update
        self._workers = LiveWorkers(rules.worker_timeout_secs, clock)
        self._failure: Exception | None = None
        self._generation = ""

    @property
    def step(self) -> int:
        """The number of updates that were made."""
        return self._step

    def has(self, push: PushId) -> bool:
        """Return whether a push waits, or is in an update that is being made."""
        return push in self._waiting

    def under_way(self, client: str) -> Collection[int]:
        """Return the numbers of a client's pushes that wait, or are in an update that is being made."""
        with self._changed:
            return [push.number for push in self._waiting if push.client == client]

    def knows(self, push: PushId) -> bool:
        """Return whether a push waits, or was decided, or a later one of its client."""
        return push in self._waiting or self._decided.has(push)

    @contextmanager
    def paused(self) -> Iterator[State]:
        """Make no update while this context lasts; it has what a checkpoint holds."""
        with self._making:
            with self._changed:
                state = State(self._step, self._decided.by_client())
            yield state

    def restart(self, state: State, generation: str) -> None:
        """Begin a generation where a checkpoint was made. Pushes that wait end with an error, and clients ask again."""
        with self._making, self._changed:
            self._generation = generation
            self._step = self._forming = state.step
            self._decided = Decisions(state.decided)
            for one in self._waiting.values():
                one.error = NotReadyError(RESTARTING)
            self._waiting.clear()
            self._stalled.clear()
            self._workers.restart()
            self._changed.notify_all()

    def dropped(self) -> Mapping[int, int]:
        """Return by worker how many of its pushes came too late."""
        with self._changed:
            return self._workers.dropped

    def connected(self, worker: int, change: int) -> None:
        """Note that a worker has made a connection (1), or has lost one (-1)."""
        with self._changed:
            self._forget_gone()  # who takes the place of a client that is gone does not bring back its push
            self._workers.connected(worker, change)
            self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """Note that a worker has said that it is done: without a connection, it holds nobody."""
        with self._changed:
            self._workers.leave(worker)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Let all pushes that wait, and all later ones, end with an error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait(self, step: int, timeout_secs: float, is_gone: Callable[[], bool] = lambda: False) -> bool:
        """Wait until so many updates are made, or nobody waits for them any more; return whether they are.

        Raises:
            Exception: That of ``fail``.
        """
        deadline = self._clock() + timeout_secs
        with self._changed:
            while self._step < step and self._clock() < deadline and not is_gone():
                self._check()
                self._check_end()
                self._changed.wait(min(_LOOK_SECS, max(deadline - self._clock(), 0.001)))
            self._check()
            return self._step >= step

    def push(self, push: Push, is_gone: Callable[[], bool] = lambda: False) -> Outcome:
        """Wait until a push is decided, and applied if it is; return what has become of it.

        Args:
            push: The push.
            is_gone: Returns whether its client is gone. Its push keeps its place for a while, but nobody waits for it.

        Raises:
            ConnectionResetError: If the client is gone.
            ServiceError: If it cannot be decided: the push is of a step that has not been made, or of no worker.
            Exception: That of ``fail``, or of ``make``.
        """
        with self._changed:
            if done := self._decided.outcome(push.id):
                return self._outcome_of(WaitingPush(push, self._clock(), done), is_gone)
            self._check()
            self._check_end()
            if push.staged_in != self._generation:
                raise NotReadyError(RESTARTING)
            waiting = self._waiting.get(push.id) or self._admitted(push)
            group = [] if waiting.outcome else self._group(waiting)
        if group:
            self._update(group)
        return self._outcome_of(waiting, is_gone)

    def _check(self) -> None:
        if self._failure:
            raise self._failure

    def _check_end(self) -> None:
        """Raise ``ServiceEndedError`` if there is no step left."""
        if self._rules.max_steps is not None and self._step >= self._rules.max_steps:
            raise ServiceEndedError(f"the service has come to its last step, {self._rules.max_steps}.")

    def _admitted(self, push: Push) -> WaitingPush:
        """Return a new push that waits, or is dropped.

        Raises:
            ServiceError: If it cannot belong to any update.
        """
        rules = self._rules
        if not push.worker >= 0 or (rules.mode == "sync" and push.worker >= rules.num_workers):
            whose = f"worker={push.worker}, and the service has {plural(rules.num_workers, 'worker')}"
            raise ServiceError(f"{whose}: give an index from 0 to {rules.num_workers - 1}.")
        is_lost = push.computed_in not in ("", self._generation)  # the parameters that it was computed with
        if not is_lost and push.computed_at > self._forming:
            raise ServiceError(
                f"step={push.computed_at}, and the service is at step {self._step}: pull before you push."
            )
        self._workers.seen(push.worker)
        waiting = self._waiting[push.id] = WaitingPush(push, self._clock())
        if rules.mode == "sync" and (is_lost or push.computed_at < self._forming):
            self._workers.drop(push.worker)
            self._decide(waiting, Outcome(self._step, is_applied=False))
        return waiting

    def _group(self, waiting: WaitingPush) -> Sequence[WaitingPush]:
        """Return the pushes of the update that this one completes; none if others are missing, or it was complete."""
        if waiting.is_taken:
            return []
        if self._rules.mode != "sync":
            waiting.is_taken = True
            return [waiting]
        self._forget_gone()
        by_worker = {one.push.worker: one for one in reversed(self._open())}  # of one worker, the first counts
        if len(by_worker) < self._rules.needed:
            return []
        group = [by_worker[worker] for worker in sorted(by_worker)]
        for one in group:
            one.is_taken = True
        self._forming += 1
        self._stalled.clear()
        for late in self._open():  # a second push of a worker: that of a function that was run again
            self._workers.drop(late.push.worker)
            self._decide(late, Outcome(self._forming, is_applied=False))
        return group

    def _open(self) -> Sequence[WaitingPush]:
        """Return the pushes that wait for others, in the order in which they came."""
        return [one for one in self._waiting.values() if not one.is_taken and not one.outcome]

    def _forget_gone(self) -> None:
        """Let the pushes of workers that are gone wait no more: their places are free."""
        for one in self._open():
            if not self._workers.lives(one.push.worker):
                del self._waiting[one.push.id]
                one.error = ServiceError(f"worker {one.push.worker} had no connection for too long.")
                self._changed.notify_all()

    def _update(self, group: Sequence[WaitingPush]) -> None:
        """Make an update; one at a time."""
        with self._making:
            number = self._step + 1
            try:
                self._check()  # a save for the end may have been made meanwhile
                self._check_end()
                if any(one.error for one in group):
                    return  # the service has begun again meanwhile
                self._forming = max(self._forming, number)  # clients see the update before ``_make`` has returned
                self._make(number, [one.push for one in group])
            except Exception as error:
                with self._changed:
                    self._failed(group, error)
                return
            with self._changed:
                self._step = number
                self._forming = max(self._forming, number)
                for one in group:
                    self._workers.stepped(one.push.worker)
                    self._decide(one, Outcome(number, is_applied=True))

    def _failed(self, group: Sequence[WaitingPush], error: Exception) -> None:
        """Note that an update was not made."""
        self._forming = self._forming - 1 if self._rules.mode == "sync" else self._step
        for one in group:
            one.error = error
            self._waiting.pop(one.push.id, None)
        self._changed.notify_all()

    def _decide(self, waiting: WaitingPush, outcome: Outcome) -> None:
        waiting.outcome = outcome
        self._waiting.pop(waiting.push.id, None)
        self._decided.add(waiting.push.id, outcome)
        self._changed.notify_all()

    def _outcome_of(self, waiting: WaitingPush, is_gone: Callable[[], bool]) -> Outcome:
        """Wait for the outcome of a push, and in ssp until its worker may go on."""
        with self._changed:
            while not (waiting.error or (waiting.outcome and self._may_go_on(waiting.push.worker))):
                if not waiting.outcome and not waiting.is_taken:
                    self._check()
                    self._check_end()
                    self._forget_gone()
                self._check_stall(waiting)
                if not self._changed.wait(_LOOK_SECS) and is_gone():
                    raise ConnectionResetError("the client is gone")
            if waiting.error:
                raise waiting.error
            if waiting.push.staged_in != self._generation:
                raise NotReadyError(RESTARTING)  # what it has changed is lost, unless the checkpoint has it
            assert waiting.outcome
            return waiting.outcome

    def _check_stall(self, waiting: WaitingPush) -> None:
        """Check that a push has not waited for other workers for too long; its place is free then.

        Raises:
            ServiceError: If it has.
        """
        limit, is_made = self._rules.stall_timeout_secs, waiting.is_taken and not waiting.outcome
        if is_made or waiting.error or self._clock() - waiting.since < limit:
            return
        secs = f"{limit:g} s (--stall_timeout_secs)"
        if waiting.outcome:
            behind = self._workers.behind(waiting.push.worker, self._rules.staleness)
            advice = "A client that only reads counts, too: give it the index of one that pushes."
            raise ServiceError(f"the push is applied, but {named(behind)} too far behind for {secs}. {advice}")
        self._waiting.pop(waiting.push.id, None)
        self._stalled.add(waiting.push.worker)
        pushed = {one.push.worker for one in self._open()} | self._stalled
        missing = [worker for worker in range(self._rules.num_workers) if worker not in pushed]
        advice = "Each client needs an index of its own (worker=, or TFPS_WORKER)."
        raise ServiceError(f"the push is not applied: {named(missing)} without a push for {secs}. {advice}")

    def _may_go_on(self, index: int) -> bool:
        is_free = self._rules.mode != "ssp" or self._failure is not None
        return is_free or self._workers.lead(index) <= self._rules.staleness
