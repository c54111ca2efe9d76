"""Saves in the background: who waits for them, and whom their errors end."""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import Training, steps_in
from support.cluster import (
    LINEAR,
    assert_done,
    dataset_of,
    job,
    linear,
    model_of,
    ones,
    train,
    variables_of,
    wait_until,
)
from support.processes import summary

import tfps
from tfps.errors import DivergedError, StoppedError
from tfps.progress import parse_progress
from tfps.runtime.checkpoint import directory, publish, restore
from tfps.runtime.checkpoint.background import BackgroundThread
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.checkpoint.manager import CheckpointManager
from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.training.worker import Worker


@contextlib.contextmanager
def slow_disk(directory: Path) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let ``os.fsync`` wait below a directory; yields an event that tells that it does, and one that ends it.

    Only there: a job of an earlier test, which was left in a save of its own, may yet be ending it.
    """
    reached, released, real = threading.Event(), threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        if directory in Path(f"/proc/self/fd/{descriptor}").readlink().parents:
            reached.set()
            assert released.wait(100)
        real(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        try:
            yield reached, released
        finally:
            released.set()


@contextlib.contextmanager
def stop_times(saved_within_secs: float, ps_grace_secs: float) -> Iterator[None]:
    """Let a worker that is asked to stop save for so long, and the PS wait for it."""
    with (
        mock.patch("tfps.runtime.training.worker.SAVED_WITHIN_SECS", saved_within_secs),
        mock.patch("tfps.runtime.training.early_end.SAVED_WITHIN_SECS", saved_within_secs),
        mock.patch("tfps.runtime.training.parameter_server.PS_GRACE_SECS", ps_grace_secs),
    ):
        yield


def steps_reported(caplog: pytest.LogCaptureFixture) -> int:
    """Return the last step that was reported."""
    steps = [progress["step"] for text in caplog.messages if (progress := parse_progress(text))]
    return int(max(steps, default=0))


FLAGS = {"num_workers": 1, "max_steps": 10**6, "steps_per_run": 1, "steps_to_validate": 1, "save_checkpoint_secs": 0.01}


def test_async_steps_go_on_while_a_checkpoint_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In async the chief takes steps while the disk is slow; a stop waits for it long, and then saves the last step."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {**FLAGS, "model_dir": str(tmp_path)}
    with stop_times(100.0, 110.0), slow_disk(tmp_path) as (reached, released), job(LINEAR, **flags) as running:
        assert reached.wait(100)
        begun = steps_reported(caplog)
        wait_until(lambda: steps_reported(caplog) > begun + 50)
        assert list_checkpoints(str(tmp_path)) == []
        running.stop()
        time.sleep(5)
        assert list_checkpoints(str(tmp_path)) == []
        assert "worker/0" not in running.ended
        released.set()
        running.wait(100)
    first, *_, last = list_checkpoints(str(tmp_path))
    assert restore.step_of(first) < begun + 50 < restore.step_of(last)
    assert variables_of(tmp_path) == {"weight": -restore.step_of(last), "global_step": restore.step_of(last)}
    for path in list_checkpoints(str(tmp_path)):
        assert path == str(tmp_path / f"model.ckpt-{restore.step_of(path)}")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_that_does_not_end_is_reported(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that does not answer leaves a job without new checkpoints: the log says so while the save lasts."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {**FLAGS, "mode": mode, "model_dir": str(tmp_path), "max_steps": 3, "save_checkpoint_secs": 1000.0}
    with (
        mock.patch("tfps.runtime.coordination.stall_detector._REPORT_AFTER_SECS", 0.5),
        slow_disk(tmp_path) as (reached, released),
        job(LINEAR, **flags) as running,
    ):
        assert reached.wait(100)
        wait_until(lambda: any("waiting: no checkpoint written for" in text for text in caplog.messages))
        assert list_checkpoints(str(tmp_path)) == []
        released.set()
        assert_done(running.wait())
    assert variables_of(tmp_path) == {"weight": -3, "global_step": 3}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_without_end_does_not_keep_a_task_that_is_asked_to_stop(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a disk takes longer than a stop may, the chief ends all the same, and says that its last steps are lost."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {**FLAGS, "mode": mode, "model_dir": str(tmp_path)}
    with stop_times(1.5, 2.0), slow_disk(tmp_path) as (reached, _), job(LINEAR, **flags) as running:
        assert reached.wait(100)
        running.stop()
        assert isinstance(running.wait(100)["worker/0"], StoppedError)
        assert list_checkpoints(str(tmp_path)) == []
    assert "no time is left to save; newest checkpoint: none" in caplog.messages
    wait_until(lambda: not directory.staging_directories(str(tmp_path)))  # it disturbs no other test


def test_sync_steps_wait_for_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In sync nobody takes a step while the chief saves, so that all variables are of the step that it is named by."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {**FLAGS, "mode": "sync", "model_dir": str(tmp_path)}
    with slow_disk(tmp_path) as (reached, released), job(LINEAR, **flags) as running:
        assert reached.wait(100)
        begun = steps_reported(caplog)
        time.sleep(0.5)
        assert steps_reported(caplog) == begun
        released.set()
        wait_until(lambda: steps_reported(caplog) > begun + 50)
        running.stop()
        running.wait(100)
    for path in list_checkpoints(str(tmp_path)):
        assert tf.train.load_variable(path, "weight") == -restore.step_of(path)


def poisoned(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` that makes a variable NaN by itself: neither the loss nor a gradient tells."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    other = tf.get_variable("other", [], initializer=tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([other.assign(np.nan)]):
        loss = weight * features["x"]
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


def test_what_goes_wrong_in_the_background_ends_the_job(tmp_path: Path) -> None:
    """A variable that is NaN, which only the save in the background sees, ends the job long before its last step."""
    with job(model_of(ones, poisoned), model_dir=str(tmp_path), **FLAGS) as running:
        wait_until(lambda: "worker/0" in running.ended)
    assert isinstance(running.ended["worker/0"], DivergedError)
    assert "other holds NaN or Inf" in str(running.ended["worker/0"])
    assert 0 < summary(tmp_path)["global_step"] < 10**6
    assert list_checkpoints(str(tmp_path)) == []


def test_what_goes_wrong_at_the_end_ends_the_job(tmp_path: Path) -> None:
    """What the save in the background raises when the last step has been taken does not vanish either."""
    last_step = threading.Event()

    def failing(*_: Any, **__: Any) -> None:
        assert last_step.wait(100)
        time.sleep(0.3)
        raise RuntimeError("in the background")

    def finishing(*given: Any) -> None:
        last_step.set()
        finish(*given)

    finish = Worker._finish_job
    with (
        mock.patch.object(CheckpointManager, "try_save", failing),
        mock.patch.object(Worker, "_finish_job", finishing),
        job(LINEAR, model_dir=str(tmp_path), **{**FLAGS, "max_steps": 50}) as running,
    ):
        wait_until(lambda: "worker/0" in running.ended)
    assert str(running.ended["worker/0"]) == "in the background"


@pytest.mark.parametrize("look", [BackgroundThread.is_idle, BackgroundThread.wait])
def test_an_error_in_the_background_is_raised_once(look: Any) -> None:
    """What a thing done in the background raises is raised where somebody looks next, once; then another can start."""
    background, done = BackgroundThread(), []
    assert background.is_idle()
    background.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: look(background) and False)
    assert background.is_idle()
    background.start(lambda: done.append(1))
    background.wait()
    assert done == [1]


def test_two_saves_wait_for_each_other(tmp_path: Path) -> None:
    """A last save that comes while another is under way waits for it, and both are whole."""
    run = Training(tmp_path)
    with slow_disk(tmp_path) as (reached, released):
        first = threading.Thread(target=run.save, args=(1,))
        first.start()
        assert reached.wait(100)
        second = threading.Thread(target=run.checkpoints.save, args=(run.session, run.step))
        second.start()
        time.sleep(0.2)
        assert second.is_alive()
        run.step.load(2, run.session)
        released.set()
        first.join(100)
        second.join(100)
    assert steps_in(tmp_path) == [1, 2]
    assert [problem(path) for path in list_checkpoints(str(tmp_path))] == [None, None]


class GoesOn:
    """An ``input_fn`` of ones: the chief's ends after 3; then the other worker's begins, and waits before its 21st."""

    def __init__(self) -> None:
        self._may_begin, self._reached, self._may_go_on = (threading.Event() for _ in range(3))

    def __call__(self, mode: str, params: Any, context: Any) -> Any:
        """Return the dataset."""
        del params
        if mode == "eval":
            return None
        if context.input_pipeline_id == 0:
            return dataset_of(np.ones(3, np.float32))
        held = tf.data.Dataset.range(30).map(lambda at: tf.numpy_function(self._wait, [at], tf.float32))
        return held.map(lambda x: ({"x": tf.ensure_shape(x, [])}, 0.0))

    def _wait(self, at: Any) -> Any:
        if at == 0:
            assert self._may_begin.wait(100)
        if at == 20:
            self._reached.set()
            assert self._may_go_on.wait(100)
        return np.float32(1)

    @contextlib.contextmanager
    def held(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        """Return a context in which the chief waits for the other worker, which is held."""
        try:
            wait_until(lambda: "the input has ended" in caplog.messages)
            self._may_begin.set()
            assert self._reached.wait(100)
            yield
        finally:
            self._may_begin.set()
            self._may_go_on.set()


def test_a_chief_whose_input_has_ended_saves_what_the_others_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that loses its PS then resumes from the others' last step, not from the chief's."""
    caplog.set_level(logging.INFO, "tfps")
    place, found, is_found = tmp_path / "m", tmp_path / "found", threading.Event()
    real, input_fn = publish.publish, GoesOn()

    def publishing(staged: Path, path: str, *rest: Any) -> None:
        real(staged, path, *rest)
        if path == str(place / "model.ckpt-23") and not is_found.is_set():
            shutil.copytree(place, found, ignore=shutil.ignore_patterns(".*"))
            is_found.set()

    flags = {**FLAGS, "num_workers": 2, "model_dir": str(place)}
    with mock.patch.object(publish, "publish", publishing), job(model_of(input_fn, linear), **flags) as running:
        with input_fn.held(caplog):
            wait_until(is_found.is_set)
        assert_done(running.wait())
    assert (summary(place)["global_step"], variables_of(place)["weight"]) == (33, -33)
    train(LINEAR, num_workers=1, max_steps=25, model_dir=str(found))
    assert summary(found)["resumed_from_step"] == 23
    assert variables_of(found) == {"weight": -25, "global_step": 25}


def test_a_directory_that_is_lost_as_the_chief_waits_is_saved_to_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made again and gets a checkpoint while the others train on, also if the next save is far away."""
    caplog.set_level(logging.INFO, "tfps")
    place, input_fn = tmp_path / "m", GoesOn()
    flags = {**FLAGS, "num_workers": 2, "model_dir": str(place), "save_checkpoint_secs": 1000.0}
    with job(model_of(input_fn, linear), **flags) as running:
        with input_fn.held(caplog):
            place.rename(tmp_path / "gone")
            wait_until(lambda: list_checkpoints(str(place)))
            [path] = list_checkpoints(str(place))
            assert variables_of(place) == {"weight": -restore.step_of(path), "global_step": restore.step_of(path)}
        assert_done(running.wait())
    assert summary(place)["global_step"] == 33
