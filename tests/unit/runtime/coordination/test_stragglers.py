"""Which worker is seen to be behind."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import assert_done, linear, model_of, run_job
from support.processes import summary

from tfps.runtime.coordination import heartbeat, restart_barrier
from tfps.runtime.coordination.job_state import WorkerTotals
from tfps.runtime.coordination.stragglers import Stragglers, WorkerPace

pytestmark = pytest.mark.slow


def test_in_step_the_one_that_all_wait_for_is_behind() -> None:
    """Only a worker that is waited for alone counts; after a few looks nothing is said."""
    seen = Stragglers()
    for ahead in ([1, 0, 1], [1, 0, 1], [0, 0, 1]):
        seen.look_in_step(ahead)
        assert seen.shares == {}
    seen.look_in_step([1, 1, 1])
    assert seen.shares == {1: 0.5}


def test_where_updates_leave_some_out_the_latest_is_behind() -> None:
    """The others are at the same step, and one of them may be late by less."""
    seen = Stragglers()
    for ahead in ([0, -3, 0], [1, -2, -1], [0, -1, -1], [0, 0, 1]):
        seen.look_in_step(ahead)
    assert seen.shares == {1: 0.5}


def test_one_worker_holds_up_nobody() -> None:
    """In sync, too: there are no others that wait for it."""
    seen = Stragglers()
    for _ in range(9):
        seen.look_in_step([0])
    assert seen.shares == {}


@pytest.mark.parametrize(("pace", "share"), [(10, {}), (6, {}), (4, {1: 1.0}), (0, {1: 1.0})])
def test_apart_the_pace_tells(pace: int, share: dict[int, float]) -> None:
    """A worker at less than half the pace of the others is behind, also one that has given no sign since."""
    seen = Stragglers()
    for secs in range(6):
        own = WorkerPace(pace * secs, 0, 1000.0 + (secs if pace else 0.0))
        seen.look_apart([WorkerPace(10 * secs, 0, 1000.1 + secs), own], [0, 1])
    assert seen.shares == share


def test_before_all_have_begun_nobody_is_behind() -> None:
    """A worker that has taken no step yet, and a job that stands still, tell nothing."""
    seen = Stragglers()
    for secs in range(6):
        seen.look_apart([WorkerPace(10 * secs, 0, 1000.0 + secs), WorkerPace()], [0, 1])
        seen.look_apart([WorkerPace(60, 0, 1006.0), WorkerPace(60, 0, 1006.0)], [0, 1])
        seen.look_apart([WorkerPace(60, 0, 1006.0), WorkerPace(60, 0, 1006.0)], [0, 1])
    assert seen.shares == {}


def test_who_is_through_is_not_behind() -> None:
    """A worker whose input has ended before the others' takes no step any more, and holds nobody up."""
    seen = Stragglers()
    for secs in range(6):
        seen.look_apart(
            [
                WorkerPace(10 * secs, 0, 1000.0 + secs),
                WorkerPace(60, 0, 1000.0),
                WorkerPace(9 * secs, 0, 1000.0 + secs),
            ],
            [0, 2],
        )
    assert seen.shares == {}


def test_who_waits_is_not_slow() -> None:
    """A worker that takes as many steps as the one it waits for is fast, and one that only waited tells nothing."""
    seen = Stragglers()
    for secs in range(6):
        fast = WorkerPace(secs, 0, 1000.0 + secs, waited=0.8 * secs)
        held = WorkerPace(7, 0, 1000.0, is_waiting=True)
        seen.look_apart([fast, WorkerPace(secs, 0, 1000.0 + secs), fast, held], [0, 1, 2, 3])
    assert seen.shares == {1: 1.0}


def test_time_without_an_answer_of_the_ps_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's heartbeats arrive while the PS stand still; those of a lost worker are missing for longer."""
    now, pulses, nobody = 100.0, [1, 1], cast(Any, None)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
    beating = heartbeat.Heartbeat(nobody, lambda: None)
    beating._pulse = lambda: pulses
    for now, pulses in ((100.0, [1, 1]), (101.0, [2, 1]), (102.0, [3, 1]), (142.0, [3, 1])):  # noqa: B007
        beating._give_sign()
    assert [beating.silent_secs(worker) for worker in (0, 1)] == [0.0, 2.0]
    now, pulses = 143.0, [4, 1]
    beating._give_sign()
    assert [beating.silent_secs(worker) for worker in (0, 1)] == [0.0, 3.0]
    assert beating.pulse_of(0) == 4


def one_ends_early() -> Any:
    """Return an ``input_fn`` of a batch every 50 ms; worker 2 has four only, and the others wait for its last one."""
    is_last = threading.Event()

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        ends_early = context.input_pipeline_id == 2

        def wait(number: Any) -> Any:
            if ends_early and number == 3:
                is_last.set()
            if not ends_early and number == 20:
                assert is_last.wait(100)
            time.sleep(0.05)
            return np.float32(1.0)

        if mode == "eval":
            return None
        numbers = tf.data.Dataset.range(4 if ends_early else 10**6)
        return numbers.map(lambda x: ({"x": tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [])}, 0.0))

    return input_fn


def test_a_job_does_not_say_that_who_was_through_was_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chief looks at workers that train: one of three, whose input had ended, is not in the summary."""
    monkeypatch.setattr(heartbeat, "EVERY_SECS", 0.05)
    monkeypatch.setattr(restart_barrier, "_LISTEN_SECS", 0.05)
    monkeypatch.setattr(restart_barrier, "_LISTENS_A_PACE", 4)
    model = model_of(one_ends_early(), linear)
    assert_done(run_job(model, 1, 3, mode="async", max_steps=200, model_dir=str(tmp_path)))
    reported = summary(tmp_path)
    assert reported["tasks"]["worker/2"]["steps"] == 4
    assert "worker/2" not in reported["behind"]


def test_a_heartbeat_tells_of_skipped_batches_and_of_earlier_processes() -> None:
    """It is sent when a batch was skipped, though no step was taken, and it has what lost processes had reported."""
    own, sent = WorkerPace(5, 20, 1000.0, 1.0, 1, 5, 40), list[WorkerPace]()
    nobody: Any = None
    beating = heartbeat.Heartbeat(nobody, lambda: own)
    beating.before = WorkerTotals(10, 3, 2.0, 8, 60)
    beating._beat = sent.append
    last = beating._leave_step((-1, 0, False))
    own = replace(own, skipped=2)
    last = beating._leave_step(last)
    own = replace(own, is_waiting=True)
    last = beating._leave_step(last)
    assert beating._leave_step(last) == last == (5, 2, True)
    first = WorkerPace(15, 20, 1000.0, 3.0, 4, 13, 100)
    assert sent == [first, replace(first, skipped=5), replace(first, skipped=5, is_waiting=True)]
