"""What a checkpoint holds, which one a job goes on from, and what happens if one is damaged or cannot be written."""

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import FILES, HOW, Training, damage, damage_reports, full_disk, spoil, steps_in
from support.cluster import dataset_of, job, linear, model_of, train, variables_of, wait_until
from support.processes import run_tfps, summary

import tfps
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, DivergedError, PeerLostError, StoppedError, StorageError
from tfps.models import loader
from tfps.progress import parse_progress
from tfps.runtime.checkpoint import directory, manager, publish, restore
from tfps.runtime.checkpoint.background import BackgroundThread
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.checkpoint.finder import select_checkpoint
from tfps.runtime.checkpoint.manager import CheckpointManager
from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results import evaluation
from tfps.runtime.training.worker import Worker


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones."""
    return None if mode == "eval" else dataset_of(np.float32([1])).repeat()


LINEAR = model_of(ones, linear)


def test_names_are_plain(tmp_path: Path) -> None:
    """A checkpoint holds the model's variables, the optimizer's and the step, and nothing of the job's own state."""
    train(LINEAR, num_ps=2, mode="sync", optimizer="adam", max_steps=3, model_dir=str(tmp_path))
    slots = {"weight/Adam", "weight/Adam_1", "beta1_power", "beta2_power"}
    assert set(variables_of(tmp_path)) == {"global_step", "weight", *slots}
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-3")]
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
    for step, change in states.items():
        change()
        train(LINEAR, num_workers=1, max_steps=step + 10, model_dir=str(tmp_path))
        assert summary(tmp_path)["resumed_from_step"] == step
        assert variables_of(tmp_path) == {"weight": -step - 10, "global_step": step + 10}
        assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / f"model.ckpt-{step + 10}")


def test_five_are_kept_over_all_runs(tmp_path: Path) -> None:
    """The newest five checkpoints stay, those of earlier runs among them; a step is saved once."""
    for first in (1, 5):
        run = Training(tmp_path)
        for step in range(first, first + 4):
            run.save(step)
            written = Path(f"{run.checkpoints.newest}.index").stat().st_mtime_ns
            run.save(step)
            assert Path(f"{run.checkpoints.newest}.index").stat().st_mtime_ns == written
    assert steps_in(tmp_path) == [4, 5, 6, 7, 8]
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.all_model_checkpoint_paths == list_checkpoints(str(tmp_path))
    assert state.model_checkpoint_path == str(tmp_path / "model.ckpt-8")


def test_a_damaged_checkpoint_takes_no_place(tmp_path: Path) -> None:
    """Of the five, none is one that was passed over; it goes when it is older than those."""
    run = Training(tmp_path)
    for step in (1, 2, 3, 4, 5):
        run.save(step)
    for step in (4, 5):
        damage(tmp_path / f"model.ckpt-{step}.index", "empty")
    run = Training(tmp_path)
    assert run.resume() == 3
    for step, left in ((6, [1, 2, 3, 4, 5, 6]), (7, [1, 2, 3, 4, 5, 6, 7]), (8, [2, 3, 4, 5, 6, 7, 8])):
        run.save(step)
        assert steps_in(tmp_path) == left
    for step, left in ((9, [3, 4, 5, 6, 7, 8, 9]), (10, [6, 7, 8, 9, 10])):
        run.save(step)
        assert steps_in(tmp_path)[-len(left) :] == left


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    """Step 1000 is newer than step 999."""
    run = Training(tmp_path)
    run.save(1000)
    run.save(999)
    assert Training(tmp_path).checkpoints.newest == str(tmp_path / "model.ckpt-1000")


def test_a_save_every_so_many_seconds(tmp_path: Path) -> None:
    """The chief saves while training goes on: there are checkpoints of steps before the last, named by their step."""
    train(LINEAR, num_workers=1, max_steps=600, save_checkpoint_secs=0.02, model_dir=str(tmp_path))
    steps = [int(path.rpartition("-")[2]) for path in list_checkpoints(str(tmp_path))]
    assert 1 < len(steps) <= 5
    for path, step in zip(list_checkpoints(str(tmp_path)), steps, strict=True):
        assert restore.step_of(path) == step


