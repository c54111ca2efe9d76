"""What the summary tells of the workers' paces."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import tf

from tfps import report
from tfps.runtime.coordination.job_state import WorkerTotals
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.training.summary_writer import observations
from tfps.runtime.training.worker_progress import Progress
from tfps.summary import ChiefReport, JobSummary

assert tf


@pytest.mark.parametrize(
    ("before", "steps", "paces"),
    [
        (WorkerPace(steps=500, secs=50.0), 0, {"worker/0": 10.0, "worker/1": 10.0}),
        (WorkerPace(steps=500, secs=50.0), 10, {"worker/0": 10.0, "worker/1": 10.0}),
        (WorkerPace(), 0, {"worker/1": 10.0}),
        (WorkerPace(), 2, {"worker/0": 2.0, "worker/1": 10.0}),
    ],
)
def test_a_chief_that_was_started_again_is_not_slow(before: WorkerPace, steps: int, paces: dict[str, float]) -> None:
    """Its pace counts what it had done before; one that has taken no step has none, and is not named."""
    chief: Any = SimpleNamespace(staleness=lambda _: None, partial_updates=lambda _: 0)
    state: Any = SimpleNamespace(totals=lambda _: [WorkerTotals(), WorkerTotals(600, 0, 60.0)])
    loop: Any = SimpleNamespace(progress=Progress(steps=steps, began=100.0, last_step=101.0))
    stragglers: Any = SimpleNamespace(shares={})
    workers = observations(None, state, chief, loop, stragglers, before).workers
    assert workers is not None
    assert workers.steps_per_sec == pytest.approx(paces, rel=0.05)
    slowest = report.slowest(JobSummary(chief=ChiefReport(is_blocking=False, seconds=60.0), workers=workers))
    assert slowest == ("worker/0: 20% of the others' steps a second" if paces.get("worker/0") == 2.0 else "")
