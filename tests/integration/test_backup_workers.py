"""``--backup_workers``: which gradients an update has, shown by the weights, on real servers.

Worker i pushes the gradient 2^i at every step, so a weight shows how many gradients of each worker have been applied.
"""

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import assert_done, job, linear, model_of, run_job, variables_of, wait_until
from support.processes import summary

import tfps
from tfps.errors import ModelError

pytestmark = pytest.mark.slow

STEPS = 40


def powers(wait: Callable[[int, int], None] = lambda _worker, _step: None, sizes: Any = None) -> Any:
    """Return an ``input_fn`` of the feature 2^i, without end, or of ``sizes[i]`` batches; ``wait`` may hold a batch."""

    def held(worker: int, step: Any) -> Any:
        wait(worker, int(step))
        return np.float32(2.0**worker)

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        worker = context.input_pipeline_id
        feature = lambda step: tf.numpy_function(lambda n: held(worker, n), [step], tf.float32)  # noqa: E731
        steps = tf.data.Dataset.range(sizes[worker] if sizes else 2**40)
        return steps.map(lambda step: ({"x": tf.ensure_shape(feature(step), [])}, 0.0))

    return input_fn


def applied(weight: float, contributed: list[int], needed: int) -> bool:
    """Return whether a weight is the sum of so many gradients of each worker, each divided by ``needed``."""
    return bool(np.isclose(weight, -sum(2.0**i * count for i, count in enumerate(contributed)) / needed))


def contributions(model_dir: Path) -> list[int]:
    """Return how many gradients of each worker are in an update, as the report tells."""
    tasks = summary(model_dir)["tasks"]
    return [tasks[f"worker/{index}"]["steps"] for index in range(3)]


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_no_update_waits_for_a_slow_worker(slow: int, num_ps: int, tmp_path: Path) -> None:
    """While one worker is held, also the chief, the others make updates of their gradients alone, to the bit.

    They come so far that only their own steps can have brought them there. Later it goes on, and its late gradient is
    dropped and counted.
    """
    goes_on = threading.Event()
    seen: list[int] = []

    def wait(worker: int, step: int) -> None:
        if worker == slow and step >= 2:
            goes_on.wait(100)
        elif worker != slow:
            seen.append(step)

    flags = {"mode": "sync", "backup_workers": 1, "max_steps": STEPS, "model_dir": str(tmp_path)}
    with job(model_of(powers(wait), linear), num_ps, 3, **flags) as running:
        wait_until(lambda: len(seen) > STEPS)  # of both others together
        goes_on.set()
        assert_done(running.wait())
    contributed, saved = contributions(tmp_path), variables_of(tmp_path)
    assert saved["global_step"] == STEPS
    assert sum(contributed) == 2 * STEPS
    assert applied(saved["weight"], contributed, needed=2)
    reported = summary(tmp_path)
    assert reported["tasks"][f"worker/{slow}"]["gradients_dropped"] >= 1
    assert reported["gradients_dropped"] == sum(
        reported["tasks"][f"worker/{index}"]["gradients_dropped"] for index in range(3)
    )
    assert contributed[slow] < min(contributed[:slow] + contributed[slow + 1 :])


def test_each_update_has_exactly_the_first_gradients(tmp_path: Path) -> None:
    """Where all are equally fast, each update has two of three gradients. A run takes one step."""
    flags = {"mode": "sync", "backup_workers": 1, "max_steps": 200, "steps_per_run": 8, "model_dir": str(tmp_path)}
    assert_done(run_job(model_of(powers(), linear), 1, 3, **flags))
    assert summary(tmp_path)["pace"]["steps_per_run"] == 1
    contributed = contributions(tmp_path)
    assert sum(contributed) == 400
    assert applied(variables_of(tmp_path)["weight"], contributed, needed=2)


def test_training_goes_on_until_too_few_have_input(tmp_path: Path) -> None:
    """With one backup worker, the end of one input ends nothing; that of a second ends the job."""
    ended = run_job(
        model_of(powers(sizes=[20, 60, 100]), linear),
        1,
        3,
        mode="sync",
        backup_workers=1,
        max_steps=1000,
        model_dir=str(tmp_path),
    )
    assert_done(ended)
    saved, contributed = variables_of(tmp_path), contributions(tmp_path)
    assert 40 <= saved["global_step"] <= 80  # the second one skips as many steps as the first takes
    assert sum(contributed) == 2 * saved["global_step"]
    assert applied(saved["weight"], contributed, needed=2)


def test_a_checkpoint_is_of_one_step(tmp_path: Path) -> None:
    """Also while the chief is late: the others make updates, and none of them while it saves."""
    found: list[tuple[int, float, int]] = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = linear(features, labels, mode, params)
        other = tf.get_variable("other", [], initializer=tf.zeros_initializer())
        return dataclasses.replace(spec, loss=spec.loss + other)

    flags = {"mode": "sync", "backup_workers": 1, "max_steps": 1500, "save_checkpoint_secs": 0.05}
    flags |= {"model_dir": str(tmp_path), "wire": "plain"}
    with job(model_of(powers(), model_fn), 2, 3, **flags) as running:
        while not running.ended:
            for path in tmp_path.glob("model.ckpt-*.index"):
                step = int(re.sub(r"\D", "", path.stem))
                try:
                    reader = tf.train.load_checkpoint(str(path)[: -len(".index")])
                    found.append((step, reader.get_tensor("other"), reader.get_tensor("global_step")))
                except tf.errors.OpError:  # deleted meanwhile
                    continue
        assert_done(running.wait())
    assert len({step for step, _, _ in found}) > 3
    assert all(step == in_it and other == -float(step) for step, other, in_it in found), found


