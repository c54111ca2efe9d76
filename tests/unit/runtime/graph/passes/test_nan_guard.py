"""NaN and Inf are caught before they are applied, whichever worker they come from, on real servers."""

import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import assert_done, dataset_of, job, linear, model_of, run_job, variables_of, wait_until
from support.processes import summary

import tfps
from tfps.errors import DivergedError, StorageError
from tfps.runtime.graph.passes.nan_guard import NonFiniteValue, find_non_finite

pytestmark = pytest.mark.slow

GOOD = 24


def numbers(bad: float, worker: int, after: int = GOOD, of: int = 10_000) -> Any:
    """Return an ``input_fn`` of ones, but that one worker once gets a bad number."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        values = np.ones(of, np.float32)
        if context.input_pipeline_id == worker:
            values[after] = bad
        return None if mode == "eval" else dataset_of(values)

    return input_fn


def finite_loss(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` whose loss is finite always; x is in the gradients of a table's rows and of one weight."""

    @tf.custom_gradient
    def times_x(weight: Any) -> Any:
        return weight, lambda gradient: gradient * features["x"]

    weights = [tf.get_variable(f"w{i}", [], initializer=tf.zeros_initializer()) for i in range(2)]
    table = tf.get_variable("table", [4], initializer=tf.zeros_initializer())
    rows = tf.nn.embedding_lookup(table, [1, 3])
    loss = weights[0] + (times_x(tf.reduce_sum(rows)) if params["seed"] == 2 else times_x(weights[1]))
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=1.0))


def all_finite(variables: Any) -> bool:
    """Return whether every number is."""
    return all(np.isfinite(value).all() for value in variables.values())


@pytest.mark.parametrize(
    ("seed", "named", "mode", "wire"),
    [
        (1, "w1", "async", "packed"),
        (1, "w1", "sync", "plain"),
        (2, "table", "async", "plain"),
        (2, "table", "sync", "packed"),
    ],
)
def test_a_gradient_that_is_not_finite_is_never_applied(
    tmp_path: Path, mode: str, wire: str, seed: int, named: str
) -> None:
    """One of three workers' gradient is NaN, dense or sparse, its loss is not: 66, its name, all parameters finite."""
    model = model_of(numbers(np.nan, worker=1), finite_loss)
    flags = {"mode": mode, "wire": wire, "seed": seed, "save_checkpoint_secs": 1e-6, "model_dir": str(tmp_path)}
    with job(model, num_ps=2, num_workers=3, max_steps=10**6, **flags) as running:
        wait_until(lambda: "worker/1" in running.ended)
    error = running.ended["worker/1"]
    assert isinstance(error, DivergedError), error
    assert f"the gradient of {'w0, w1' if wire == 'packed' and named == 'w1' else named} holds NaN at step" in str(
        error
    )
    assert all_finite(variables_of(tmp_path))


