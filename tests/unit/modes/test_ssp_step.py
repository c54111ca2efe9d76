"""The bound of ``ssp`` under many schedules, with its real operations on a real server."""

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from support.cluster import session_config, shared_servers, target_of

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes import ssp_step
from tfps.modes.base import ModeContext

pytestmark = pytest.mark.slow

WORKERS, SCHEDULES, EVENTS = 3, 1000, 25


class Descent(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Does not raise the step, as the wrapper in which tfps uses an optimizer."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply them."""
        del global_step
        return super().apply_gradients(grads_and_vars, None, name)


@dataclass
class Operations:
    """What one worker does on the PS, as functions.

    Attributes:
        step: Takes a step and returns the global step, the number of allowed steps, and a ticket.
        allowed: Returns the number of allowed steps.
        awaited: Returns whom the worker waits for.
        renew: Waits for a token.
        join: Joins as a new process does.
        rejoin: Joins as a worker that has left does.
        leave: Leaves.
        evict: Raises the fence for the next worker.
        reset: Starts a job.
        applied: Returns how many steps each worker has taken.
        weight: Returns the variable, from which a step of worker i subtracts 2^i.
    """

    step: Any
    allowed: Any
    awaited: Any
    renew: Any
    join: Any
    rejoin: Any
    leave: Any
    evict: Any
    reset: Any
    applied: Any
    weight: Any


def operations(worker: int, staleness: int) -> Operations:
    """Return the operations of one worker, in a graph and a session of its own."""
    ps = "/job:ps/task:0"
    with tf.Graph().as_default() as graph, tf.device(ps):
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        global_step = tf.train.get_or_create_global_step()
        cluster = Cluster(("ps:1",), tuple(f"w:{index}" for index in range(WORKERS)))
        context = ModeContext(JobConfig(), cluster, Task("worker", worker))
        step = ssp_step.build(Descent(1.0), weight * 2.0**worker, global_step, context, staleness)
        drawn, init = step.draw_after(1, lambda op: op), tf.global_variables_initializer()
        evict = tf.group(step.fence.raise_)
    session = tf.Session(target_of(Task("ps", 0)), graph=graph, config=session_config("/job:ps"))
    call = session.make_callable
    take = call([drawn, step.train_op])

    def step_once() -> Any:
        return take()[0].tolist()

    return Operations(
        step=step_once,
        allowed=call(step.limit.allowed),
        awaited=call(step.limit.awaited),
        renew=call(step.limit.renew),
        join=call(step.worker_init),
        rejoin=call(step.rejoin),
        leave=call(step.leave),
        evict=lambda index: session.run(evict, {step.fence.workers: [index]}),
        reset=lambda: [session.run(each) for each in (init, step.chief_init)],
        applied=call(step.steps_taken),
        weight=call(weight.read_value()),
    )


@contextlib.contextmanager
def workers_of(staleness: int) -> Iterator[Sequence[Operations]]:
    """Yield the operations of all workers."""
    with shared_servers():
        yield [operations(index, staleness) for index in range(WORKERS)]


class Schedule:
    """A job whose workers act one after another, in an order that a seed decides, beside a model of their clocks.

    A worker holds what it was allowed at the end of its last step, while the others go on.
    """

    def __init__(self, workers: Sequence[Operations], staleness: int, seed: int) -> None:
        self._workers, self._staleness, self._random = workers, staleness, random.Random(seed)
        self.clocks, self.applied = [0] * WORKERS, [0] * WORKERS
        self.live: set[int] = set()
        self.held = [0] * WORKERS  # how many steps each worker may still take, as it knows
        self.fenced: set[int] = set()
        self.leads: set[int] = set()  # by how much workers were ahead as they began a step
        workers[0].reset()

    def run(self) -> None:
        """Join, then act."""
        for index in range(WORKERS):
            self._join(index)
        for _ in range(EVENTS):
            index, acts = self._random.randrange(WORKERS), (self._step, self._leave_or_join, self._evict_or_restart)
            self._random.choices(acts, (20, 1, 1))[0](index)
        assert self._workers[0].applied().tolist() == self.applied
        assert self._workers[0].weight() == -sum(2**index * steps for index, steps in enumerate(self.applied))

    def _slowest(self, index: int) -> int:
        return min(self.clocks[other] for other in {*self.live, index})

    def _expected(self, index: int) -> int:
        return self._slowest(index) + self._staleness + 1 - self.clocks[index]

    def _step(self, index: int) -> None:
        if index not in self.live:
            return
        if not self.held[index]:
            self.held[index] = self._look(index)
        if not self.held[index]:
            return
        lead = self.clocks[index] - self._slowest(index)
        assert lead <= self._staleness
        self.leads.add(lead)
        reached, allowed, _ = self._workers[index].step()
        self.clocks[index] += 1
        self.applied[index] += 1
        assert (reached, allowed) == (sum(self.applied), self._expected(index))
        self.held[index] = self.held[index] - 1 if self._random.random() < 0.5 else max(allowed, 0)

    def _look(self, index: int) -> int:
        allowed = self._workers[index].allowed()
        assert allowed == self._expected(index)
        awaited = [] if allowed > 0 else [one for one in self.live if self.clocks[one] == self._slowest(index)]
        assert self._workers[index].awaited().nonzero()[0].tolist() == sorted(awaited)
        return max(int(allowed), 0)

    def _join(self, index: int) -> None:
        worker = self._workers[index]
        (worker.rejoin if index not in self.fenced and self._random.random() < 0.5 else worker.join)()
        others = self.live - {index}
        if others:
            self.clocks[index] = min(self.clocks[other] for other in others)
        self.live.add(index)
        self.fenced.discard(index)
        self.held[index] = 0
        assert self._look(index) > 0

    def _leave_or_join(self, index: int) -> None:
        if index in self.live:
            self._workers[index].leave()
            self.live.discard(index)
        else:
            self._join(index)

    def _evict_or_restart(self, index: int) -> None:
        """Let another worker evict one, or let one that still counts as live be started again."""
        if index in self.live and self._random.random() < 0.5:
            self._join(index)
            return
        self._workers[(index + 1) % WORKERS].evict(index)
        self.live.discard(index)
        self.fenced.add(index)
        if self._random.random() < 0.2:
            with pytest.raises(tf.errors.InvalidArgumentError, match="taken for lost"):
                self._workers[index].step()


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_no_schedule_exceeds_the_bound(staleness: int) -> None:
    """In 1,000 schedules, with leaving, joining and evicted workers: never more than s ahead, and s is reached.

    Each worker is allowed exactly what the clocks allow, every step is applied once, and none of a fenced worker.
    """
    leads: set[int] = set()
    with workers_of(staleness) as workers:
        for seed in range(SCHEDULES // 4):
            schedule = Schedule(workers, staleness, seed)
            schedule.run()
            leads |= schedule.leads
    assert leads == set(range(staleness + 1))


@pytest.mark.parametrize("staleness", [0, 3])
def test_every_waiting_worker_is_woken(staleness: int) -> None:
    """Workers on threads wait for tokens alone, without a second look, also for one that leaves: none waits for ever.

    None is too far ahead.
    """
    steps = [60, 100, 150]
    clocks, live, leads, lock = [0] * WORKERS, set(range(WORKERS)), list[int](), threading.Lock()

    def work(index: int, worker: Operations) -> None:
        chance = random.Random(index)
        for _ in range(steps[index]):
            while worker.allowed() <= 0:
                worker.renew()
            with lock:
                leads.append(clocks[index] - min(clocks[other] for other in live))
            if chance.random() < 0.1:
                threading.Event().wait(0.01 * index)
            worker.step()
            with lock:
                clocks[index] += 1
        with lock:
            live.discard(index)
        worker.leave()

    with workers_of(staleness) as workers:
        workers[0].reset()
        for worker in workers:
            worker.join()
        threads = [threading.Thread(target=work, args=each, daemon=True) for each in enumerate(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads), clocks
        assert workers[0].applied().tolist() == steps
    assert max(leads) <= staleness + 1  # a clock here is raised a moment after that on the PS
