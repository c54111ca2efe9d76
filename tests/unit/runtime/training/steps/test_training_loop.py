"""What a worker reports as it trains, and how training ends."""

import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import full_disk
from support.cluster import dataset_of, job, linear, model_of, train, variables_of, wait_until
from support.processes import summary

import tfps
from tfps.config.job_config import JobConfig
from tfps.errors import DivergedError, StoppedError
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results.event_file import EventFile
from tfps.runtime.training.steps import reporter as progress_lines
from tfps.runtime.training.steps.reporter import Reporter
from tfps.runtime.training.steps.training_loop import Loop
from tfps.runtime.training.worker_progress import Progress


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones; two for evaluation."""
    return dataset_of(np.float32([1, 3])) if mode == "eval" else dataset_of(np.float32([1])).repeat()


def logging_its_weight(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` with a tensor to log, a summary of its own, and a metric."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(weight * features["x"])
    tf.summary.scalar("mine", 2 * loss)
    return tfps.ModelSpec(
        loss=loss,
        eval_metric_ops={"x": tf.metrics.mean(features["x"])},
        optimizer=tf.train.GradientDescentOptimizer(1.0),
        log_tensors={"weight": weight},
    )


MODEL = model_of(ones, logging_its_weight)


def done(steps: int) -> Progress:
    """Return the progress of a worker that has taken steps with batches of 32."""
    return Progress(steps=steps, batches=steps, examples=32 * steps)


def reported(steps: Any, every: int, max_steps: int) -> list[int]:
    """Return at which of a worker's steps it reports."""
    reporter, found = Reporter(JobConfig(steps_to_validate=every, max_steps=max_steps), None), []
    for taken, step in enumerate(steps, 1):
        if reporter.due(step):
            found.append(step)
            reporter.report(step, done(taken), {"loss": 1.0}, None)
    return found


def test_every_so_many_steps() -> None:
    """A worker reports its first step, every ``steps_to_validate``-th, and the job's last."""
    assert reported(range(1, 36), 10, 35) == [1, 10, 20, 30, 35]
    assert reported(range(1, 4), 100, 1000) == [1]


def test_every_so_many_steps_of_the_job() -> None:
    """Global steps count: a worker that takes every third of them reports its first step past each multiple."""
    assert reported(range(2, 60, 3), 10, 1000) == [2, 11, 20, 32, 41, 50]
    assert reported(range(1007, 1030), 10, 5000) == [1007, 1010, 1020]  # after a resume


def test_a_slow_model_reports_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """When ``steps_to_validate`` steps take long, there is a line every few seconds."""
    monkeypatch.setattr(progress_lines, "_QUIET_SECS", 0.05)
    reporter = Reporter(JobConfig(steps_to_validate=1000, max_steps=5000), None)
    reporter.report(1, done(1), {}, None, 100.0)
    assert not reporter.due(2, 100.04)
    assert reporter.due(2, 100.06)
    ended = time.monotonic()
    reporter.report(2, done(2), {}, None, ended)
    time.sleep(0.06)
    assert reporter.due(3)
    assert not reporter.due(3, ended + 0.01)  # a step that ended soon after, though it is counted late


def test_speeds_are_since_the_last_report(caplog: pytest.LogCaptureFixture) -> None:
    """examples/s counts this worker's steps, steps/s (in the event file) the job's; neither is in the first report."""
    caplog.set_level(logging.INFO, "tfps")
    reporter = Reporter(JobConfig(), None)
    reporter.report(1, done(1), {"loss": 0.5}, None, ended=100.0)
    values = {"loss": 0.25}
    reporter.report(101, done(51), values, None, ended=100.25)
    assert (values["examples/s"], values["steps/s"]) == (50 * 32 / 0.25, 100 / 0.25)
    first, second = caplog.messages
    assert first == "step=1 loss=0.5"
    assert re.fullmatch(r"step=101 loss=0.25 examples/s=\d+(\.\d+)?", second)