def test_a_model_with_a_rate_of_its_own_is_not_advised_to_give_the_flag() -> None:
    """A model that does not read ``--learning_rate`` refuses it, so the loss's NaN names the model's optimizer."""

    def own_rate(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        fields = {**vars(linear(features, labels, mode, {"optimizer": None, "learning_rate": None}))}
        return tfps.ModelSpec(**{**fields, "optimizer": tf.train.GradientDescentOptimizer(0.01)})

    flags = {"max_steps": 100, "steps_per_run": 1, "runs_in_flight": 1}
    error = run_job(model_of(numbers(np.inf, worker=0, after=GOOD), own_rate), num_workers=1, **flags)["worker/0"]
    assert str(error) == f"the loss is inf at step {GOOD + 1}: try a smaller learning rate in the model's optimizer."


def test_before_anything_is_trained_the_learning_rate_is_not_to_blame() -> None:
    """Each of several workers takes a step of its own, but none of them is applied."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([np.nan])).repeat()

    ended = run_job(model_of(input_fn, linear), num_workers=3, max_steps=100)
    errors = [str(error) for task, error in ended.items() if isinstance(error, DivergedError) and task != "ps/0"]
    said = r"the loss is nan at step \d: nothing is trained yet, check the input and the model\."
    assert errors
    assert all(re.fullmatch(said, error) for error in errors), errors


@pytest.mark.parametrize("steps_per_run", [1, 8])
def test_the_steps_before_it_in_its_run_are_applied_and_counted(tmp_path: Path, steps_per_run: int) -> None:
    """A loss that is Inf in the middle of a run of several steps: those before it count, it and those after do not."""
    bad = GOOD + 3
    model = model_of(numbers(np.inf, worker=0, after=bad), linear)
    flags = {"max_steps": 100, "steps_per_run": steps_per_run, "runs_in_flight": 1, "model_dir": str(tmp_path)}
    error = run_job(model, num_workers=1, **flags)["worker/0"]
    assert isinstance(error, DivergedError)
    assert str(error) == f"the loss is inf at step {bad + 1}: try a smaller --learning_rate."
    reported = summary(tmp_path)
    assert (reported["global_step"], reported["tasks"]["worker/0"]["steps"]) == (bad, bad)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_skipped_batches_are_counted_and_change_nothing(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``--on_nan=skip`` a bad batch of each worker is passed over: all steps are taken, with good batches only."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        values = np.ones(200, np.float32)
        values[[5, 6, 50 + context.input_pipeline_id]] = np.nan
        return None if mode == "eval" else dataset_of(values)

    flags = {"mode": mode, "on_nan": "skip", "max_steps": 150, "model_dir": str(tmp_path)}
    caplog.set_level(logging.INFO, "tfps")
    assert_done(run_job(model_of(input_fn, linear), num_workers=2, **flags))
    assert variables_of(tmp_path) == {"weight": -150, "global_step": 150}
    reported = summary(tmp_path)
    assert reported["batches_skipped"] == 6 if mode == "sync" else reported["batches_skipped"] >= 3
    assert reported["batches_skipped"] == caplog.text.count("skipped a batch")
    assert sum(of["steps"] for of in reported["tasks"].values()) == (300 if mode == "sync" else 150)


def test_a_job_that_skips_everything_ends(tmp_path: Path) -> None:
    """Where every batch is bad, it is not the data: the job ends with 66 after a hundred of them."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([np.nan])).repeat()

    flags = {"on_nan": "skip", "max_steps": 10, "model_dir": str(tmp_path)}
    error = run_job(model_of(input_fn, linear), num_workers=1, **flags)["worker/0"]
    assert isinstance(error, DivergedError)
    assert "the loss is nan at step 1: --on_nan=skip has skipped 100 batches of this worker in a row" in str(error)


def test_the_error_is_reported_where_no_summary_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full when the job ends for another reason does not take its place."""
    monkeypatch.setattr(
        "tfps.runtime.training.summary_writer.write", mock.Mock(side_effect=StorageError("--model_dir: full"))
    )
    model = model_of(numbers(np.nan, worker=0), linear)
    error = run_job(model, num_workers=1, max_steps=100, model_dir=str(tmp_path))["worker/0"]
    assert isinstance(error, DivergedError), error


def test_large_numbers_are_finite(tmp_path: Path) -> None:
    """A gradient of 1e30, whose square is not a float32, is applied."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([1e30])).repeat()

    assert_done(run_job(model_of(input_fn, linear), num_workers=1, max_steps=1, model_dir=str(tmp_path)))
    assert variables_of(tmp_path) == {"weight": np.float32(-1e30), "global_step": 1}


def test_an_error_is_read_whatever_it_is_reported_with() -> None:
    """The step that failed is found also where what was cancelled for it comes first; other errors are left alone."""
    mine = "tfps: the gradient of a, b : Tensor had Inf and NaN values\n\t [[{{node tfps/step_3/tfps/finite/Check_1}}]]"
    first = "Iterator was cancelled\n\t [[{{node tfps/step_11/IteratorGetNext}}]]\n"
    for kind in (tf.errors.InvalidArgumentError, tf.errors.CancelledError):
        assert find_non_finite(kind(None, None, first + mine)) == NonFiniteValue(
            "the gradient of a, b holds Inf and NaN", 3
        )
    other = "mine : Tensor had NaN values\n\t [[{{node tfps/step_3/mine}}]]"
    assert find_non_finite(tf.errors.InvalidArgumentError(None, None, other)) is None


class ComplexDescent(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Gradient descent that takes complex variables, too."""

    def _valid_dtypes(self) -> set[Any]:
        return {tf.float32, tf.complex64}


def complex_only(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` all of whose variables are complex; x is in the gradient, and with a seed of 2 in the loss."""
    weight = tf.get_variable("weight", [3], tf.complex64, initializer=tf.zeros_initializer())

    @tf.custom_gradient
    def times_x(weight: Any) -> Any:
        return weight, lambda gradient: gradient * features["x"]

    real = tf.reduce_sum(tf.real(weight))
    loss = real * features["x"] if params["seed"] == 2 else times_x(real)
    return tfps.ModelSpec(loss=loss, optimizer=ComplexDescent(1.0))


@pytest.mark.parametrize(
    ("wire", "seed", "named"), [("packed", 1, "the gradient of weight holds NaN"), ("plain", 2, "the loss is nan")]
)
def test_complex_variables_get_no_nan(tmp_path: Path, wire: str, seed: int, named: str) -> None:
    """A NaN in the loss or a gradient of a model whose variables are all complex ends the job before it is applied."""
    flags = {"wire": wire, "seed": seed, "save_checkpoint_secs": 1e-6, "model_dir": str(tmp_path)}
    errors = run_job(model_of(numbers(np.nan, worker=0), complex_only), 1, 1, 30, max_steps=10**4, **flags)
    assert isinstance(errors["worker/0"], DivergedError), errors
    assert named in str(errors["worker/0"])
    assert all_finite(variables_of(tmp_path))
