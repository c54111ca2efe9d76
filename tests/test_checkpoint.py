"""What a checkpoint holds, which one a job goes on from, and what happens if one is damaged or cannot be written."""

import contextlib
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from cluster_in_process import dataset_of, job, linear, model_of, train, variables_of, wait_until
from helpers import summary

import tfps
from tfps.errors import CheckpointError, DivergedError, StorageError
from tfps.runtime import checkpoint
from tfps.runtime.checkpoint import Checkpoints
from tfps.runtime.model_dir import existing


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones."""
    return None if mode == "eval" else dataset_of(np.float32([1])).repeat()


LINEAR = model_of(ones, linear)


def test_names_are_plain(tmp_path: Path) -> None:
    """A checkpoint holds the model's variables, the optimizer's and the step, and nothing of the job's own state."""
    train(LINEAR, num_ps=2, mode="sync", optimizer="adam", max_steps=3, model_dir=str(tmp_path))
    slots = {"weight/Adam", "weight/Adam_1", "beta1_power", "beta2_power"}
    assert set(variables_of(tmp_path)) == {"global_step", "weight", *slots}
    assert existing(str(tmp_path)) == [str(tmp_path / "model.ckpt-3")]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-3")


def test_the_files_count_and_not_the_state_file(tmp_path: Path) -> None:
    """A missing, garbled or outdated ``checkpoint`` state file does not send a job back to step 0."""
    file = tmp_path / "checkpoint"
    states: dict[int, Callable[[], Any]] = {
        0: lambda: None,
        10: file.unlink,
        20: lambda: file.write_bytes(b"\x00\xff garbled"),
        30: lambda: file.write_text('model_checkpoint_path: "model.ckpt-10"'),
    }
    for step, spoil in states.items():
        spoil()
        train(LINEAR, num_workers=1, max_steps=step + 10, model_dir=str(tmp_path))
        assert summary(tmp_path)["resumed_from_step"] == step
        assert variables_of(tmp_path) == {"weight": -step - 10, "global_step": step + 10}
        assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / f"model.ckpt-{step + 10}")


class _Training:
    """A graph with a weight and a step on this machine, in place of a job."""

    def __init__(self, model_dir: Path, shape: tuple[int, ...] = (4,), name: str = "weight") -> None:
        with tf.Graph().as_default() as graph:
            self.step = tf.train.get_or_create_global_step()
            self.weight = tf.get_variable(name, shape, initializer=tf.ones_initializer())
            self.session = tf.Session(graph=graph)
            self.session.run(tf.global_variables_initializer())
            self.checkpoints = Checkpoints(str(model_dir), every_secs=0.0)

    def save(self, step: int, patiently: bool = False) -> None:
        """Save as of some step; ``patiently`` is what is done now and then, as training goes on."""
        self.step.load(step, self.session)
        save = self.checkpoints.try_save if patiently else self.checkpoints.save
        save(self.session, self.step)


def test_five_are_kept_over_all_runs(tmp_path: Path) -> None:
    """The newest five checkpoints stay, those of earlier runs among them; a step is saved once."""
    for first in (1, 5):
        run = _Training(tmp_path)
        for step in range(first, first + 4):
            run.save(step)
            written = Path(f"{run.checkpoints.newest}.index").stat().st_mtime_ns
            run.save(step)
            assert Path(f"{run.checkpoints.newest}.index").stat().st_mtime_ns == written
    assert existing(str(tmp_path)) == [str(tmp_path / f"model.ckpt-{step}") for step in (4, 5, 6, 7, 8)]
    assert len(list(tmp_path.glob("model.ckpt-*"))) == 10


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    """Step 1000 is newer than step 999."""
    run = _Training(tmp_path)
    run.save(1000)
    run.save(999)
    assert _Training(tmp_path).checkpoints.newest == str(tmp_path / "model.ckpt-1000")


