"""What the summary tells of the workers' paces."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.checkpoints import Training
from support.cluster import tf

from tfps import report
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.runtime.checkpoint import manifest
from tfps.runtime.coordination.job_state import WorkerTotals
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.training import summary_writer
from tfps.runtime.training.summary_writer import observations
from tfps.runtime.training.worker_progress import Progress
from tfps.storage import open_file
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


def test_a_chief_that_fails_early_reads_no_checkpoint(tmp_path: Path) -> None:
    """A model with an error ends at once, however much data the newest checkpoint has; the summary names it."""
    Training(tmp_path).save(7)
    config, cluster = JobConfig(model_dir=str(tmp_path)), Cluster(("a:1",), ("b:1",))
    with mock.patch.object(manifest, "open_file", wraps=open_file) as opened:
        summary_writer.write(config, cluster, None, None, {0: 0}, error=ModelError("no such feature"))
    assert not [call for call in opened.call_args_list if ".data-" in call.args[0].name]
    written = JobSummary.read(tmp_path / "summary.json")
    assert written is not None
    assert (written.checkpoint, written.global_step) == (str(tmp_path / "model.ckpt-7"), 7)
    assert (written.status, written.exit_code, written.error) == ("failed", 2, "no such feature")
