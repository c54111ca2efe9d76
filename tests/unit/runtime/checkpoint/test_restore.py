"""A checkpoint is read into a graph, or the error says why not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.checkpoints import FILES, HOW, Training, spoil
from support.cluster import LINEAR, model_of, ones, run_job, train, variables_of
from support.processes import summary

import tfps
from tfps.config.launch_protocol import HAS_RECORD, STARTED_AGAIN
from tfps.errors import CheckpointError
from tfps.runtime.checkpoint import restore


@pytest.mark.parametrize(("shape", "name"), [((5,), "weight"), ((4, 1), "weight"), ((4,), "other")])
def test_a_checkpoint_of_another_model_is_named(tmp_path: Path, shape: tuple[int, ...], name: str) -> None:
    """Other shapes and missing variables are a CheckpointError that names the checkpoint, not a silent new start."""
    Training(tmp_path).save(7)
    other = Training(tmp_path, shape, name)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-7 does not fit the model: .*--model_dir"):
        restore.restore(other.session, str(other.checkpoints.newest), other.saver)


def test_missing_variables_are_one_list(tmp_path: Path) -> None:
    """Each is named once, up to a few, before what else differs."""
    Training(tmp_path).save(7)
    with tf.Graph().as_default(), tf.Session() as session:
        for name in ("weight", *"abcdef"):
            tf.get_variable(name, [5])
        with pytest.raises(restore.MisfitError) as caught:
            restore.restore(session, str(tmp_path / "model.ckpt-7"), tf.train.Saver())
    said = str(caught.value).partition("the model: ")[2]
    assert said == (
        "it has no a, b, c and 3 more; weight has shape [4] in it, [5] in the model. "
        "Give the flags it was trained with, or another --model_dir."
    )


def test_a_variable_of_another_type_is_named(tmp_path: Path) -> None:
    """TensorFlow's own error names no variable."""
    Training(tmp_path).save(7)
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("weight", [4], tf.float64)
        with pytest.raises(CheckpointError, match="weight has type float32 in it, float64 in the model"):
            restore.restore(session, str(tmp_path / "model.ckpt-7"), tf.train.Saver())


def growing(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a list, of no fixed length, that gets another element in each step."""
    seen = tf2.Variable(lambda: tf.zeros([1]), trainable=False, shape=[None], name="seen")
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, seen.assign(tf.concat([seen.read_value(), [features["x"]]], 0)))
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    return tfps.ModelSpec(loss=weight * features["x"], optimizer=tf.train.GradientDescentOptimizer(1.0))


def test_a_variable_whose_shape_the_model_leaves_open_is_restored(tmp_path: Path) -> None:
    """A list that grows goes on where it was; one of another rank does not fit."""
    for steps in (3, 5):
        train(model_of(ones, growing), 1, 1, model_dir=str(tmp_path), max_steps=steps)
        assert variables_of(tmp_path)["seen"].tolist() == [0] + [1] * steps
    with tf.Graph().as_default(), tf.Session() as session:
        tf2.Variable(lambda: tf.zeros([1, 1]), shape=[None, 1], name="seen")
        with pytest.raises(CheckpointError, match=r"seen has shape \[6\] in it, \[None, 1\] in the model"):
            restore.restore(session, str(tmp_path / "model.ckpt-5"), tf.train.Saver())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str, how: str) -> None:
    """Asked for by its path, a truncated, empty, changed or missing file is a CheckpointError that names it."""
    Training(tmp_path).save(7)
    run = Training(tmp_path)
    spoil(tmp_path / f"model.ckpt-7.{file}", how)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-7 is damaged: .*--checkpoint_path") as reported:
        restore.restore(run.session, str(run.checkpoints.newest), run.saver)
    assert "\n" not in str(reported.value)
    if file == "index" or how == "empty":
        with pytest.raises(CheckpointError, match=r"model\.ckpt-7 "):
            restore.step_of(str(run.checkpoints.newest))
    if file == "index":
        with pytest.raises(CheckpointError, match=r"model\.ckpt-7 cannot be read: "):
            restore.shapes_in(str(run.checkpoints.newest))


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (OSError(18, "Invalid cross-device link", "/a", None, "/b c"), "Invalid cross-device link: /a -> '/b c'"),
        (OSError(30, "Read-only file system", "/a"), "Read-only file system: /a"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("odd"), "odd"),
    ],
)
def test_what_the_system_refuses_is_reported_with_its_paths(error: OSError, reported: str) -> None:
    """A rename has two of them; no quote stays open."""
    assert restore.message_of(error) == reported


def test_a_directory_whose_name_reads_like_a_pattern(tmp_path: Path) -> None:
    """A job saves there, and goes on from there: TensorFlow's own reader would look for files that match."""
    model_dir = tmp_path / "it's [1e3] * ? {} \\n\nnew line"
    for steps in (10, 20):
        train(LINEAR, num_workers=1, max_steps=steps, model_dir=str(model_dir))
        assert summary(model_dir)["global_step"] == steps
    assert summary(model_dir)["resumed_from_step"] == 10


def test_a_checkpoint_of_another_step_than_its_name_says_is_refused(tmp_path: Path) -> None:
    """The last save would be skipped, as that step is saved already, and later ones taken for older."""
    flags = {"num_workers": 1, "model_dir": str(tmp_path)}
    train(LINEAR, max_steps=3, **flags)
    for file in tmp_path.glob("model.ckpt-3.*"):
        file.rename(tmp_path / file.name.replace("ckpt-3", "ckpt-9"))
    error = run_job(LINEAR, max_steps=9, **flags)["worker/0"]
    assert isinstance(error, CheckpointError)
    assert "model.ckpt-9 holds step 3, not the step in its name" in str(error)
    for file in tmp_path.glob("model.ckpt-9.*"):
        file.rename(tmp_path / file.name.replace("ckpt-9", "ckpt-3"))
    train(LINEAR, max_steps=9, **flags)
    assert variables_of(tmp_path)["global_step"] == 9


@pytest.mark.parametrize(("name", "warnings"), [(STARTED_AGAIN, 0), (HAS_RECORD, 1)])
def test_only_what_was_trained_is_called_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, warnings: int
) -> None:
    """A chief that ended before the cluster had formed has trained nothing."""
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.INFO):
        restore.report_no_checkpoint("/m")
    assert caplog.messages[0] == "no checkpoint in /m: training begins at step 0"
    assert ["are lost" in line for line in caplog.messages[1:]] == [True] * warnings


def test_a_checkpoint_of_a_service_is_refused(tmp_path: Path) -> None:
    """Also if its variables are those of the model: a service could not go on from the job's next checkpoint."""
    prefix = str(tmp_path / "model.ckpt-7")
    with tf.Graph().as_default(), tf.Session() as session:
        values = [tf.ones([4]), tf.constant(7, tf.int64), tf.constant("{}")]
        names = ["weight", "global_step", "tfps/service"]
        session.run(tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * 3, tensors=values))
    with pytest.raises(CheckpointError, match=r"model\.ckpt-7 is one of a parameter service.*another --model_dir"):
        Training(tmp_path).resume()