def test_a_save_every_so_many_seconds(tmp_path: Path) -> None:
    """The chief saves while training goes on: there are checkpoints of steps before the last, named by their step."""
    train(LINEAR, num_workers=1, max_steps=120, save_checkpoint_secs=0.02, model_dir=str(tmp_path))
    steps = [int(path.rpartition("-")[2]) for path in existing(str(tmp_path))]
    assert 1 < len(steps) <= 5
    for path, step in zip(existing(str(tmp_path)), steps, strict=True):
        assert checkpoint.step_of(path) == step


@pytest.mark.parametrize(("shape", "name"), [((5,), "weight"), ((4, 1), "weight"), ((4,), "other")])
def test_a_checkpoint_of_another_model_is_named(tmp_path: Path, shape: tuple[int, ...], name: str) -> None:
    """Other shapes and missing variables are a CheckpointError that names the checkpoint, not a silent new start."""
    _Training(tmp_path).save(7)
    other = _Training(tmp_path, shape, name)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-7 does not fit the model: .*--model_dir"):
        checkpoint.restore(other.session, str(other.checkpoints.newest), other.checkpoints.saver)


def test_a_checkpoint_of_another_optimizer_ends_the_job(tmp_path: Path) -> None:
    """A job that finds a checkpoint without its optimizer's slots ends with 65 and a text that says what to do."""
    train(LINEAR, num_workers=1, max_steps=5, model_dir=str(tmp_path))
    with job(LINEAR, num_workers=1, optimizer="momentum", max_steps=9, model_dir=str(tmp_path)) as running:
        wait_until(lambda: "worker/0" in running.ended)
        error = running.ended["worker/0"]
    assert isinstance(error, CheckpointError)
    assert "model.ckpt-5 does not fit the model: " in str(error)
    assert "weight/Momentum" in str(error)
    assert "\n" not in str(error)
    told = summary(tmp_path)
    assert (told["status"], told["exit_code"], told["error"]) == ("failed", 65, str(error))