def in_update_ops(rate: Any, loss: Any) -> tuple[Any, Any]:
    """Change a rate beside the loss."""
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign(rate * 0.5))
    return loss, rate


def computed_before(rate: Any, loss: Any) -> tuple[Any, Any]:
    """Change a rate beside the loss; the optimizer gets the product that the model computes."""
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign(rate * 0.5))
    return loss, rate * 1.0


def before_loss(rate: Any, loss: Any) -> tuple[Any, Any]:
    """Change a rate before the loss."""
    with tf.control_dependencies([rate.assign(rate * 0.5)]):
        return tf.identity(loss), rate


def in_function(rate: Any, loss: Any) -> tuple[Any, Any]:
    """Change a rate in a function that returns the loss."""

    @tf.function
    def halved(x: Any) -> Any:
        rate.assign(rate * 0.5)
        return tf.identity(x)

    return halved(loss), rate


def in_branch(rate: Any, loss: Any) -> tuple[Any, Any]:
    """Change a rate in a branch that the loss needs."""
    with tf.control_dependencies([tf.cond(loss < 1e9, lambda: rate.assign(rate * 0.5), rate.read_value)]):
        return tf.identity(loss), rate


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("change", [in_update_ops, computed_before, before_loss, in_function, in_branch])
def test_a_change_that_the_optimizer_uses_is_refused(change: Any, is_local: bool, tmp_path: Path) -> None:
    """An update that comes before the chief's step would lack it, wherever the model makes it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        collections = [tf.GraphKeys.LOCAL_VARIABLES] if is_local else None
        ones = tf.ones_initializer()
        rate = tf.get_variable("rate", [], initializer=ones, trainable=False, collections=collections)
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss, rate = change(rate, weight * features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))

    assert "--backup_workers=1" in str(refused(model_fn, tmp_path))


def test_a_clipped_weight_is_refused(tmp_path: Path) -> None:
    """A late worker that clips a weight before it reads it could undo an update."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        with tf.control_dependencies([weight.assign(tf.clip_by_value(weight, -1.0, 1.0))]):
            loss = weight.read_value() * features["x"]
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    assert "--backup_workers=1" in str(refused(model_fn, tmp_path))


def refused(model_fn: Any, model_dir: Path) -> ModelError:
    """Return the error with which the chief refuses a model."""
    model = model_of(powers(), model_fn)
    with job(model, 1, 2, mode="sync", backup_workers=1, max_steps=20, model_dir=str(model_dir)) as running:
        wait_until(lambda: "worker/0" in running.ended)
        error = running.ended["worker/0"]
    assert isinstance(error, ModelError), error
    return error


def test_what_only_reads_a_weight_is_not_refused(tmp_path: Path) -> None:
    """A metric of a weight counts each step of the chief once, and the optimizer does not see it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = linear(features, labels, mode, params)
        weight = next(one for one in tf.trainable_variables() if one.op.name == "weight")
        return dataclasses.replace(spec, log_tensors={"mean": tf.metrics.mean(tf.norm(weight))[1]})

    flags = {"mode": "sync", "backup_workers": 1, "max_steps": STEPS, "model_dir": str(tmp_path)}
    assert_done(run_job(model_of(powers(), model_fn), 1, 2, **flags))
    contributed = [summary(tmp_path)["tasks"][f"worker/{index}"]["steps"] for index in range(2)]
    assert sum(contributed) == STEPS
    assert applied(variables_of(tmp_path)["weight"], contributed, needed=1)


def test_a_skipped_batch_is_of_the_step_that_the_job_has_come_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that has no finite batch reports the steps that the others take, and ends with the job."""
    seen: list[int] = []

    def wait(worker: int, step: int) -> None:
        if worker == 2 and step > 1:
            come_to = len(seen) + 6  # the others take three steps meanwhile, or the job ends
            wait_until(lambda: len(seen) >= min(come_to, 2 * STEPS))
        elif worker != 2:
            seen.append(step)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = linear(features, labels, mode, params)
        return dataclasses.replace(spec, loss=tf.where(features["x"] > 3.0, np.nan, 1.0) * spec.loss)

    flags = {"mode": "sync", "backup_workers": 1, "max_steps": STEPS, "on_nan": "skip", "model_dir": str(tmp_path)}
    caplog.set_level("INFO")
    assert_done(run_job(model_of(powers(wait), model_fn), 1, 3, **flags))
    steps = [int(step) for step in re.findall(r"skipped a batch: .* at step (\d+)", caplog.text)]
    assert len(set(steps)) > 2, steps
    assert steps == sorted(steps)
    assert contributions(tmp_path) == [STEPS, STEPS, 0]
