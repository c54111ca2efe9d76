"""Claims about ``--delay_compensation``: gradients whose staleness is known, on real servers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, ones, shared_servers, train, variables_of
from support.held_steps import IDS, ByHand, Held, IfSmall, Reference, assert_equal, gradients_of

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.optimizers.lazy_adam import LazyAdamOptimizer
from tfps.runtime.graph import builder
from tfps.runtime.graph.passes.unrolling import UnrolledStep

pytestmark = pytest.mark.slow

RATE = 0.25
STRENGTH = 0.375
OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "sgd": tf.train.GradientDescentOptimizer,
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.5),
    "adam": LazyAdamOptimizer,
    "tf_adam": tf.train.AdamOptimizer,
    "ftrl": tf.train.FtrlOptimizer,
    "branch": IfSmall,
}


def corrected(worker: int, read: Sequence[Any], now: Mapping[str, Any]) -> list[Any]:
    """Return the gradients of a worker that has read some values, corrected by hand."""
    first, second, rows = gradients_of(worker)
    strength, made = np.float32(STRENGTH), []
    for gradient, then, name in ((first, read[0], "first"), (second, read[1], "second")):
        made.append(gradient + strength * gradient * (gradient * (now[name] - then)))
    for place in (0, 1):  # row 0 is looked up twice: its gradient is the sum, and its first row has the correction
        total = rows[place] * IDS.count(IDS[place])
        correction = strength * total * (total * (now["table"][IDS[place]] - read[2][place]))
        rows[place] = rows[place] + correction
    return [*made, rows]


@pytest.mark.parametrize(
    ("name", "num_ps", "wire", "staleness_lr"),
    [
        *((name, 1, "packed", False) for name in OPTIMIZERS),
        *(("sgd", num_ps, wire, False) for num_ps, wire in [(2, "packed"), (1, "plain"), (2, "plain")]),
        ("momentum", 1, "plain", False),
        ("branch", 2, "packed", True),
        ("sgd", 2, "packed", True),
        ("momentum", 1, "packed", True),
    ],
)
def test_a_stale_gradient_is_corrected(name: str, num_ps: int, wire: str, staleness_lr: bool) -> None:
    """A worker is held while the other makes 0, 1 and 3 updates; ``w_read`` is what its forward pass has read."""
    make = OPTIMIZERS[name]
    flags = {"staleness_lr": True} if staleness_lr else {}
    with shared_servers():
        reference = Reference(make)
        by_hand = ByHand(Held(lambda: make(RATE)), num_ps, delay_compensation=STRENGTH, wire=wire, **flags)
        for missed in (0, 1, 3, 0):
            begun = by_hand.begin(1)
            by_hand.step(0, missed)
            for _ in range(missed):
                reference.apply(gradients_of(0), RATE)
            now = by_hand.values()
            assert_equal(now, reference.values(), rows_differ=staleness_lr)
            rate = np.float32(RATE) / np.float32(max(1, missed)) if staleness_lr else RATE
            reference.apply(corrected(1, begun.read, now), rate)
            begun.end()
            assert_equal(by_hand.values(), reference.values(), rows_differ=staleness_lr)
            assert not missed or np.any(now["first"] != begun.read[0])


def test_bfloat16_rounds_what_is_sent_and_not_what_is_kept() -> None:
    """Parameters that bfloat16 rounds have not changed: the gradient is that of plain async to the bit."""
    found = []
    for flags in ({}, {"delay_compensation": 100.0}):
        with shared_servers():
            by_hand = ByHand(Held(lambda: tf.train.GradientDescentOptimizer(0.1)), 1, wire="bfloat16", **flags)
            by_hand.step(1)
            begun = by_hand.begin(1)
            begun.end()
            assert begun.read[0][0] != np.float32(1) - np.float32(0.1) * np.float32(2), "rounded"
            found.append(by_hand.values())
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_each_step_of_a_run_keeps_what_it_has_read_itself(wire: str) -> None:
    """Of three steps in one run only the second is held while the other worker updates: only it is corrected."""
    make = OPTIMIZERS["sgd"]
    with shared_servers():
        reference = Reference(make)
        by_hand = ByHand(Held(lambda: make(RATE)), 2, delay_compensation=STRENGTH, wire=wire)
        built = by_hand.built[1]
        with built.graph.as_default():
            steps = UnrolledStep(built.graph, built.fetches)
            run = by_hand.begin(1, [steps.copy(index)(built.step.train_op) for index in range(3)])
        run.go_on()
        reference.apply(gradients_of(1), RATE)
        read, second = run.wait(), run.event
        by_hand.step(0, 2)
        for _ in range(2):
            reference.apply(gradients_of(0), RATE)
        reference.apply(corrected(1, read, reference.values()), RATE)
        second.set()
        run.wait()
        run.end()
        reference.apply(gradients_of(1), RATE)
        assert_equal(by_hand.values(), reference.values())


def test_each_run_in_flight_keeps_what_it_has_read_itself() -> None:
    """Two runs of one worker have read different values; the later one is applied first."""
    make = OPTIMIZERS["sgd"]
    with shared_servers():
        reference = Reference(make)
        by_hand = ByHand(Held(lambda: make(RATE)), 1, delay_compensation=STRENGTH)
        runs = [by_hand.begin(1)]
        by_hand.step(0)
        reference.apply(gradients_of(0), RATE)
        runs.append(by_hand.begin(1))
        for run in reversed(runs):
            reference.apply(corrected(1, run.read, reference.values()), RATE)
            run.end()
        assert_equal(by_hand.values(), reference.values())


def test_a_correction_that_overflows_is_left_out() -> None:
    """NaN and Inf are never applied: the element is that of plain async."""
    with shared_servers():
        held = Held(lambda: tf.train.GradientDescentOptimizer(1.0))
        by_hand = ByHand(held, 1, delay_compensation=3e38)
        begun = by_hand.begin(1)
        by_hand.step(0, 2)
        begun.end()
        np.testing.assert_array_equal(by_hand.values()["first"], [1 - 2 - 2] * 2)
        np.testing.assert_array_equal(by_hand.values()["table"][:, 0], [1 - 4 - 4, 1, 1 - 2 - 2, 1])


def test_without_staleness_a_job_is_that_of_plain_async(tmp_path: Path) -> None:
    """One worker, four steps a run, rows several times in a batch: the same bits."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        ids = np.random.default_rng(1).integers(0, 6, [40, 5])
        return None if mode == "eval" else dataset_of(ids)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        table = tf.get_variable("table", [6, 3], initializer=tf.random_normal_initializer(seed=1))
        tower = tf.get_variable("tower", [6, 3], initializer=tf.random_normal_initializer(seed=2))
        weight = tf.get_variable("weight", [3, 2], initializer=tf.random_normal_initializer(seed=3))
        ids = features["x"]
        rows = tf.nn.embedding_lookup(table, ids) + tf.nn.embedding_lookup(table, ids[::-1] // 2)
        rows += tf.gather(tower.read_value(), ids)
        bias = tf.get_variable("bias", [2], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(
            loss=tf.reduce_mean(tf.square(tf.matmul(rows, weight) + bias - 1)),
            optimizer=tfps.make_optimizer(params, "sgd", learning_rate=0.05),
        )

    for optimizer in ("sgd", "adam"):
        found = []
        for number, flags in enumerate(({}, {"delay_compensation": 2.0, "staleness_lr": True})):
            directory = tmp_path / f"{optimizer}-{number}"
            job = {"max_steps": 30, "steps_per_run": 4, "runs_in_flight": 1, "optimizer": optimizer}
            train(model_of(input_fn, model_fn), 2, 1, secs=60, model_dir=str(directory), **job, **flags)
            found.append(variables_of(directory))
        assert set(found[0]) == set(found[1])
        assert_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda w: tf.cond(tf.reduce_sum(w) > 0, w.read_value, w.read_value), "comes from .*Switch"),
        (lambda w: tf.function(lambda: 2.0 * w.read_value())(), "comes from"),
        (lambda w: w.read_value() + _later(w), "reads weight several times"),
    ],
)
def test_a_gradient_of_no_single_value_is_refused(read: Callable[[Any], Any], why: str) -> None:
    """It is not certain at which values such a gradient was computed."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [2], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(
            loss=tf.reduce_sum(read(weight) * features["x"]), optimizer=tf.train.GradientDescentOptimizer(1.0)
        )

    with pytest.raises(ModelError, match=f"--delay_compensation: .*{why}"):
        builder.training(
            JobConfig(delay_compensation=1.0), Cluster(("p:1",), ("w:1",)), Task("worker", 0), model_of(ones, model_fn)
        )


def _later(weight: Any) -> Any:
    with tf.control_dependencies([tf.print("later")]):
        return weight.read_value()