def test_a_whole_checkpoint_of_another_model_is_not_passed_over(tmp_path: Path) -> None:
    """Where the newest checkpoint is whole and does not fit, an older one that fits is no answer: flags are wrong."""
    Training(tmp_path).save(5)
    Training(tmp_path, (5,)).save(7)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-7 does not fit the model: "):
        Training(tmp_path).resume()


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
    reported = summary(tmp_path)
    assert (reported["status"], reported["exit_code"], reported["error"]) == ("failed", 65, str(error))


def files_in(directory: Path) -> dict[str, bytes]:
    """Return what a directory's files hold, by their names."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(("file", "how"), list(itertools.product(FILES, HOW)))
@pytest.mark.parametrize("manifest", [True, False])
def test_the_newest_whole_checkpoint_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str, manifest: bool
) -> None:
    """With any file of the newest checkpoint damaged, the one before is used, and one line names the file.

    So it is with checkpoints of plain TensorFlow, without manifests. The damaged one is left as it is until its step
    is saved anew; then that is whole, and is used.
    """
    run = Training(tmp_path)
    for step in (5, 7):
        run.save(step)
    for path in tmp_path.glob("*.manifest.json" if not manifest else "no-file"):
        path.unlink()
    spoil(tmp_path / f"model.ckpt-7.{file}", how)
    before = files_in(tmp_path)
    run = Training(tmp_path)
    assert run.resume() == 5
    [line] = damage_reports(caplog)
    assert line.startswith(f"checkpoint {tmp_path}/model.ckpt-7 is damaged: ")
    assert f"model.ckpt-7.{file}" in line or (not manifest and "TensorBundle at " in line)
    assert "\n" not in line
    assert files_in(tmp_path) == before
    run.save(6)
    assert Training(tmp_path).resume() == 6
    assert len(damage_reports(caplog)) == 1
    run.weight.load([7, 7, 7, 7], run.session)
    run.save(7)
    run = Training(tmp_path)
    assert run.resume() == 7
    assert run.session.run(run.weight).tolist() == [7, 7, 7, 7]
    assert damage_reports(caplog) == []
    assert problem(str(tmp_path / "model.ckpt-7")) is None


@pytest.mark.parametrize("how", ["truncated", "garbled", "empty"])
def test_a_garbled_manifest_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Nobody can tell whether a checkpoint with a garbled manifest is whole: the one before is used."""
    run = Training(tmp_path)
    for step in (5, 7):
        run.save(step)
    damage(tmp_path / "model.ckpt-7.manifest.json", how)
    assert Training(tmp_path).resume() == 5
    assert [line.partition("damaged: ")[2] for line in damage_reports(caplog)] == [
        f"model.ckpt-7.manifest.json is {'empty' if how == 'empty' else 'garbled'}. Trying the previous one."
    ]


def test_none_whole_is_an_error_that_lists_them(tmp_path: Path) -> None:
    """Where there are checkpoints and none is whole, that is a CheckpointError which names each: never step 0."""
    run = Training(tmp_path)
    for step in (5, 6, 7, 8):
        run.save(step)
    for step, (file, how) in {5: (FILES[0], "missing"), 6: (FILES[1], "missing"), 7: (FILES[1], "flipped")}.items():
        spoil(tmp_path / f"model.ckpt-{step}.{file}", how)
    (tmp_path / "model.ckpt-8.index").unlink()
    (tmp_path / "model.ckpt-8.manifest.json").unlink()
    before = files_in(tmp_path)
    for act in (Training(tmp_path).resume, lambda: select_checkpoint(str(tmp_path))):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint: ") as reported:
            act()
        text = str(reported.value)
        assert re.findall(r"(model\.ckpt-\d) \(", text) == [f"model.ckpt-{step}" for step in (8, 7, 6, 5)]
        assert "model.ckpt-8.index is missing" in text
        assert "\n" not in text
        assert files_in(tmp_path) == before


