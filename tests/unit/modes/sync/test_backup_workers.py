"""The permit of updates that leave some gradients out: who has it, and who does not get it."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.base import ModeContext
from tfps.modes.synchronous import SyncMode
from tfps.runtime.coordination import interrupted_steps

CLUSTER = Cluster(("p:1",), ("w:1", "w:2", "w:3"))


class _Sgd(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """One that leaves ``global_step`` to the mode, as the one does that a mode gets."""

    def apply_gradients(self, pairs: Any, *_: Any) -> Any:
        """Apply the gradients."""
        return super().apply_gradients(pairs)


class _Worker:
    """A worker with a session of its own on a server. Its gradient is 1 more than its index."""

    def __init__(self, target: str, index: int) -> None:
        with tf.Graph().as_default() as graph:
            self.weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer(), use_resource=True)
            self.global_step = tf.train.get_or_create_global_step()
            context = ModeContext(JobConfig(backup_workers=1), CLUSTER, Task("worker", index))
            loss = self.weight * (1.0 + index)
            self.step = SyncMode().build_step(_Sgd(1.0), loss, self.global_step, context)
            self.init = tf.global_variables_initializer()
        assert self.step.recovery
        self.recovery, self.pause = self.step.recovery, self.step.pause
        self.session = tf.Session(target, graph=graph)

    def begin(self, generation: int) -> None:
        """Begin a generation, as the chief."""
        self.session.run(self.step.chief_init, {self.recovery.generation: generation})

    def ask(self, op: Any, generation: int | None = None) -> tuple[threading.Thread, list[Exception]]:
        """Run an operation in a thread; return that, and what it raises."""
        errors: list[Exception] = []
        fed = {} if generation is None else {self.recovery.generation: generation}

        def run() -> None:
            try:
                self.session.run(op, fed)
            except tf.errors.OpError as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread, errors

    def state(self) -> tuple[int, float]:
        """Return the global step and the weight."""
        step, weight = self.session.run([self.global_step, self.weight])
        return int(step), float(weight)

    def draw(self) -> None:
        """Draw a ticket, as a worker does before its first step and after a batch that it skips."""
        with self.session.graph.as_default():
            self.session.run(self.step.draw(1, 0))


@pytest.fixture
def workers() -> Iterator[list[_Worker]]:
    """Yield three workers in generation 0."""
    target = tf.train.Server.create_local_server().target
    found = [_Worker(target, index) for index in range(3)]
    found[0].session.run(found[0].init)
    found[0].begin(0)
    for worker in found:
        worker.session.run(worker.step.worker_init)
    yield found
    for worker in found:
        worker.session.close()


def _updated(workers: list[_Worker], pushing: list[_Worker]) -> None:
    """Let two workers push a gradient, and wait until it is in an update, and they have their tokens."""
    asked = [workers[0].ask(workers[0].step.update, 0), *(worker.ask(worker.step.train_op) for worker in pushing)]
    for thread, errors in asked:
        thread.join(60)
        assert not thread.is_alive()
        assert not errors


def _arrived(workers: list[_Worker]) -> None:
    """Wait until an update has taken the gradients that two workers push now."""
    pushes = [worker.ask(worker.step.train_op) for worker in workers[1:]]
    deadline = time.monotonic() + 60
    while workers[0].session.run(workers[0].step.updates_ahead).tolist()[1:] != [1, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(thread.is_alive() for thread, _ in pushes)


def test_a_paused_update_waits(workers: list[_Worker]) -> None:
    """It has its gradients, and changes nothing until the pause ends."""
    chief = workers[0]
    assert chief.pause
    chief.session.run(chief.pause.begin)
    update, errors = chief.ask(chief.step.update, 0)
    _arrived(workers)
    update.join(0.3)
    assert update.is_alive()
    assert chief.state() == (0, 0.0)
    chief.session.run(chief.pause.end)
    update.join(60)
    assert not errors
    assert chief.state() == (1, -2.5)


def test_no_update_starts_after_the_chief_has_settled(workers: list[_Worker]) -> None:
    """So what it saves then is of one step, though others push on."""
    chief = workers[0]
    interrupted_steps.settle(chief.session, chief.recovery, chief.pause)
    update, _ = chief.ask(chief.step.update, 0)
    _arrived(workers)
    update.join(0.3)
    assert update.is_alive()
    assert chief.state() == (0, 0.0)


def test_a_chief_that_was_lost_while_it_saved_holds_nobody(
    workers: list[_Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor finds updates paused, and lets them start again; each has a permit of its own generation."""
    monkeypatch.setattr(interrupted_steps, "_SETTLE_SECS", 0.2)
    chief = workers[0]
    assert chief.pause
    chief.session.run(chief.pause.begin)
    interrupted_steps.settle(chief.session, chief.recovery, chief.pause)
    chief.begin(1)
    for worker in workers:
        worker.session.run(worker.step.worker_init)
    update, errors = chief.ask(chief.step.update, 1)
    for worker in workers[1:]:
        worker.ask(worker.step.train_op)
    update.join(60)
    assert not update.is_alive()
    assert not errors
    assert chief.state() == (1, -2.5)