@pytest.mark.parametrize("ended", [100.0, 99.9, 100.000001])
def test_a_speed_over_no_time_is_not_reported(ended: float) -> None:
    """Of two runs under way, one may end with the other, or before it: no speed of 1e11, and none below 0, is reported.

    The next report's is since the last one that counted.
    """
    reporter = Reporter(JobConfig(), None)
    reporter.report(1, done(1), {"loss": 0.5}, None, ended=100.0)
    values = {"loss": 0.25}
    reporter.report(101, done(51), values, None, ended=ended)
    assert values == {"loss": 0.25}
    reporter.report(201, done(101), values, None, ended=101.0)
    assert (values["examples/s"], values["steps/s"]) == (100 * 32, 200)


def events(directory: Path) -> dict[int, dict[str, float]]:
    """Return the scalars of a directory's event files, by step and tag."""
    found: dict[int, dict[str, float]] = {}
    for file in sorted(directory.glob("events.out.tfevents.*")):
        for event in tf.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(event.step, {})[value.tag] = value.simple_value
    return found


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_event_files(tmp_path: Path, mode: str) -> None:
    """The chief's event file has, at every reported step, loss, speeds, logged tensors and the model's own summaries.

    The last metrics are in ``eval``, at the final step.
    """
    flags = {"mode": mode, "max_steps": 35, "steps_to_validate": 10, "model_dir": str(tmp_path)}
    train(MODEL, num_workers=1, **flags)
    found = events(tmp_path)
    assert list(found) == [1, 10, 20, 30, 35]
    assert set(found[1]) == {"loss", "weight", "mine"}
    for step in (10, 20, 30, 35):
        assert set(found[step]) == {"loss", "weight", "mine", "examples/s", "steps/s"}
        assert found[step]["examples/s"] == pytest.approx(found[step]["steps/s"])  # one example a step
        assert (found[step]["loss"], found[step]["mine"]) == (-(step - 1), -2 * (step - 1))
        assert found[step]["weight"] in (-step, -(step - 1))  # read while the step updates it
    assert events(tmp_path / "eval") == {35: {"loss": -70.0, "x": 2.0}}
    assert summary(tmp_path)["eval"] == {"loss": -70.0, "x": 2.0}
    assert (summary(tmp_path)["loss"], summary(tmp_path)["global_step"]) == (-34.0, 35)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("flags", [{"steps_per_run": 1}, {"steps_per_run": 4}, {"mode": "sync", "num_workers": 2}])