def damage(path: Path, how: str) -> None:
    """Damage a checkpoint's file."""
    data = path.read_bytes()
    wrong = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "flipped": data[:8] + bytes([data[8] ^ 255]) + data[9:],
        "garbled": bytes(range(256)) * 8,
    }
    path.write_bytes(wrong[how])


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "garbled", "missing"])
@pytest.mark.parametrize("file", ["index", "data-00000-of-00001"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str, how: str) -> None:
    """A truncated, empty, changed or missing file is a CheckpointError that names the checkpoint, on one line."""
    _Training(tmp_path).save(7)
    run = _Training(tmp_path)
    newest, path = str(run.checkpoints.newest), tmp_path / f"model.ckpt-7.{file}"
    path.unlink() if how == "missing" else damage(path, how)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-7 is damaged: .*Delete its files") as told:
        checkpoint.restore(run.session, newest, run.checkpoints.saver)
    assert "\n" not in str(told.value)
    if file == "index":
        with pytest.raises(CheckpointError, match=r"model\.ckpt-7 "):
            checkpoint.step_of(newest)


@contextlib.contextmanager
def full_disk(limit_bytes: int = 1000) -> Iterator[None]:
    """Let no file grow beyond a limit, which is as near to a full disk as a test gets without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that finds no room is told and training goes on; the last one, at the end, is a StorageError."""
    caplog.set_level(logging.INFO, "tfps")
    run = _Training(tmp_path, (10_000,))
    run.save(1)
    with full_disk():
        run.save(2, patiently=True)
        with pytest.raises(StorageError, match=r"--model_dir: .*model\.ckpt-3 cannot be written: "):
            run.save(3)
    assert "model.ckpt-2 cannot be written" in caplog.text
    assert "Training goes on" in caplog.text
    assert existing(str(tmp_path)) == [str(tmp_path / "model.ckpt-1")]
    run.save(4, patiently=True)
    assert existing(str(tmp_path)) == [str(tmp_path / f"model.ckpt-{step}") for step in (1, 4)]


def test_a_lost_directory_fails_the_job_at_its_end_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the directory gone, training goes on to ``max_steps``; that its result cannot be saved is a StorageError."""
    caplog.set_level(logging.INFO, "tfps")
    model_dir, go_on = tmp_path / "m", threading.Event()
    flags = {"max_steps": 100, "steps_to_validate": 50, "save_checkpoint_secs": 0.02, "model_dir": str(model_dir)}
    with job(model_of(held_at(20, go_on), linear), num_workers=1, **flags) as running:
        wait_until(lambda: "saved" in caplog.text)
        model_dir.rename(tmp_path / "elsewhere")
        model_dir.write_text("in the way")
        go_on.set()
        wait_until(lambda: "worker/0" in running.ended)
        error = running.ended["worker/0"]
    assert isinstance(error, StorageError), error
    assert f"--model_dir: {model_dir}" in str(error)
    assert "Training goes on" in caplog.text
    assert "step=100" in caplog.text


def held_at(number: int, event: threading.Event) -> Any:
    """Return an ``input_fn`` of ones that waits for an event before an element."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None

        def wait(at: Any) -> Any:
            assert at != number or event.wait(20)
            return np.float32(1)

        numbers = tf.data.Dataset.range(10**6)
        ones = numbers.map(lambda at: tf.ensure_shape(tf.numpy_function(wait, [at], tf.float32), []))
        return ones.map(lambda x: ({"x": x}, 0.0))

    return input_fn


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_saved(tmp_path: Path, bad: float) -> None:
    """A variable with one NaN or Inf is a DivergedError that names it; the last good checkpoint stays the newest."""
    run = _Training(tmp_path)
    run.save(1)
    run.weight.load([1, bad, 1, 1], run.session)
    for patiently in (True, False):
        with pytest.raises(DivergedError, match="weight holds NaN or Inf at step 2"):
            run.save(2, patiently)
    assert existing(str(tmp_path)) == [str(tmp_path / "model.ckpt-1")]


def test_large_half_precision_weights_are_saved(tmp_path: Path) -> None:
    """A sum beyond what float16 holds is no divergence."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        tf.get_variable("half", [100], tf.float16, initializer=tf.constant_initializer(60_000))
        session.run(tf.global_variables_initializer())
        assert Checkpoints(str(tmp_path), 60).save(session, step) == 0
    assert existing(str(tmp_path)) == [str(tmp_path / "model.ckpt-0")]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_gradient_that_is_nan_poisons_no_checkpoint(tmp_path: Path, mode: str) -> None:
    """The loss is finite when a gradient first is not: the job ends with DivergedError, and every checkpoint is good.

    Also where that is the last step, of which no loss can tell any more.
    """

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        good = dataset_of(np.float32([1])).repeat(30)
        return good.concatenate(dataset_of(np.float32([0]))).concatenate(good)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = weight + tf.sqrt(weight * 0 + features["x"] * (1 - weight * 0))  # of sqrt(0), the gradient is 0 * Inf
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    flags = {"mode": mode, "max_steps": 31, "save_checkpoint_secs": 1e-6, "model_dir": str(tmp_path)}
    with job(model_of(input_fn, model_fn), num_workers=1, **flags) as running:
        wait_until(lambda: "worker/0" in running.ended)
    assert isinstance(running.ended["worker/0"], DivergedError)
    assert variables_of(tmp_path) == {"weight": -30, "global_step": 30}
    assert summary(tmp_path)["exit_code"] == 66


def test_a_directory_below_a_file_is_a_storage_error(tmp_path: Path) -> None:
    """A ``--model_dir`` that cannot be made ends the job before it trains."""
    (tmp_path / "file").write_text("")
    with job(LINEAR, num_workers=1, model_dir=str(tmp_path / "file" / "m")) as running:
        wait_until(lambda: "worker/0" in running.ended)
    assert isinstance(running.ended["worker/0"], StorageError)
    assert os.listdir(tmp_path) == ["file"]
