"""Measuring a model, exporting it, and what its author reads about mistakes in it."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, job, linear, model_of, run_job, train, variables_of, wait_until
from support.processes import run_tfps, summary

import tfps
from tfps.cli import evaluate
from tfps.cluster.spec import Cluster, Task
from tfps.config.command_options import ResultOptions
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, ConfigError, DataError, ModelError, PeerLostError, StorageError
from tfps.models.model import Model, mistake
from tfps.modes.registry import MODES
from tfps.runtime.graph import builder
from tfps.runtime.graph.evaluation import evaluation_graph
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results import evaluation, export

pytestmark = pytest.mark.slow

BATCHES = np.random.default_rng(3).normal(size=[5, 4, 3]).astype(np.float32)
EMPTY = np.zeros([0, 4, 3], np.float32)


def pairs(x: Any, single: bool) -> tuple[Any, Any]:
    """Return features and labels of a batch."""
    return x if single else {"x": x, "scale": tf.ones([4])}, tf.reduce_sum(x, axis=1)


def batches(single: bool = False, measured: Any = BATCHES) -> Callable[..., Any]:
    """Return an ``input_fn`` with features in a dict, or a single tensor."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(measured if mode == "eval" else BATCHES)
        data = data.map(lambda x: pairs(x, single))
        return data if mode == "eval" else data.repeat()

    return input_fn