def test_a_job_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job passes a damaged checkpoint over, and says so; with none whole, it ends with 65 and trains nothing."""
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path))
    damage(tmp_path / "model.ckpt-20.data-00000-of-00001", "flipped")
    train(LINEAR, num_workers=1, mode="sync", max_steps=20, model_dir=str(tmp_path))
    assert len(damage_reports(caplog)) == 1
    reported = summary(tmp_path)
    assert (reported["resumed_from_step"], reported["resumed_from"]) == (10, str(tmp_path / "model.ckpt-10"))
    assert reported["checkpoint"] == str(tmp_path / "model.ckpt-20")
    assert variables_of(tmp_path) == {"weight": -20, "global_step": 20}
    for step in (10, 20):
        damage(tmp_path / f"model.ckpt-{step}.index", "garbled")
    with job(LINEAR, num_workers=1, max_steps=30, model_dir=str(tmp_path)) as running:
        wait_until(lambda: "worker/0" in running.ended)
    assert isinstance(running.ended["worker/0"], CheckpointError)
    reported = summary(tmp_path)
    assert (reported["exit_code"], reported["global_step"], reported["checkpoint"]) == (65, 0, None)


EVALUATED = """
import tensorflow.compat.v1 as tf
import tfps

def input_fn(mode, params, input_context):
    return tf.data.Dataset.from_tensors(({"x": 1.0}, 0.0))

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = weight * features["x"]
    return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=tf.train.GradientDescentOptimizer(1.0))
"""


def test_tfps_eval_says_what_it_passes_over(tmp_path: Path) -> None:
    """``tfps eval`` measures the newest whole checkpoint; the line on the damaged one is not in its output."""
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path / "m"))
    spoil(tmp_path / "m" / "model.ckpt-20.data-00000-of-00001", "missing")
    (tmp_path / "mine.py").write_text(EVALUATED)
    ended = run_tfps("eval", f"--model_dir={tmp_path}/m", f"--model={tmp_path}/mine.py")
    assert (ended.returncode, ended.stdout) == (0, "step=10 loss=-10\n"), ended.stderr
    assert ended.stderr.startswith(f"checkpoint {tmp_path}/m/model.ckpt-20 is damaged: model.ckpt-20.data-")
    assert ended.stderr.count("\n") == 1


def test_the_evaluator_passes_damage_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The evaluator measures the newest whole checkpoint of a job that has ended, and ends."""
    caplog.set_level(logging.INFO, "tfps")
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path))
    damage(tmp_path / "model.ckpt-20.data-00000-of-00001", "flipped")
    (tmp_path / "mine.py").write_text(EVALUATED)
    config = JobConfig(model=str(tmp_path / "mine.py"), model_dir=str(tmp_path), max_steps=20)
    evaluation.follow(config, Cluster(("ps:1",), ("worker:1",)), loader.load(config.model), StopRequest())
    assert "step=10 loss=-10" in caplog.messages
    assert len(damage_reports(caplog)) == 1


def test_what_was_saved_as_training_went_on_is_saved_again_at_rest(tmp_path: Path) -> None:
    """A save that began before the last step may bear its number and lack it: the last checkpoint has all of it."""
    run = Training(tmp_path)
    run.step.load(7, run.session)
    run.checkpoints.try_save(run.session, run.step, at_rest=False)
    run.weight.load([9, 9, 9, 9], run.session)  # the part of step 7 that came too late
    run.save(7)
    assert variables_of(tmp_path)["weight"].tolist() == [9, 9, 9, 9]
    written = Path(f"{run.checkpoints.newest}.index").stat().st_mtime_ns
    run.save(7)
    assert Path(f"{run.checkpoints.newest}.index").stat().st_mtime_ns == written
    again = Training(tmp_path)  # a chief that was started again cannot know how it was saved
    again.save(7)
    assert variables_of(tmp_path)["weight"].tolist() == [1, 1, 1, 1]
    assert steps_in(tmp_path) == [7]


