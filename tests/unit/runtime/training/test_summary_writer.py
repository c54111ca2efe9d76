"""What the summary tells of the workers' paces."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import Training
from support.cluster import LINEAR, dataset_of, linear, model_of, run_job, train
from support.processes import summary

from tfps import report
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import DivergedError, ModelError
from tfps.modes.registry import mode_of
from tfps.runtime.checkpoint import manifest
from tfps.runtime.coordination.job_state import WorkerTotals
from tfps.runtime.graph import builder
from tfps.runtime.training import chief, summary_writer
from tfps.runtime.training.connection import Connection
from tfps.runtime.training.summary_writer import observations
from tfps.runtime.training.worker_parts import WorkerParts
from tfps.runtime.training.worker_progress import Progress
from tfps.storage import open_file
from tfps.summary import JobSummary
from tfps.summary_entries import ChiefReport
from tfps.text import utc


def totals_after(before: WorkerTotals, progress: Progress, unreported: int = 0) -> WorkerTotals:
    """Return the totals of a worker that was started again."""
    parts: Any = SimpleNamespace(heartbeat=SimpleNamespace(before=before, unreported=unreported))
    return WorkerParts.totals(parts, progress)


@pytest.mark.parametrize(
    ("before", "unreported", "steps", "paces"),
    [
        (WorkerTotals(steps=500, secs=50.0), 0, 0, {"worker/0": 10.0, "worker/1": 10.0}),
        (WorkerTotals(steps=500, secs=50.0), 0, 10, {"worker/0": 10.0, "worker/1": 10.0}),
        (WorkerTotals(steps=500, secs=50.0), 9, 10, {"worker/0": 10.0, "worker/1": 10.0}),
        (WorkerTotals(), 0, 0, {"worker/1": 10.0}),
        (WorkerTotals(), 9, 0, {"worker/1": 10.0}),
        (WorkerTotals(), 0, 2, {"worker/0": 2.0, "worker/1": 10.0}),
        (WorkerTotals(), 1, 2, {"worker/0": 2.0, "worker/1": 10.0}),
    ],
)
def test_a_chief_that_was_started_again_is_not_slow(
    before: WorkerTotals, unreported: int, steps: int, paces: dict[str, float]
) -> None:
    """Its pace counts what it had done before; one that has taken no step has none, and is not named."""
    none: dict[str, Any] = {"staleness": lambda _: None, "partial_updates": lambda _: 0, "rounds": lambda _: None}
    chief: Any = SimpleNamespace(**none, gradients_dropped=lambda _: [])
    totals = totals_after(before, Progress(steps=steps, began=100.0, last_step=101.0), unreported)
    stragglers: Any = SimpleNamespace(shares={})
    workers = observations(None, [totals, WorkerTotals(600, 0, 60.0)], chief, stragglers).workers
    assert workers is not None
    assert workers.steps_per_sec == pytest.approx(paces, rel=0.05)
    slowest = report.slowest(JobSummary(chief=ChiefReport(is_blocking=False, seconds=60.0), workers=workers))
    assert slowest == ("worker/0: 20% of the others' steps a second" if paces.get("worker/0") == 2.0 else "")


def test_what_a_lost_process_did_is_in_the_totals() -> None:
    """Steps, skipped batches and examples are those of all processes of a worker."""
    progress = Progress(steps=5, batches=5, examples=35, skipped=1, began=10.0, last_step=11.0)
    totals = totals_after(WorkerTotals(10, 3, 2.0, 10, 40), progress, unreported=15)  # within a second
    assert totals == WorkerTotals(steps=30, skipped=4, secs=4.0, batches=15, examples=75)
    counted = summary_writer.counts([totals, WorkerTotals(10, 2, 1.0, 10, 90), WorkerTotals(7, 1, 1.0)])
    assert (counted.batches_skipped, counted.batch_size) == (7, (30 * 5 + 10 * 9) / 40)
    assert counted.secs == 4.0


@pytest.mark.parametrize("ahead_secs", [-3600, 3600])
def test_the_seconds_of_a_run_are_those_that_a_worker_has_measured(tmp_path: Path, ahead_secs: int) -> None:
    """The chief was started again on a host whose clock is wrong by an hour: only the time of the start shows it."""
    config, cluster = JobConfig(model_dir=str(tmp_path)), Cluster(("a:1",), ("b:1", "c:1"))
    built = builder.training(config, cluster, Task("worker", 0), LINEAR)
    with built.graph.as_default():
        again = chief.Chief(config, cluster, LINEAR, built, Connection(built.graph))
    began = {"machine": "another", "uptime": 0.0, "time": time.time() - ahead_secs}
    with mock.patch.object(again, "global_step", return_value=17):
        again.take_over(mock.Mock(), json.dumps({"layout": built.layout, "step": 10, "began": began}))
    again.owner.release()
    loop: Any = SimpleNamespace(progress=Progress(global_step=30))
    totals = [WorkerTotals(6, 0, 4.0, 6, 12), WorkerTotals(14, 0, 10.0, 14, 28)]
    summary_writer.write(config, cluster, loop, again, {}, summary_writer.counts(totals))
    found = summary(tmp_path)
    assert (found["seconds"], found["examples_per_sec"], found["began"]) == (10.0, 4.0, utc(began["time"]))


@pytest.mark.parametrize(("mode", "steps"), [("sync", [24, 24, 23]), ("async", [24, 19, 23])])
def test_the_steps_of_a_worker_that_is_gone_at_the_end(mode: str, steps: list[int]) -> None:
    """In sync it has taken each step of the run; one that has signed off says itself how many."""
    parts: Any = mock.Mock()
    parts.config = JobConfig(mode=mode)
    parts.built.step.steps_taken, parts.built.mode = None, mode_of(parts.config)
    parts.cluster.num_workers, parts.global_step.return_value = 3, 34
    parts.others.not_done.return_value = [Task("worker", 1)]
    parts.totals_of_workers.return_value = [WorkerTotals(24), WorkerTotals(19), WorkerTotals(23)]
    parts.counted_steps = lambda first: WorkerParts.counted_steps(parts, first)
    assert WorkerParts.steps_of_workers(parts, 10, Progress()) == steps


@pytest.mark.slow
def test_a_worker_is_not_slow_because_others_go_on_when_its_input_has_ended(tmp_path: Path) -> None:
    """Its pace is that of its own steps: the chief waits for the others to the end of the job."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        slow = context.input_pipeline_id == 1

        def late(step: Any) -> Any:
            time.sleep(0.2 if slow else 0.0)
            return step

        steps = tf.data.Dataset.range(40 if slow else 20)
        read = steps.map(lambda step: tf.ensure_shape(tf.numpy_function(late, [step], tf.int64), []))
        return None if mode == "eval" else read.map(lambda step: ({"x": tf.cast(step, tf.float32)}, 0.0))

    train(model_of(input_fn, linear), 1, 2, model_dir=str(tmp_path), max_steps=100)
    found = summary(tmp_path)
    assert found["global_step"] == 60
    assert found["steps_per_sec"]["worker/0"] > found["steps_per_sec"]["worker/1"]


def test_a_job_that_fails_has_counted_what_it_skipped(tmp_path: Path) -> None:
    """A chief that gives up after many bad batches in a row says how many there were."""
    bad = model_of(
        lambda mode, *_: dataset_of(np.float32([1, 1, *[np.nan] * 200])) if mode == "train" else None, linear
    )
    error = run_job(bad, num_workers=1, max_steps=9, on_nan="skip", model_dir=str(tmp_path))["worker/0"]
    assert isinstance(error, DivergedError)
    written = JobSummary.read(tmp_path / "summary.json")
    assert written is not None
    assert written.chief is not None
    assert (written.tasks["worker/0"].steps, written.chief.batches_skipped) == (2, 100)


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
