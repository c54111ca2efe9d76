"""Event files that cannot be written: a job goes on without them, and loses nothing else."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train
from support.processes import summary

import tfps
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.results.event_file import EventFile


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones, which ends for evaluation."""
    return dataset_of(np.float32([1])).repeat(1 if mode == "eval" else None)


def measured(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` with a metric."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    metrics = {"x": tf.metrics.mean(features["x"])}
    optimizer = tf.train.GradientDescentOptimizer(1.0)
    return tfps.ModelSpec(loss=tf.reduce_mean(weight * features["x"]), eval_metric_ops=metrics, optimizer=optimizer)


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of event files."""
    return [message for message in caplog.messages if "event file" in message]


def test_a_job_says_where_it_starts(tmp_path: Path) -> None:
    """Its event file has the step that it has resumed from: a second job's, that of the first one's checkpoint."""
    started = []
    for max_steps in (10, 20):
        train(model_of(ones, measured), num_workers=1, max_steps=max_steps, model_dir=str(tmp_path))
        [path] = tmp_path.glob("events.*")
        events = tf.train.summary_iterator(str(path))
        started += [event.step for event in events if event.session_log.status == tf.SessionLog.START]
        path.unlink()  # the names of two files of a second and a process are the same
    assert started == [1, 11]


def test_a_file_in_place_of_the_folder_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where an event file cannot even be made, that is said once, with the reason, and each write does nothing."""
    caplog.set_level(logging.INFO, "tfps")
    (tmp_path / "eval").touch()
    file = EventFile(tmp_path / "eval")
    for step in (1, 2):
        file.write(step, {"loss": 1.0})
    why = f"{tmp_path}/eval is not a directory"
    assert reported(caplog) == [f"--model_dir: the event file cannot be written: {why}. The job continues without it."]


def test_a_job_ends_well_without_its_event_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job whose evaluation has no place for its event file is evaluated, saved, and done: no PS is taken for lost."""
    caplog.set_level(logging.INFO, "tfps")
    (tmp_path / "eval").touch()
    train(model_of(ones, measured), num_workers=1, max_steps=10, model_dir=str(tmp_path))
    assert (summary(tmp_path)["status"], summary(tmp_path)["eval"]["x"]) == ("done", 1.0)
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-10")]
    assert len(reported(caplog)) == 1