def test_a_full_disk_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that finds no room is reported and training goes on; the last one, at the end, is a StorageError."""
    caplog.set_level(logging.INFO, "tfps")
    run = Training(tmp_path, (10_000,))
    run.save(1)
    with full_disk():
        run.save(2, patiently=True)
        with pytest.raises(StorageError, match=r"--model_dir: .*model\.ckpt-3 cannot be written: "):
            run.save(3)
    assert "model.ckpt-2 cannot be written" in caplog.text
    assert "Training continues" in caplog.text
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-1")]
    run.save(4, patiently=True)
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / f"model.ckpt-{step}") for step in (1, 4)]


@contextlib.contextmanager
def disk(path: Path, size: str) -> Iterator[Path]:
    """Yield a small disk of its own; skips the test where none can be mounted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_leaves_the_old_one_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a real disk, a save finds no room at any point: nothing partial is left; with room again, it is saved."""
    caplog.set_level(logging.INFO, "tfps")
    with disk(tmp_path / "m", "1m") as path:
        run = Training(path, (100_000,))
        run.save(1)
        filler = path / "filler"
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        for step, left in enumerate(range(0, 400_000 + 5 * 4096, 4096 * 4), 2):
            filler.write_bytes(b"x" * (free - left))
            with pytest.raises(StorageError, match=rf"--model_dir: .*model\.ckpt-{step} cannot be written: "):
                run.save(step)
            run.save(step, patiently=True)
            filler.unlink()
            assert steps_in(path) == [1]
            assert problem(str(path / "model.ckpt-1")) is None
        assert "No space left on device" in caplog.text
        run.save(100)
        assert steps_in(path) == [1, 100]
        assert Training(path, (100_000,)).resume() == 100
        run.session.close()


def test_a_read_only_disk_leaves_the_old_one_whole(tmp_path: Path) -> None:
    """A directory that has become read-only is a StorageError; when it can be written again, so is a checkpoint."""
    with disk(tmp_path / "m", "1m") as path:
        run = Training(path)
        run.save(1)
        for options, step in (("remount,ro", 2), ("remount,rw", 3)):
            subprocess.run(["mount", "-o", options, str(path)], check=True)
            if step == 2:
                with pytest.raises(StorageError, match=r"model\.ckpt-2 cannot be written: .*Read-only"):
                    run.save(2)
                assert Training(path).resume() == 1
            else:
                run.save(3)
        assert steps_in(path) == [1, 3]


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_directory_that_vanishes_is_made_again(tmp_path: Path, call: str) -> None:
    """However far a save has come when its directory vanishes, it fails as a StorageError, and the next one works."""
    path, real = tmp_path / "m" / "n", getattr(os, call)
    run = Training(path)
    for nth in itertools.count(1):
        calls = itertools.count(1)

        def vanishing(*args: Any, nth: int = nth, calls: Any = calls, **kwargs: Any) -> Any:
            if next(calls) == nth:
                shutil.rmtree(path.parent)
            return real(*args, **kwargs)

        with mock.patch.object(os, call, vanishing), contextlib.suppress(StorageError):
            run.save(2 * nth)
        if next(calls) <= nth:
            break
        left = steps_in(path) if path.exists() else []
        assert left in ([], [2 * nth])
        run.save(2 * nth + 1)
        assert steps_in(path) == [*left, 2 * nth + 1]
        assert Training(path).resume() == 2 * nth + 1
    assert nth > 1


def test_all_is_on_the_disk_before_it_counts(tmp_path: Path) -> None:
    """Each file is flushed before it is renamed; and the directory, before the index is renamed and at the end."""
    run, happened, fsync, replace = Training(tmp_path), [], os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        happened.append(("flushed", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        happened.append((target.name if target.parent == tmp_path else "staged", source.stat().st_ino))
        replace(source, target)

    with mock.patch.object(os, "fsync", flushed), mock.patch.object(os, "replace", renamed):
        run.save(7)
    here = ("flushed", tmp_path.stat().st_ino)
    files = {what: at for at, (what, _) in enumerate(happened) if what not in ("flushed", "staged")}
    assert list(files) == [f"model.ckpt-7.{file}" for file in (FILES[1], "manifest.json", FILES[0])] + ["checkpoint"]
    for at in files.values():
        assert ("flushed", happened[at][1]) in happened[: min(files.values())]
    assert happened[files["model.ckpt-7.index"] - 1] == happened[-1] == here


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
    assert f"--model_dir: {model_dir} cannot be made (File exists)" in str(error)
    assert "Training continues" in caplog.text
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
    run = Training(tmp_path)
    run.save(1)
    run.weight.load([1, bad, 1, 1], run.session)
    for patiently in (True, False):
        with pytest.raises(DivergedError, match="weight holds NaN or Inf at step 2: try a smaller learning rate"):
            run.save(2, patiently)
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-1")]


def test_large_half_precision_weights_are_saved(tmp_path: Path) -> None:
    """A sum beyond what float16 holds is no divergence."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        tf.get_variable("half", [100], tf.float16, initializer=tf.constant_initializer(60_000))
        session.run(tf.global_variables_initializer())
        assert CheckpointManager(str(tmp_path), 60).save(session, step) == 0
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-0")]


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
    assert summary(tmp_path)["exit_code"] == 66
    if mode == "sync":
        assert variables_of(tmp_path) == {"weight": -30, "global_step": 30}
    for path in list_checkpoints(str(tmp_path)):
        assert np.isfinite(tf.train.load_variable(path, "weight"))


