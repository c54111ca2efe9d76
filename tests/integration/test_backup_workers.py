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


def test_a_change_that_the_optimizer_uses_is_refused(tmp_path: Path) -> None:
    """An update without the chief's gradient would lack it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign_add(-0.01))
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=tf.train.GradientDescentOptimizer(rate))

    with job(model_of(powers(), model_fn), 1, 2, mode="sync", backup_workers=1, model_dir=str(tmp_path)) as running:
        wait_until(lambda: "worker/0" in running.ended)
        error = running.ended["worker/0"]
    assert isinstance(error, ModelError)
    assert "--backup_workers=1" in str(error)