def test_an_update_of_an_earlier_generation_changes_nothing(workers: list[_Worker]) -> None:
    """It waited for the permit when its chief was lost, and gets that of the new generation."""
    chief = workers[0]
    assert chief.pause
    chief.session.run(chief.pause.begin)
    update, errors = chief.ask(chief.step.update, 0)
    _arrived(workers)
    update.join(0.3)
    chief.begin(1)
    update.join(60)
    assert not update.is_alive()
    assert [type(error) for error in errors] == [tf.errors.InvalidArgumentError]
    assert chief.state() == (0, 0.0)


def test_what_lost_chiefs_still_ask_for_holds_nobody(workers: list[_Worker]) -> None:
    """Two that waited to save, and that the PS do not know to be lost, take no permit of the new generation."""
    chief = workers[0]
    assert chief.pause
    chief.session.run(chief.pause.begin)
    asked = [chief.ask(chief.pause.begin) for _ in range(2)]
    for thread, _ in asked:
        thread.join(0.2)
        assert thread.is_alive()
    chief.begin(1)
    interrupted_steps.clear(chief.session, chief.recovery)
    chief.begin(1)
    for worker in workers:
        worker.session.run(worker.step.worker_init)
    update, errors = chief.ask(chief.step.update, 1)
    for worker in workers[1:]:
        worker.ask(worker.step.train_op)
    update.join(60)
    assert not update.is_alive()
    assert not errors
    assert chief.state() == (1, -2.5)


def test_a_worker_that_comes_back_has_input_again(workers: list[_Worker]) -> None:
    """Two of three inputs have to have ended at the same time."""

    def ends(worker: _Worker) -> bool:
        with worker.session.graph.as_default():
            worker.session.run(worker.step.give_back(1))
        return bool(worker.session.run(worker.step.ended))

    assert not ends(workers[1])
    workers[1].session.run(workers[1].step.worker_init)
    assert not ends(workers[2])
    assert ends(workers[1])


def test_a_worker_that_begins_late_pushes_one_gradient_a_step(workers: list[_Worker]) -> None:
    """The others have made updates before it begins: it takes the tokens of these, and then waits for the next."""
    chief, late = workers[0], workers[2]
    for _ in range(3):
        _updated(workers, workers[:2])
    late.session.run(late.step.worker_init)
    late.draw()
    update, _ = chief.ask(chief.step.update, 0)
    first, _ = late.ask(late.step.train_op)
    first.join(1)
    assert first.is_alive()
    second, _ = late.ask(late.step.train_op) if not first.is_alive() else (first, [])
    update.join(0.3)
    assert update.is_alive()
    workers[1].session.run(workers[1].step.train_op)
    for thread in (update, second):
        thread.join(60)
        assert not thread.is_alive()
    assert chief.state() == (4, -3 * 1.5 - 2.5)


def test_a_worker_that_begins_between_an_update_and_its_token_pushes_one_gradient_a_step(
    workers: list[_Worker],
) -> None:
    """The step has been raised, and its token is not there yet: the worker's gradient is of the step before."""
    late = workers[2]
    _updated(workers, workers[:2])
    with late.session.graph.as_default():
        taken = late.session.run(tf.FIFOQueue(-1, tf.int64, shapes=[], shared_name="tfps/tokens_2").dequeue())
    late.session.run(late.step.worker_init)
    late.draw()
    ahead = lambda: late.session.run(late.step.updates_ahead)[2]  # noqa: E731
    assert (taken, ahead()) == (1, -1)


def test_a_worker_that_skips_a_batch_goes_on_with_the_newest_step(workers: list[_Worker]) -> None:
    """Its next gradient is in an update, and its next token is that of this update."""
    late = workers[2]
    for _ in range(3):
        _updated(workers, workers[:2])
    late.draw()
    _updated(workers, workers[1:])
    assert workers[0].state() == (4, -3 * 1.5 - 2.5)
    _updated(workers, workers[1:])
    assert workers[0].state() == (5, -3 * 1.5 - 2 * 2.5)


def test_a_worker_that_skips_a_batch_finds_that_training_has_ended(workers: list[_Worker]) -> None:
    """No token comes any more, and it waits for none."""
    for worker in workers[:2]:
        with worker.session.graph.as_default():
            worker.session.run(worker.step.give_back(1))
    workers[2].draw()
    _, errors = asked = workers[2].ask(workers[2].step.train_op)
    asked[0].join(60)
    assert [type(error) for error in errors] == [tf.errors.OutOfRangeError]