def test_a_directory_below_a_file_is_a_storage_error(tmp_path: Path) -> None:
    """A ``--model_dir`` that cannot be made ends the job before it trains."""
    (tmp_path / "file").write_text("")
    with job(LINEAR, num_workers=1, model_dir=str(tmp_path / "file" / "m")) as running:
        wait_until(lambda: "worker/0" in running.ended)
    assert isinstance(running.ended["worker/0"], StorageError)
    assert os.listdir(tmp_path) == ["file"]


@contextlib.contextmanager
def slow_disk(directory: Path) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let ``os.fsync`` wait below a directory; yields an event that tells that it does, and one that ends it.

    Only there: a job of an earlier test, which was left in a save of its own, may yet be ending it.
    """
    reached, released, real = threading.Event(), threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        if directory in Path(f"/proc/self/fd/{descriptor}").readlink().parents:
            reached.set()
            assert released.wait(20)
        real(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        try:
            yield reached, released
        finally:
            released.set()


def steps_reported(caplog: pytest.LogCaptureFixture) -> int:
    """Return the last step that was reported."""
    steps = [progress["step"] for text in caplog.messages if (progress := parse_progress(text))]
    return int(max(steps, default=0))


FLAGS = {"num_workers": 1, "max_steps": 10**6, "steps_per_run": 1, "steps_to_validate": 1, "save_checkpoint_secs": 0.01}


def test_async_steps_go_on_while_a_checkpoint_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In async the chief takes steps while the disk is slow; a stop waits for it long, and then saves the last step."""
    caplog.set_level(logging.INFO, "tfps")
    with slow_disk(tmp_path) as (reached, released), job(LINEAR, model_dir=str(tmp_path), **FLAGS) as running:
        assert reached.wait(20)
        begun = steps_reported(caplog)
        wait_until(lambda: steps_reported(caplog) > begun + 50)
        assert list_checkpoints(str(tmp_path)) == []
        running.stop()
        time.sleep(5)
        assert list_checkpoints(str(tmp_path)) == []
        assert "worker/0" not in running.ended
        released.set()
        running.wait(15)
    first, *_, last = list_checkpoints(str(tmp_path))
    assert restore.step_of(first) < begun + 50 < restore.step_of(last)
    assert variables_of(tmp_path) == {"weight": -restore.step_of(last), "global_step": restore.step_of(last)}
    for path in list_checkpoints(str(tmp_path)):
        assert path == str(tmp_path / f"model.ckpt-{restore.step_of(path)}")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_without_end_does_not_keep_a_task_that_is_asked_to_stop(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a disk takes longer than a stop may, the chief ends all the same, and says that its last steps are lost."""
    caplog.set_level(logging.INFO, "tfps")
    times = (
        mock.patch("tfps.runtime.training.worker.SAVED_WITHIN_SECS", 1.5),
        mock.patch("tfps.runtime.training.early_end.SAVED_WITHIN_SECS", 1.5),
        mock.patch("tfps.runtime.training.parameter_server.PS_GRACE_SECS", 2.0),
    )
    flags = {**FLAGS, "mode": mode, "model_dir": str(tmp_path)}
    with times[0], times[1], times[2], slow_disk(tmp_path) as (reached, _), job(LINEAR, **flags) as running:
        assert reached.wait(20)
        running.stop()
        assert isinstance(running.wait(5)["worker/0"], StoppedError)
        assert list_checkpoints(str(tmp_path)) == []
    assert "no time is left to save: the last steps are lost; newest checkpoint: none" in caplog.messages
    wait_until(lambda: not directory.staging_directories(str(tmp_path)))  # it disturbs no other test


def test_sync_steps_wait_for_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In sync nobody takes a step while the chief saves, so that all variables are of the step that it is named by."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {**FLAGS, "mode": "sync", "model_dir": str(tmp_path)}
    with slow_disk(tmp_path) as (reached, released), job(LINEAR, **flags) as running:
        assert reached.wait(20)
        begun = steps_reported(caplog)
        time.sleep(0.5)
        assert steps_reported(caplog) == begun
        released.set()
        wait_until(lambda: steps_reported(caplog) > begun + 50)
        running.stop()
        running.wait(15)
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
        assert last_step.wait(20)
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


def test_what_becomes_nan_during_a_save_is_not_saved(tmp_path: Path) -> None:
    """Training continues during a save: a variable that was finite before it and is NaN after it is not trusted."""
    run = Training(tmp_path)
    run.save(1)
    real = publish.stage

    def stage(path: str) -> Path:
        run.weight.load([1, np.nan, 1, 1], run.session)
        return real(path)

    with mock.patch.object(publish, "stage", stage), pytest.raises(DivergedError, match="weight holds NaN"):
        run.save(2)
    assert steps_in(tmp_path) == [1]


def test_two_saves_wait_for_each_other(tmp_path: Path) -> None:
    """A last save that comes while another is under way waits for it, and both are whole."""
    run = Training(tmp_path)
    with slow_disk(tmp_path) as (reached, released):
        first = threading.Thread(target=run.save, args=(1,))
        first.start()
        assert reached.wait(20)
        second = threading.Thread(target=run.checkpoints.save, args=(run.session, run.step))
        second.start()
        time.sleep(0.2)
        assert second.is_alive()
        run.step.load(2, run.session)
        released.set()
        first.join(20)
        second.join(20)
    assert steps_in(tmp_path) == [1, 2]
    assert [problem(path) for path in list_checkpoints(str(tmp_path))] == [None, None]


def test_a_chief_that_goes_on_saves_over_damage(tmp_path: Path) -> None:
    """A chief that has restored nothing reads what is there before it takes its own step as saved."""
    run = Training(tmp_path)
    run.save(1)
    for file, how in itertools.product(FILES, HOW):
        spoil(tmp_path / f"model.ckpt-1.{file}", how)
        Training(tmp_path).save(1)
        assert steps_in(tmp_path) == [1]
        assert problem(str(tmp_path / "model.ckpt-1")) is None


def test_a_save_that_fails_half_way_loses_neither(tmp_path: Path) -> None:
    """Where a save over one of the same step cannot move a file, whichever, the next chief finds it whole."""
    real, failed = os.replace, 0
    for nth in itertools.count(1):
        run = Training(tmp_path / str(nth))
        run.save(1)
        run.weight.load([nth] * 4, run.session)
        calls = itertools.count(1)

        def replace(*names: Any, calls: Any = calls, nth: int = nth) -> None:
            if next(calls) == nth:
                raise OSError(errno.EIO, "Input/output error")
            real(*names)

        run.checkpoints._at_rest.clear()
        with mock.patch.object(os, "replace", replace), contextlib.suppress(StorageError):
            run.save(1)
            break
        failed += 1
        assert Training(tmp_path / str(nth)).resume() == 1, f"after the {nth}. move"
        assert [path.name for path in (tmp_path / str(nth)).glob(".*")] == []
    assert failed >= 5  # two to their names, two into their place, the index, the state


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("what", ["**/*", "model.ckpt-*"])
def test_a_checkpoint_that_is_lost_in_the_evaluation_is_saved_again(tmp_path: Path, mode: str, what: str) -> None:
    """The PS still hold it; what the summary names is there."""
    place, lost = tmp_path / "m", []

    def removing(x: Any) -> Any:
        lost.extend(path for path in place.glob(what) if path.is_file())
        for path in lost:
            path.unlink(missing_ok=True)
        return x

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "train":
            return dataset_of(np.float32([1])).repeat()
        ones = tf.data.Dataset.from_tensors(np.float32(1))
        return ones.map(lambda x: ({"x": tf.ensure_shape(tf.numpy_function(removing, [x], tf.float32), [])}, 0.0))

    train(model_of(input_fn, linear), num_workers=1, model_dir=str(place), max_steps=7, mode=mode)
    assert place / "model.ckpt-7.index" in lost
    assert summary(place)["checkpoint"] == str(place / "model.ckpt-7")
    assert variables_of(place) == {"global_step": 7, "weight": -7}


def test_an_older_chief_saves_no_more(tmp_path: Path) -> None:
    """A chief that was taken for lost saves nothing where a later one of its job does, and says why."""
    older, later = Training(tmp_path), Training(tmp_path)
    older.owner.claim()
    older.save(1)
    later.owner.claim(older.owner.this_chief.job)
    with pytest.raises(PeerLostError, match="this chief was presumed lost"):
        older.save(2)
    later.save(3)
    assert steps_in(tmp_path) == [1, 3]
    for chief in (older, later):
        chief.owner.release()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_checkpoint_has_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    """Its files and the state file can be read by those only whom the umask lets read."""
    before = os.umask(umask)
    try:
        Training(tmp_path).save(1)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        [path.name for path in tmp_path.iterdir()], 0o666 & ~umask
    )


def test_what_cannot_be_read_for_a_moment_is_not_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error that is gone when the file is read again does not cost the newest checkpoint."""
    run = Training(tmp_path)
    run.save(1)
    run.save(2)
    errors = iter(["model.ckpt-2.index cannot be read: Stale file handle"])
    with mock.patch.object(manager, "restore_or_damage", side_effect=lambda *_: next(errors, None)) as tried:
        assert run.checkpoints.resume(run.session) == str(tmp_path / "model.ckpt-2")
    assert tried.call_count == 2
    assert damage_reports(caplog) == []


def test_a_checkpoint_that_cannot_be_deleted_keeps_no_others(tmp_path: Path) -> None:
    """One that somebody protects stays; the others go as they become too old."""
    training = Training(tmp_path)
    training.save(1)
    (tmp_path / "model.ckpt-1.meta").mkdir()  # which no file's deletion takes away
    for step in range(2, 12):
        training.save(step)
    left = [int(Path(path).name.rpartition("-")[2]) for path in list_checkpoints(str(tmp_path))]
    assert left[-5:] == [7, 8, 9, 10, 11]
    assert set(left) <= {1, 7, 8, 9, 10, 11}
