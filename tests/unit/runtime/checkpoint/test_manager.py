"""What a checkpoint holds, which one a job goes on from, and what happens if one is damaged or cannot be written."""

import errno
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import FILES, HOW, Training, damage, damage_reports, spoil, steps_in, unreadable
from support.cluster import LINEAR, dataset_of, job, linear, model_of, train, variables_of, wait_until
from support.processes import load_variable, summary

import tfps
from tfps.errors import CheckpointError, DivergedError, PeerLostError, StorageError
from tfps.runtime.checkpoint import manager, publish, restore
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.checkpoint.manager import CheckpointManager
from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.checkpoint.ownership import HeldError


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


def test_what_another_program_wrote_is_kept(tmp_path: Path) -> None:
    """TensorFlow's ``Saver`` deletes only what it has saved; so a script's old checkpoints stay, however many."""
    weight = tf.get_variable("weight", [2], initializer=tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number in range(1, 9):
            session.run(step.assign(number))
            tf.train.Saver([weight, step]).save(session, str(tmp_path / "model.ckpt"), number, write_meta_graph=False)
    tf.reset_default_graph()
    run = Training(tmp_path)
    for number in range(9, 16):
        run.save(number)
    steps = [int(path.rpartition("-")[2]) for path in list_checkpoints(str(tmp_path))]
    assert steps == [*range(1, 9), 11, 12, 13, 14, 15]


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


def test_what_was_saved_as_training_went_on_is_saved_again_at_rest(tmp_path: Path) -> None:
    """A save that began before the last step may bear its number and lack it: the last checkpoint has all of it."""
    run = Training(tmp_path)
    run.step.load(7, run.session)
    run.checkpoints.try_save(run.session, 7, at_rest=False)
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
            assert at != number or event.wait(100)
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
        tf.train.get_or_create_global_step()
        tf.get_variable("half", [100], tf.float16, initializer=tf.constant_initializer(60_000))
        session.run(tf.global_variables_initializer())
        assert CheckpointManager(str(tmp_path), 60).save(session, 0) == 0
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


def test_a_chief_that_goes_on_saves_over_damage(tmp_path: Path) -> None:
    """A chief that has restored nothing reads what is there before it takes its own step as saved."""
    run = Training(tmp_path)
    run.save(1)
    for file, how in itertools.product(FILES, HOW):
        spoil(tmp_path / f"model.ckpt-1.{file}", how)
        Training(tmp_path).save(1)
        assert steps_in(tmp_path) == [1]
        assert problem(str(tmp_path / "model.ckpt-1")) is None


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


def test_a_directory_of_a_run_that_is_not_known_is_not_saved_to(tmp_path: Path) -> None:
    """A chief that could claim nothing waits until ``job.json`` can be read; it never saves to another run's."""
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "job.json").write_text('{"run": "other"}')
    (tmp_path / "m").symlink_to("file")
    run = Training(tmp_path / "m")
    with pytest.raises(StorageError):
        run.owner.claim("a job", "mine")
    with unreadable(tmp_path / "m" / "job.json"):
        (tmp_path / "new").symlink_to("other")
        (tmp_path / "new").rename(tmp_path / "m")
        with pytest.raises(StorageError, match=r"job\.json cannot be read"):
            run.save(1)
    with pytest.raises(HeldError, match="holds another run"):
        run.save(1)
    run.owner.release()
    assert os.listdir(tmp_path / "other") == ["job.json"]


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
        assert run.checkpoints.restore_latest(run.session) == str(tmp_path / "model.ckpt-2")
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


def test_a_checkpoint_of_the_same_name_may_be_of_another_run(tmp_path: Path) -> None:
    """It is not taken for the one that was saved here, and is saved again; a copy of that one is."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
    mine, theirs = Training(here), Training(there)
    theirs.weight.load([2.0] * 4, theirs.session)
    mine.save(7)
    theirs.save(7)
    assert mine.checkpoints.others == []
    shutil.copytree(here, tmp_path / "copy")
    shutil.rmtree(here)
    (tmp_path / "copy").rename(here)
    assert mine.checkpoints.others == []
    shutil.rmtree(here)
    there.rename(here)
    assert mine.checkpoints.others == [str(here / "model.ckpt-7")]
    mine.save(7)
    assert load_variable(here, "weight").tolist() == [1.0] * 4


@pytest.mark.parametrize("patiently", [False, True])
def test_a_directory_that_is_lost_as_values_are_written_is_saved_to_at_once(tmp_path: Path, patiently: bool) -> None:
    """The save that it was lost in makes it again, and writes there what it was to write; also at a job's end."""
    place, run = tmp_path / "m", Training(tmp_path / "m")
    run.owner.on_loss = run.checkpoints.make_due
    run.owner.claim()
    run.save(1)
    savers, real, losses = run.checkpoints._savers, run.checkpoints._savers.save, iter([True])

    def save(session: Any, path: str) -> Any:
        written = real(session, path)
        if next(losses, False):
            shutil.rmtree(place)
        return written

    with mock.patch.object(savers, "save", save):
        run.save(2, patiently)
    assert steps_in(place) == [2]
    assert next(losses, None) is None
    run.owner.release()


@pytest.mark.parametrize("is_published", [False, True])
def test_a_loss_during_a_save_makes_the_next_one_due(tmp_path: Path, is_published: bool) -> None:
    """However far the save has come, and whether or not it failed, it does not put off the one that the loss asks."""
    run, real = Training(tmp_path), publish.publish
    run.checkpoints._every_secs = 1000.0

    def publishing(*args: Any) -> None:
        if is_published:
            real(*args)
            for file in tmp_path.glob("model.ckpt-*"):
                file.unlink()
        run.checkpoints.make_due()
        if not is_published:
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(publish, "publish", publishing):
        run.save(1, patiently=True)
    assert run.checkpoints.is_due
    run.save(1, patiently=True)
    assert steps_in(tmp_path) == [1]
    assert not run.checkpoints.is_due


class Failing:
    """A session of which every run fails that gets a path."""

    def __init__(self, session: Any, error: Callable[[str], Exception]) -> None:
        self._session, self._error = session, error

    def run(self, fetches: Any, feed: Any = None) -> Any:
        """Run, or raise the error for a path."""
        for value in (feed or {}).values():
            if isinstance(value, str):
                raise self._error(value)
        return self._session.run(fetches, feed)


@pytest.mark.parametrize(
    ("code", "why"),
    [(tf.errors.AbortedError, "Stale file handle"), (tf.errors.UnavailableError, "No locks available")],
)
def test_an_error_of_storage_is_no_lost_ps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: Any, why: str
) -> None:
    """A save that fails so is reported, and training goes on; a lost PS, of the same code, is not passed over."""
    caplog.set_level(logging.INFO, "tfps")
    run = Training(tmp_path)
    run.save(1)
    really = run.session
    run.session = Failing(really, lambda path: code(None, None, f"{path}.data-00000-of-00001.tempstate7; {why}"))
    run.save(2, patiently=True)
    assert steps_in(tmp_path) == [1]
    [report] = [text for text in caplog.messages if "Training continues" in text]
    assert f"{tmp_path}/model.ckpt-2 cannot be written: " in report
    assert f"; {why}. Training continues" in report
    run.session = Failing(really, lambda _: code(None, None, "Socket closed"))
    with pytest.raises(code, match="Socket closed"):
        run.save(2, patiently=True)
    run.session = really
    run.save(2, patiently=True)
    assert steps_in(tmp_path) == [1, 2]