def test_examples_are_those_of_the_batches(tmp_path: Path, flags: dict[str, Any], even: bool) -> None:
    """Whatever ``--batch_size`` says: the last batch of an epoch has fewer, and a model may make batches of its own."""

    def sevens(mode: str, params: Any, context: Any) -> Any:
        return (
            None if mode == "eval" else dataset_of(np.ones([7, 1], np.float32)).batch(2, drop_remainder=even).repeat()
        )

    train(model_of(sevens, linear), max_steps=8, batch_size=99, model_dir=str(tmp_path), **{"num_workers": 1, **flags})
    said = summary(tmp_path)
    assert said["batch_size"] == (2 if even else 7 / 4)
    assert said["examples_per_sec"] * said["seconds"] == pytest.approx(
        (16 if even else 14) * flags.get("num_workers", 1), rel=0.01
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorFlow's writer thread
def test_an_unwritable_event_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk costs the event file, not the training."""
    caplog.set_level(logging.INFO, "tfps")
    file = EventFile(tmp_path)
    file.write(1, {"loss": 1.0})
    with full_disk(10):
        for step in (2, 3, 4):
            file.write(step, {"loss": 1.0})
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tfps")]
    assert len(said) == 1
    assert "the event file cannot be written" in said[0]
    assert set(events(tmp_path)) == {1}


def test_steps_before_the_end_of_anothers_input_are_counted_and_timed(tmp_path: Path) -> None:
    """In sync, the chief's only run ends when worker 1 has no more batches: its steps until then have taken a time."""

    def uneven(mode: str, params: Any, context: Any) -> Any:
        batches = 5 if context.input_pipeline_id else 64
        return None if mode == "eval" else dataset_of(np.ones(batches, np.float32))

    model = model_of(uneven, linear)
    train(model, 1, 2, mode="sync", steps_per_run=8, model_dir=str(tmp_path), max_steps=1000)
    found = summary(tmp_path)
    assert found["global_step"] == 5
    assert {name: task["steps"] for name, task in found["tasks"].items()} == {"worker/0": 5, "worker/1": 5}
    assert found["seconds"] > 1e-4
    assert all(0 < pace < 1e5 for pace in found["steps_per_sec"].values())


def test_nothing_is_trained_beyond_max_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Started again at ``max_steps``, a job takes no step: it says so, evaluates, and ends well."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {"max_steps": 10, "model_dir": str(tmp_path)}
    train(MODEL, **flags)
    before = variables_of(tmp_path)
    caplog.clear()
    train(MODEL, **flags)
    assert variables_of(tmp_path) == before == {"weight": -10, "global_step": 10}
    assert caplog.text.count("nothing to train: --max_steps=10 is reached") == 2
    assert "step=10 eval/loss=-20 eval/x=2" in caplog.messages
    said = summary(tmp_path)
    assert [said["tasks"][f"worker/{i}"]["steps"] for i in (0, 1)] == [0, 0]
    assert (said["status"], said["global_step"], said["resumed_from_step"]) == ("done", 10, 10)
    assert said["eval"] == {"loss": -20.0, "x": 2.0}
    assert said["pace"] is None


@pytest.mark.parametrize(("mode", "bad"), [("async", -np.inf), ("sync", np.nan)])
def test_divergence_ends_the_job_and_is_not_saved(tmp_path: Path, mode: str, bad: float) -> None:
    """A loss of NaN or Inf is a DivergedError with loss and step; what is saved stays what was good.

    In sync that is the step before; in async steps go on during a save, so it may be an earlier one.
    """

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([1] * 20 + [bad] * 20))

    flags = {
        "mode": mode,
        "max_steps": 100,
        "save_checkpoint_secs": 1e-6,
        "steps_per_run": 1,
        "model_dir": str(tmp_path),
    }
    with job(model_of(input_fn, linear), num_workers=1, **flags) as running:
        wait_until(lambda: "worker/0" in running.ended)
    error = running.ended["worker/0"]
    assert isinstance(error, DivergedError)
    assert re.search(r"the loss is (nan|inf) at step 21: try a smaller --learning_rate", str(error))
    if mode == "sync":
        assert list_checkpoints(str(tmp_path))[-1] == str(tmp_path / "model.ckpt-20")
    for path in list_checkpoints(str(tmp_path)):
        assert -20 <= tf.train.load_variable(path, "weight") <= 0
    said = summary(tmp_path)
    assert (said["status"], said["exit_code"], said["error"]) == ("failed", 66, str(error))


def test_a_task_that_is_asked_to_stop_saves_first(tmp_path: Path) -> None:
    """Stopped in the middle, the chief saves the step it has come to, says so in the summary, and everyone ends."""
    with job(model_of(ones, linear), max_steps=10**9, model_dir=str(tmp_path)) as running:
        wait_until(lambda: events(tmp_path))
        running.stop()
        ended = running.wait(100)
    assert {str(error) for error in ended.values()} == {"stopped by SIGTERM"}
    said = summary(tmp_path)
    assert (said["status"], said["exit_code"]) == ("stopped", 143)
    assert 0 < said["global_step"] <= variables_of(tmp_path)["global_step"]  # the other may step on meanwhile


def test_a_wait_saves_only_as_long_as_it_lasts() -> None:
    """Whoever waits for other workers goes on saving; the end is seen before another save, and so is a stop."""
    looks, saves, stop = iter([False, False, True]), list[int](), StopRequest()
    loop: Any = SimpleNamespace(_between_runs=lambda: saves.append(1), _stop=stop)
    Loop.wait_until(loop, lambda: next(looks))
    assert saves == [1, 1]
    stop.request(StoppedError("stopped by SIGTERM"))
    with pytest.raises(StoppedError):
        Loop.wait_until(loop, lambda: False)
    assert len(saves) == 3