def regression(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` with two layers, a lookup table, and predictions by name."""
    x = features["x"] if isinstance(features, dict) else features
    kernel = tf.get_variable("kernel", [3, 8])
    bias = tf.get_variable("bias", [8], initializer=tf.ones_initializer())
    last = tf.get_variable("last", [8])
    sizes = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["unit"], [1.0]), 0.0)
    y = tf.tensordot(tf.tanh(x @ kernel + bias), last, 1) * sizes.lookup(tf.constant("unit"))
    predictions = {"y": y, "positive": y > 0}
    if mode == "infer":
        return tfps.ModelSpec(predictions=predictions)
    return tfps.ModelSpec(
        loss=tf.reduce_mean(tf.square(y - labels)),
        predictions=predictions,
        eval_metric_ops={
            "mae": tf.metrics.mean_absolute_error(labels, y),
            "rows": tf.metrics.mean_tensor(tf.reduce_mean(x, axis=0)),
        },
        optimizer=tf.train.AdamOptimizer(0.01),
    )


MODEL = model_of(batches(), regression)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a job that has trained on two PS, with the kernel in slices."""
    model_dir = tmp_path_factory.mktemp("trained")
    train(MODEL, num_ps=2, max_steps=20, min_slice_mb=1e-9, model_dir=str(model_dir))
    return model_dir


def newest(model_dir: Path) -> str:
    """Return the newest checkpoint."""
    return str(tf.train.latest_checkpoint(str(model_dir)))


def predicted(model_dir: Path, x: Any) -> Any:
    """Return what the trained weights predict, computed without TensorFlow."""
    weights = variables_of(model_dir)
    return np.tanh(x @ weights["kernel"] + weights["bias"]) @ weights["last"]


def test_live_parameters_measure_as_the_checkpoint_does(trained: Path) -> None:
    """The final evaluation on the PS' parameters and that of the last checkpoint are the same numbers exactly."""
    live = summary(trained)["eval"]
    assert evaluation.evaluate_checkpoint(JobConfig(), MODEL, newest(trained)) == live
    assert set(live) == {"loss", "mae", "rows"}


@pytest.mark.parametrize("kind", ["labels", "features", "sparse", "ragged", "none"])
def test_a_short_last_batch_counts_for_its_examples_only(kind: str, tmp_path: Path) -> None:
    """``loss`` is the mean over all 7 examples in batches of 3, 3 and 1: 3.0, where that over the batches is 11 / 3."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.range(7).map(lambda one: tf.cast(one, tf.float32)).batch(3).map(element)
        return data if mode == "eval" else data.repeat()

    def element(x: Any) -> tuple[Any, Any]:
        features = {
            "labels": lambda: tf.zeros([2]),
            "none": lambda: x,
            "features": lambda: x,
            "sparse": lambda: tf.sparse.from_dense(x[:, None]),
            "ragged": lambda: tf.RaggedTensor.from_row_lengths(x, tf.ones_like(x, tf.int64)),
        }[kind]()
        return {"a": features, "mean": tf.reduce_mean(x)}, {
            "labels": {"anchors": tf.zeros([9, 4]), "scale": 2.0, "y": x},
            "none": {},
        }.get(kind)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=features["mean"] + weight, optimizer=tf.train.GradientDescentOptimizer(0.0))

    train(model_of(input_fn, model_fn), max_steps=1, model_dir=str(tmp_path))
    assert summary(tmp_path)["eval"] == {"loss": 3.0}


@pytest.mark.parametrize("tokens", ["flat", "ragged"])
def test_tokens_are_no_examples(tokens: str, tmp_path: Path) -> None:
    """Batches of two sentences each, of 2 and of 8 words: ``loss`` is the mean over sentences, and they are counted."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices([1, 1, 4, 4]).batch(2, drop_remainder=True).map(element)
        return data if mode == "eval" else data.repeat()

    def element(lengths: Any) -> tuple[Any, Any]:
        words = tf.range(tf.reduce_sum(lengths))
        ragged = tf.RaggedTensor.from_row_lengths(words, lengths)
        return {"words": words if tokens == "flat" else ragged, "length": lengths[0]}, tf.cast(lengths, tf.float32)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=tf.reduce_mean(labels) + weight, optimizer=tf.train.GradientDescentOptimizer(0.0))

    train(model_of(input_fn, model_fn), max_steps=3, num_workers=1, model_dir=str(tmp_path))
    assert summary(tmp_path)["eval"] == {"loss": 2.5}
    assert summary(tmp_path)["batch_size"] == 2


def test_metrics_are_over_the_whole_input(trained: Path) -> None:
    """The metrics are means over all evaluation batches; one that is no scalar is a list."""
    live = summary(trained)["eval"]
    errors = np.stack([predicted(trained, x) - x.sum(axis=1) for x in BATCHES])
    assert live["loss"] == pytest.approx(np.square(errors).mean(), rel=1e-5)
    assert live["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert live["rows"] == pytest.approx(BATCHES.mean(axis=(0, 1)).tolist(), rel=1e-5)


def test_measuring_twice_gives_the_same(trained: Path) -> None:
    """Each evaluation begins anew: what an earlier one has counted is forgotten."""
    built = evaluation_graph(JobConfig(), None, Task("worker", 0), MODEL)
    assert built is not None
    with built.graph.as_default(), tf.Session() as session:
        tf.train.Saver().restore(session, newest(trained))
        assert evaluation.measure(session, built) == evaluation.measure(session, built) == summary(trained)["eval"]


def test_a_metric_that_ignores_its_input_counts_its_batches() -> None:
    """The run that finds the input at its end adds nothing to a metric, also where that need not wait for a batch."""

    def slowly_ending(mode: str, params: Any, context: Any) -> Any:
        def take(number: Any) -> Any:
            time.sleep(0.3 if number else 0)
            return number == 0

        numbers = tf.data.Dataset.range(2)
        taken = numbers.filter(lambda at: tf.ensure_shape(tf.numpy_function(take, [at], tf.bool), []))
        return taken.map(lambda at: ({"x": tf.cast(at, tf.float32)}, 0.0))

    def constant(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = linear(features, labels, mode, params)
        return dataclasses.replace(spec, eval_metric_ops={"two": tf.metrics.mean(tf.constant(2.0))})

    model = model_of(slowly_ending, constant)
    built = evaluation_graph(JobConfig(), None, Task("worker", 0), model)
    assert built is not None
    with built.graph.as_default(), tf.Session(graph=built.graph) as session:
        session.run(tf.global_variables_initializer())
        totals = [v for v in built.graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES) if v.shape.rank == 0]
        assert evaluation.measure(session, built)["two"] == 2
        assert sorted(session.run(totals)) == [0, 1, 1, 2]  # the loss's total, the two counts, the metric's total


def test_an_evaluation_input_without_end_is_reported_at_the_start(tmp_path: Path) -> None:
    """A dataset that repeats for ever is the model's mistake, reported before the first step and with its line."""

    def endless(mode: str, params: Any, context: Any) -> Any:
        return dataset_of(np.float32([1, 2])).repeat().batch(2)

    error = run_job(model_of(endless, linear), num_workers=1, max_steps=10, model_dir=str(tmp_path))["worker/0"]
    assert isinstance(error, ModelError), error
    assert re.search(r"test_eval_export\.py, line \d+: input_fn\(mode='eval'\) returned an endless dataset", str(error))
    assert summary(tmp_path)["global_step"] == 0


def test_the_evaluator_goes_on_when_its_checkpoint_is_deleted(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that is too old before it was measured is passed over; the next one is measured."""
    caplog.set_level(logging.INFO, "tfps")
    shutil.copytree(trained, tmp_path / "m")
    paths = iter([str(tmp_path / "m" / "model.ckpt-3"), newest(tmp_path / "m")])
    monkeypatch.setattr(evaluation.Finder, "newest", lambda _: next(paths, newest(tmp_path / "m")))
    config = JobConfig(model_dir=str(tmp_path / "m"), max_steps=20)
    evaluation.follow(config, Cluster(("ps:1",), ("worker:1",)), MODEL, StopRequest())
    assert f"{tmp_path}/m/model.ckpt-3 was deleted in the meantime: using a newer one" in caplog.messages
    assert any(message.startswith("step=20 loss=") for message in caplog.messages)


@pytest.mark.parametrize("given", [None, "model.ckpt-3"])
def test_a_checkpoint_that_the_running_job_deletes_is_no_damage(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    given: str | None,
) -> None:
    """``tfps eval`` and ``tfps export`` take the one that is the newest by then, unless the user has named one."""
    config, options = JobConfig(model_dir=str(trained)), ResultOptions(given, str(tmp_path / "export"))
    gone = evaluate._Trained(config, options, MODEL, str(trained / "model.ckpt-3"), "")
    monkeypatch.setattr(evaluate, "_trained", lambda *_: gone)
    for use in (evaluate._eval, evaluate._export):
        with pytest.raises(CheckpointError, match=r"model\.ckpt-3") if given else contextlib.nullcontext():
            assert use([]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in out] == ([] if given else ["step=20 loss=", str(tmp_path / "export")[:13]])


@pytest.mark.parametrize("wrong_secs", [-1000, 1000])
def test_an_evaluator_goes_by_the_file_systems_clock(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_secs: float
) -> None:
    """An earlier, shorter run's summary is not the end of this one, and its own is, whatever this host's clock says."""
    shutil.copytree(trained, tmp_path / "m")
    path, now, stop = tmp_path / "m" / "summary.json", time.time, StopRequest()
    short = json.dumps({"status": "done", "global_step": 20, "exit_code": 0})
    path.write_text(short)
    os.utime(path, (now() - 30, now() - 30))
    monkeypatch.setattr(time, "time", lambda: now() + wrong_secs)
    config, ended = JobConfig(model_dir=str(tmp_path / "m"), max_steps=40), threading.Event()

    def be_evaluator() -> None:
        evaluation.follow(config, Cluster(("ps:1",), ("worker:1",)), MODEL, stop)
        ended.set()

    thread = threading.Thread(target=be_evaluator, daemon=True)
    thread.start()
    assert not ended.wait(3), "it took an earlier run's summary for this one's"
    path.write_text(short)
    assert ended.wait(100), "it did not take this run's summary"


def be_left(model_dir: Path, **last: Any) -> None:
    """Be the evaluator of a job of 1000 steps whose directory has this old summary, and of which no task is there."""
    path = model_dir / "summary.json"
    path.write_text(json.dumps({"global_step": 20, "max_steps": 20, **last}))
    os.utime(path, (time.time() - 3000, time.time() - 3000))
    config = JobConfig(model_dir=str(model_dir), start_timeout_secs=1.0)
    evaluation.follow(config, Cluster(("127.0.0.1:1",), ("127.0.0.1:2",)), MODEL, StopRequest())


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_an_evaluator_of_a_job_that_ended_long_ago_ends(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: str
) -> None:
    """It has not the job's own --max_steps; nobody starts the job again, so its checkpoint is measured, and no more."""
    caplog.set_level(logging.INFO, "tfps")
    shutil.copytree(trained, tmp_path / "m")
    be_left(tmp_path / "m", status=status)
    assert [message[:13] for message in caplog.messages if message.startswith("step=")] == ["step=20 loss="]
    assert caplog.messages[-1] == "done"


def test_an_evaluator_that_waits_in_vain_is_lost(trained: Path, tmp_path: Path) -> None:
    """It can be started again, as long as the job may continue, or begin anew where its checkpoints were deleted."""
    shutil.copytree(trained, tmp_path / "m")
    with pytest.raises(PeerLostError, match=r"^no PS has answered for 1 s, and --model_dir has no summary\.json"):
        be_left(tmp_path / "m", status="failed", exit_code=170)
    for path in tmp_path.glob("m/model.ckpt-*"):
        path.unlink()
    with pytest.raises(PeerLostError):
        be_left(tmp_path / "m", status="done")


def test_an_evaluation_is_no_wait(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PS are asked as long after one that took 100 s as after a short one: until the patience of 1 s is over."""
    clock, asked = [0.0], []

    def spend(secs: float) -> None:
        clock[0] += secs

    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=spend))
    monkeypatch.setattr(evaluation, "_evaluate_one", lambda *_: spend(100.0))
    monkeypatch.setattr(evaluation.rendezvous, "missing", lambda _, tasks: asked.append(clock[0]) or tasks)
    config = JobConfig(model_dir=str(trained), start_timeout_secs=1.0, max_steps=30)
    with mock.patch.object(evaluation, "has_ended_since", return_value=False), pytest.raises(PeerLostError):
        evaluation.follow(config, CLUSTER, MODEL, StopRequest())
    assert asked == [100.0, 100.5, 101.0, 101.5, 102.0]  # 101.5 is over, and the last one hears the verdict


@pytest.mark.parametrize(
    "odd", [{}, {"exit_code": "x", "status": "failed"}, {"global_step": "abc"}, {"global_step": [1]}]
)
def test_an_evaluator_does_not_end_with_a_job_whose_checkpoints_were_deleted(
    trained: Path, tmp_path: Path, odd: dict[str, Any]
) -> None:
    """It waits for the one that begins anew there, whatever the old summary says."""
    shutil.copytree(trained, tmp_path / "m")
    for path in tmp_path.glob("m/model.ckpt-*"):
        path.unlink()
    path, stop = tmp_path / "m" / "summary.json", StopRequest()
    path.write_text(json.dumps({"status": "done", "global_step": 20, "max_steps": 20, "exit_code": 0} | odd))
    os.utime(path, (time.time() - 30, time.time() - 30))
    config, ended = JobConfig(model_dir=str(tmp_path / "m"), max_steps=20), threading.Event()

    def be_evaluator() -> None:
        evaluation.follow(config, Cluster(("ps:1",), ("worker:1",)), MODEL, stop)
        ended.set()

    threading.Thread(target=be_evaluator, daemon=True).start()
    assert not ended.wait(2)
    os.utime(path)
    assert ended.wait(100)


def test_a_checkpoint_without_the_jobs_flags_is_said(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a checkpoint that was copied alone there is no job.json: one line says that the defaults are used."""
    monkeypatch.setattr(evaluate, "with_tensorflow", lambda problems: problems.settle())
    for file in trained.glob("model.ckpt-20.*"):
        shutil.copy(file, tmp_path)
    copied = f"--checkpoint_path={tmp_path / 'model.ckpt-20'}"
    for flags, says in (
        ([copied], f"{tmp_path}/job.json does not exist: flags that are not given have their defaults\n"),
        ([copied, f"--model_dir={trained}"], ""),
    ):
        found = evaluate._trained(evaluate.EVAL, [*flags, "--model=linear"])
        assert found.checkpoint == str(tmp_path / "model.ckpt-20")
        assert capsys.readouterr().err == says


def test_an_export_does_not_take_the_weights_of_another_layer(tmp_path: Path) -> None:
    """Training has two towers of one shape, prediction the second only, which Keras then numbers as the first."""

    def towers(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        def tower() -> Any:
            return tf2.keras.layers.Dense(1, use_bias=False)(tf.reshape(features["x"], [-1, 1]))

        if mode == tfps.ModeKeys.PREDICT:
            return tfps.ModelSpec(predictions={"y": tower()})
        loss = tf.reduce_sum(tower() - tower())
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    def numbers(mode: str, params: Any, context: Any) -> Any:
        return dataset_of(np.float32([1, 2, 3])).batch(1)

    model = model_of(numbers, towers)
    train(model, num_workers=1, max_steps=2, model_dir=str(tmp_path / "m"))
    with pytest.raises(ModelError, match=r"give each Keras layer and tf\.Variable a name"):
        export.saved_model(JobConfig(), model, newest(tmp_path / "m"))
    assert not (tmp_path / "m" / "export").exists()


def test_an_empty_evaluation_input_is_a_data_error(trained: Path) -> None:
    """No batch to evaluate on is 65, and not a metric of nothing."""
    empty = model_of(batches(measured=EMPTY), regression)
    with pytest.raises(DataError, match="the evaluation input is empty"):
        evaluation.evaluate_checkpoint(JobConfig(), empty, newest(trained))


def test_nothing_to_evaluate_on_is_said(trained: Path) -> None:
    """``tfps eval`` of a model without evaluation input says so; its training just has no metrics."""
    none = model_of(lambda *_: None, regression)
    with pytest.raises(ConfigError, match=r"input_fn\(mode='eval'\) returned None"):
        evaluation.evaluate_checkpoint(JobConfig(), none, newest(trained))
    with pytest.raises(ModelError, match=r"input_fn\(mode='eval'\) returned None; export needs"):
        export.saved_model(JobConfig(), none, newest(trained))


def test_a_checkpoint_of_another_model_is_not_measured(trained: Path) -> None:
    """Evaluating or exporting with another model is a CheckpointError, not numbers of untrained weights."""
    other = model_of(batches(), linear)
    for use in (evaluation.evaluate_checkpoint, export.saved_model):
        with pytest.raises(CheckpointError, match="it has no weight"):
            use(JobConfig(), other, newest(trained))


def test_the_model_of_the_job_is_named_where_another_one_was_given(
    trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message about a checkpoint that does not fit ends with the model that ``job.json`` names."""
    monkeypatch.setattr(evaluate, "with_tensorflow", lambda problems: problems.settle())
    other = model_of(batches(), linear)
    for flags, ends in (
        (["--model=mnist"], rf"another --model_dir\. {trained}/job\.json names --model=linear\.$"),
        (["--model=linear"], r"another --model_dir\.$"),
    ):
        found = evaluate._trained(evaluate.EVAL, [f"--model_dir={trained}", *flags])
        with pytest.raises(CheckpointError, match=ends):
            evaluate._with_checkpoint(found, lambda path: evaluation.evaluate_checkpoint(JobConfig(), other, path))


# Plain TensorFlow 2, where tfps cannot be imported: loads, predicts, prints.
SERVE = """
import json, sys
sys.modules["tfps"] = None
import numpy as np
import tensorflow as tf
for directory, single in zip(sys.argv[1::2], sys.argv[2::2]):
    signature = tf.saved_model.load(directory).signatures["serving_default"]
    for rows in (1, 7):
        x = tf.constant(np.linspace(-1, 1, 3 * rows, dtype=np.float32).reshape(rows, 3))
        given = {"features": x} if single == "True" else {"x": x, "scale": tf.ones([rows])}
        values = {name: value.numpy().tolist() for name, value in signature(**given).items()}
        print(json.dumps(values))
"""


def test_an_export_is_served_by_plain_tensorflow(trained: Path, tmp_path: Path) -> None:
    """A SavedModel loads where tfps is not installed, takes batches of any size, and predicts what the weights do.

    With features in a dict, whose names are the signature's inputs, and with a single tensor, called ``features``.
    """
    arguments = []
    for single in (False, True):
        model, place = model_of(batches(single), regression), str(tmp_path / str(single))
        written = export.saved_model(JobConfig(), model, newest(trained), place)
        arguments += [str(written), str(single)]
    (tmp_path / "elsewhere").mkdir()
    ended = subprocess.run(
        [sys.executable, "-I", "-c", SERVE, *arguments],
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 4
    for line, rows in zip(lines, (1, 7, 1, 7), strict=True):
        served_values = eval(line, {"true": True, "false": False})
        expected = predicted(trained, np.linspace(-1, 1, 3 * rows, dtype=np.float32).reshape(rows, 3))
        np.testing.assert_allclose(served_values["y"], expected, rtol=1e-5, atol=1e-6)
        assert served_values["positive"] == [bool(value > 0) for value in served_values["y"]]


def served(written: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return what a SavedModel predicts in a session of its own; ``given`` are all inputs of its signature."""
    with tf.Session(graph=tf.Graph()) as session:
        loaded = tf.saved_model.loader.load(session, ["serve"], str(written))
        signature = loaded.signature_def["serving_default"]
        assert set(signature.inputs) == set(given)
        fed = {signature.inputs[name].name: value for name, value in given.items()}
        return dict(session.run({name: info.name for name, info in signature.outputs.items()}, fed))


def test_a_model_may_change_its_features_and_labels(tmp_path: Path) -> None:
    """What a model adds, changes or removes is its own: an export and the weight of a batch are of the input's."""
    x, y = np.arange(1, 11, dtype=np.float32), np.arange(10, dtype=np.float32)

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(({"x": x, "flag": y}, {"mask": y < 9, "y": y}))
        return data.batch(4) if mode == "eval" else data.repeat().batch(4)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        features["x"] = features["x"] * 2
        features["added"] = features["x"] + features.pop("flag")
        weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
        if mode == "infer":
            return tfps.ModelSpec(predictions={"added": weight * features["added"]})
        labels["active"] = tf.boolean_mask(labels["y"], labels["mask"])
        loss = tf.reduce_mean(labels["y"]) + 0 * weight
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    model = model_of(input_fn, model_fn)
    train(model, num_workers=1, max_steps=3, model_dir=str(tmp_path / "m"))
    assert summary(tmp_path / "m")["eval"]["loss"] == y.mean()
    assert evaluation.evaluate_checkpoint(JobConfig(), model, newest(tmp_path / "m"))["loss"] == y.mean()
    written = export.saved_model(JobConfig(), model, newest(tmp_path / "m"))
    assert served(written, {"x": x, "flag": y})["added"].tolist() == (2 * x + y).tolist()


def test_local_variables_are_served(tmp_path: Path) -> None:
    """A constant table in a local variable, which no checkpoint has, has its first value in an export."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensors(({"id": np.int64([0, 2])}, np.float32([1, 1])))
        return data if mode == "eval" else data.repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        table = tf.get_local_variable("table", initializer=np.float32([10, 20, 30]))
        weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
        rows = weight * tf.gather(table, features["id"])
        if mode == "infer":
            return tfps.ModelSpec(predictions={"rows": rows})
        loss = tf.reduce_mean(rows) * 0
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    model = model_of(input_fn, model_fn)
    train(model, num_workers=1, max_steps=2, model_dir=str(tmp_path / "m"))
    written = export.saved_model(JobConfig(), model, newest(tmp_path / "m"))
    assert served(written, {"id": np.int64([2, 1])})["rows"].tolist() == [30, 20]
    code = f"""
import tensorflow as tf
served = tf.saved_model.load({str(written)!r}).signatures["serving_default"]
print(served(id=tf.constant([2, 1], tf.int64))["rows"].numpy().tolist())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout == "[30.0, 20.0]\n", ended.stderr


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """Return a trained model with a scalar feature, a looked-up local variable, and predictions of all kinds."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensors(({"x": np.float32([1, 2]), "flag": True}, np.float32([1, 1])))
        return data if mode == "eval" else data.repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [2], initializer=tf.ones_initializer())
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [3.0, 5.0]), 0.0)
        looked_up = tf.get_local_variable("looked_up", initializer=lambda: table.lookup(tf.constant(["b"])))
        step = tf.cast(tf.train.get_global_step(), tf.float32)
        y = tf.cond(features["flag"], lambda: features["x"] * looked_up, lambda: features["x"])
        rows = tf.sparse.from_dense(features["x"])
        if mode == "infer":
            return tfps.ModelSpec(predictions={"y": y, "weight": weight, "step": step, "three": 3.0, "rows": rows})
        loss = tf.reduce_mean(y * weight) * 0
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    model, model_dir = model_of(input_fn, model_fn), tmp_path_factory.mktemp("odd")
    train(model, num_workers=1, max_steps=2, model_dir=str(model_dir))
    return model, model_dir


def test_what_a_model_predicts_is_served_as_its_value(odd: tuple[Model, Path], tmp_path: Path) -> None:
    """A variable, a number, the step, sparse rows, and what is made of a scalar feature and of a table's entry."""
    written = export.saved_model(JobConfig(), odd[0], newest(odd[1]), str(tmp_path / "out"))
    code = f"""
import tensorflow as tf
served = tf.saved_model.load({str(written)!r}).signatures["serving_default"]
for flag in (True, False):
    got = served(x=tf.constant([2.0, 4.0, 0.0]), flag=tf.constant(flag))
    print({{name: got[name].numpy().tolist() for name in ("y", "weight", "step", "three")}}, got["rows"].values.numpy())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    rest = "'weight': [1.0, 1.0], 'step': 2.0, 'three': 3.0} [2. 4.]"
    assert ended.stdout == f"{{'y': [10.0, 20.0, 0.0], {rest}\n{{'y': [2.0, 4.0, 0.0], {rest}\n", ended.stderr


def test_a_looked_up_local_variable_is_measured(odd: tuple[Model, Path]) -> None:
    """Its first value is read when its table is ready, each time."""
    for _ in range(5):
        assert evaluation.evaluate_checkpoint(JobConfig(), odd[0], newest(odd[1]))["loss"] == 0


@pytest.mark.parametrize(
    ("predictions", "reported"),
    [
        (None, "no predictions: give ModelSpec(predictions={...})."),
        ([1.0, 2.0], "predictions=a list; it must be a tensor, or a dict of tensors by name."),
        ({1: 2.0}, "predictions with the name 1; a name must be a str."),
        ({"y": {"z": 1.0}}, "predictions with 'y', which is a dict; each must be a tensor."),
    ],
)
def test_what_cannot_be_served_is_refused(trained: Path, tmp_path: Path, predictions: Any, reported: str) -> None:
    """With what is wrong and the line of the model; nothing is written."""
    model = model_of(batches(), lambda *_: tfps.ModelSpec(predictions=predictions))
    with pytest.raises(ModelError, match=re.escape(f"model_fn(mode='infer') returned {reported}")):
        export.saved_model(JobConfig(), model, newest(trained), str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_export_goes_below_the_model_dir(trained: Path) -> None:
    """Without ``--export_dir`` it is MODEL_DIR/export/STEP, and a second export there is refused."""
    written = export.saved_model(JobConfig(), MODEL, newest(trained))
    assert written == trained / "export" / "20"
    assert (written / "saved_model.pb").is_file()
    with pytest.raises(StorageError, match=r"^/.*/export/20 exists and is not empty: delete it, or give --export_dir"):
        export.saved_model(JobConfig(), MODEL, newest(trained))


def test_a_relative_export_dir_is_where_the_command_was_given(tmp_path: Path) -> None:
    """A model that changes the directory does not move its export."""
    (tmp_path / "m.py").write_text("import os\nfrom tfps.models.linear import *\nos.chdir('/')\n")
    for command in (("launch", "--model=m.py", "--max_steps=2"), ("export", "--export_dir=out")):
        ended = run_tfps(*command, "--model_dir=m", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{tmp_path}/out\n"
    assert (tmp_path / "out" / "saved_model.pb").is_file()


def test_features_may_have_any_name(tmp_path: Path) -> None:
    """The signature of an export has them as they are, though TensorFlow's operations cannot be called so."""
    names = ["user id", "größe", "a:b"]

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(BATCHES[0])
        data = data.map(lambda x: (dict(zip(names, tf.unstack(x), strict=True)), 0.0)).batch(2)
        return data if mode == "eval" else data.repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        y = tf.add_n([features[name] for name in names]) * tf.get_variable("weight", [])
        loss = tf.reduce_sum(y)
        return tfps.ModelSpec(loss=loss, predictions={"y": y}, optimizer=tf.train.GradientDescentOptimizer(0.1))

    train(model_of(input_fn, model_fn), num_workers=1, max_steps=2, model_dir=str(tmp_path / "m"))
    model = model_of(input_fn, model_fn)
    written = export.saved_model(JobConfig(), model, newest(tmp_path / "m"), str(tmp_path / "out"))
    served = tf.saved_model.load_v2(str(written)).signatures["serving_default"]
    assert sorted(served.structured_input_signature[1]) == sorted(names)


def test_an_export_that_cannot_be_written_is_a_storage_error(trained: Path, tmp_path: Path) -> None:
    """A file in the way of the directory is 74."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=r"--export_dir="):
            export.saved_model(JobConfig(), MODEL, newest(trained), str(place))


def test_an_export_that_breaks_off_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    """Half a model must not be served; the same command can be given again."""
    out = str(tmp_path / "out")
    full = OSError(errno.ENOSPC, "No space left on device")
    writes = mock.patch("tensorflow.python.lib.io.file_io.write_string_to_file", side_effect=full)
    with writes, pytest.raises(StorageError, match="No space left on device"):
        export.saved_model(JobConfig(), MODEL, newest(trained), out)
    assert list(tmp_path.iterdir()) == []
    assert (export.saved_model(JobConfig(), MODEL, newest(trained), out) / "saved_model.pb").is_file()


def nothing(*_: Any) -> None:
    """Return nothing."""


def raising(*_: Any) -> None:
    """Fail as a user's code does."""
    raise KeyError("feature")


def spec(**fields: Any) -> Any:
    """Return a ``model_fn`` that returns these fields, made when it is called."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(weight * labels)
        whole = {"loss": loss, "predictions": {"y": loss}, "optimizer": tf.train.AdamOptimizer()}
        made = {name: value(features, weight) if callable(value) else value for name, value in fields.items()}
        return tfps.ModelSpec(**{**whole, **made})

    return model_fn


def replicated() -> Any:
    """Return an optimizer as distributed programs of TensorFlow 1.x wrap it."""
    return tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(0.1), replicas_to_aggregate=2)


class Unfinished(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """An optimizer whose error has no text."""

    def compute_gradients(self, *_: Any, **__: Any) -> Any:
        """Fail."""
        raise NotImplementedError


class Scaling(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """An optimizer that does not expect a variable without a gradient."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return scaled gradients."""
        return [(tf.constant(0.5, g.dtype) * g, v) for g, v in super().compute_gradients(*args, **kwargs)]


class Forgetful(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """An optimizer that does not return its update."""

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients."""
        super().apply_gradients(*args, **kwargs)


@tf.custom_gradient
def broken(x: Any) -> Any:
    """Return ``x``; its gradient fails."""
    return tf.identity(x), lambda gradient: {"a": gradient}["b"]


def without_gradient(features: Any, weight: Any) -> Any:
    """Return the result of an operation that has no gradient."""
    return tf.reduce_sum(tf.raw_ops.AdjustHue(images=(weight * features["x"])[tf.newaxis], delta=0.1))


INPUT = batches()
CLUSTER = Cluster(("ps:1",), ("worker:1", "worker:2"))  # of which nothing is started


@pytest.mark.parametrize(
    ("input_fn", "model_fn", "reported"),
    [
        (nothing, regression, "input_fn returned None; it must return a tf.data.Dataset of (features, labels)."),
        (lambda *_: [1, 2], regression, "input_fn returned a list; it must return a tf.data.Dataset"),
        (lambda *_: tf.data.Dataset.range(3), regression, "they must be pairs (features, labels)."),
        (lambda *_: tf.data.Dataset.from_tensors((1, 2, 3)), regression, "they must be pairs (features, labels)."),
        (INPUT, nothing, "model_fn(mode='train') returned None; it must return a tfps.ModelSpec."),
        (INPUT, lambda *_: tf.constant(1.0), "returned a tensor; it must return a tfps.ModelSpec."),
        (INPUT, spec(loss=None), "returned loss=None; it must be a scalar tensor."),
        (INPUT, spec(loss=0.5), "returned loss=a float; it must be a scalar tensor."),
        (INPUT, spec(loss=lambda f, w: w * f["x"]), "a loss of shape (4, 3); it must be a scalar: take its mean."),
        (INPUT, spec(log_tensors={"a": tf.zeros([3])}), "log_tensors with 'a' of shape (3,); each must be a scalar"),
        (INPUT, spec(optimizer=None), "optimizer=None; it must be a tf.compat.v1.train.Optimizer."),
        (INPUT, spec(optimizer="sgd"), "optimizer=a str; it must be a tf.compat.v1.train.Optimizer."),
        (
            INPUT,
            spec(optimizer=lambda *_: tf.no_op()),
            "it must be a tf.compat.v1.train.Optimizer: the optimizer itself",
        ),
        (
            INPUT,
            spec(optimizer=lambda *_: tf.train.AdamOptimizer(None)),
            "None values not supported. (params['learning_",
        ),
        (INPUT, spec(optimizer=lambda *_: replicated()), "optimizer=a SyncReplicasOptimizer; return the opt"),
        (INPUT, spec(loss=lambda f, _: tf.reduce_mean(f["x"])), "no gradient step can be built: No gradients provided"),
        (INPUT, spec(loss=lambda _, w: tf.cast(w, tf.int32)), "no gradient step can be built"),
        (INPUT, spec(loss=without_gradient), "no gradient step can be built: No gradient defined for operation"),
        (INPUT, spec(loss=lambda _, w: broken(w)), "KeyError: 'b'\n    return tf.identity(x), lambda gradient: "),
        (INPUT, spec(optimizer=lambda *_: Unfinished(1.0)), "NotImplementedError: no message\n    raise NotImpl"),
        (
            INPUT,
            spec(loss=lambda f, _: tf.reduce_mean(f["x"]), optimizer=lambda *_: Scaling(1.0)),
            "AttributeError: 'NoneType' object has no attribute 'dtype'\n    return [(tf.constant(0.5, g.dtype)",
        ),
        (
            INPUT,
            spec(optimizer=lambda *_: Forgetful(1.0)),
            "gradient step can be built: the optimizer's apply_gradients r",
        ),
        (raising, regression, "KeyError: 'feature'\n    raise KeyError(\"feature\")"),
        (INPUT, raising, "KeyError: 'feature'\n    raise KeyError(\"feature\")"),
        (INPUT, spec(loss=lambda f, w: w @ f["x"]), "Shape must be"),
    ],
)
def test_a_mistake_in_a_model_is_shown_with_its_line(input_fn: Any, model_fn: Any, reported: str) -> None:
    """What a model's functions get wrong is a ModelError with the model's name and a line of the user's own file."""
    functions = SimpleNamespace(input_fn=input_fn, model_fn=model_fn)
    model = Model("mine", Path(__file__), functions)
    for mode in MODES if "gradient" in reported or "Sync" in reported else ["async"]:
        with pytest.raises(ModelError) as error:
            builder.training(JobConfig(mode=mode), CLUSTER, Task("worker", 0), model)
        assert reported in str(error.value)
        assert re.match(rf"--model=mine: {re.escape(__file__)}, line \d+: ", str(error.value))


def test_what_a_split_variable_cannot_do_is_reported_with_the_flag() -> None:
    """TensorFlow computes with a variable that was split only where it takes a tensor; not every user knows of it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        return tfps.ModelSpec(loss=tf.reduce_sum(tf.get_variable("large", [4]) + 1.0))

    cluster = Cluster(("p:1", "p:2"), ("w:1",))
    model = Model("mine", Path(__file__), SimpleNamespace(input_fn=INPUT, model_fn=model_fn))
    with pytest.raises(ModelError, match=r"PartitionedVariable.* a larger --min_slice_mb keeps it whole"):
        builder.training(JobConfig(min_slice_mb=1e-6), cluster, Task("worker", 0), model)


def test_a_mistake_with_no_line_of_the_users_shows_none_of_pythons() -> None:
    """A thread's frames begin in the standard library, which is no user's."""
    model, error = Model("mine", Path(__file__), None), KeyError("x")
    frames = [traceback.FrameSummary(threading.__file__, 982, "run", line="self._target()")]
    assert str(mistake(model, error, frames)) == "--model=mine: KeyError: 'x'"


def test_a_loss_of_unknown_shape_is_taken_as_a_scalar() -> None:
    """A loss whose rank the graph does not know is no mistake."""
    model = model_of(INPUT, spec(loss=lambda _, w: tf.placeholder_with_default(w * 1.0, None)))
    built = builder.training(JobConfig(), CLUSTER, Task("worker", 0), model)
    assert built.spec.loss.shape == ()


def checked(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` that checks its input as it runs."""
    with tf.control_dependencies([tf.debugging.assert_less(features["x"], 5.0, message="x is too large")]):
        return linear({"x": tf.identity(features["x"])}, labels, mode, params)


def test_an_operation_that_fails_is_shown_with_its_line() -> None:
    """An operation that fails in the midst of training is a ModelError with the user's line, and the reason."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([1, 2, 3, 9])).repeat()

    with job(model_of(input_fn, checked), num_workers=1, max_steps=100) as running:
        wait_until(lambda: "worker/0" in running.ended)
    error = running.ended["worker/0"]
    assert isinstance(error, ModelError)
    line = checked.__code__.co_firstlineno + 2
    assert f"{__file__}, line {line}: InvalidArgumentError: " in str(error)
    assert "x is too large" in str(error)
    assert "tf.debugging.assert_less(" in str(error)


def test_an_input_that_fails_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A Python function in the input pipeline that raises ends the worker with 65: line, name and text."""
    caplog.set_level(logging.INFO, "tfps")

    def broken(x: Any) -> Any:
        if x > 2:
            raise KeyError("no such image")
        return x

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(np.float32([1, 2, 3]))
        data = data.map(lambda x: tf.ensure_shape(tf.numpy_function(broken, [x], tf.float32), []))
        return None if mode == "eval" else data.map(lambda x: ({"x": x}, 0.0))

    with job(model_of(input_fn, linear), num_workers=1, max_steps=100) as running:
        wait_until(lambda: "worker/0" in running.ended)
    error = running.ended["worker/0"]
    assert isinstance(error, DataError), error
    assert "KeyError: 'no such image'" in str(error)
    assert f"{__file__}, line {broken.__code__.co_firstlineno + 2}: the input failed" in str(error)
