"""Claims about ``--staleness_lr``: the rate of an update whose staleness is known, on real servers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import linear, model_of, ones, shared_servers, train, variables_of
from support.held_steps import ByHand, Held, IfSmall, Reference, assert_equal, gradients_of

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.optimizers.adagrad import ExactAdagradOptimizer
from tfps.optimizers.lazy_adam import LazyAdamOptimizer
from tfps.runtime.graph import builder
from tfps.runtime.graph.passes.unrolling import UnrolledStep

pytestmark = pytest.mark.slow

RATE = 0.25
OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "sgd": tf.train.GradientDescentOptimizer,
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.5),
    "nesterov": lambda rate: tf.train.MomentumOptimizer(rate, 0.5, use_nesterov=True),
    "adagrad": ExactAdagradOptimizer,
    "tf_adagrad": tf.train.AdagradOptimizer,
    "adam": LazyAdamOptimizer,
    "tf_adam": tf.train.AdamOptimizer,
    "rmsprop": tf.train.RMSPropOptimizer,
    "centered": lambda rate: tf.train.RMSPropOptimizer(rate, momentum=0.5, centered=True),
    "adadelta": tf.train.AdadeltaOptimizer,
}


@pytest.mark.parametrize(
    ("name", "num_ps", "wire"),
    [
        *((name, 1, "packed") for name in OPTIMIZERS),
        *((name, num_ps, wire) for name in ("sgd", "adam") for num_ps, wire in [(2, "packed"), (1, "plain")]),
        ("sgd", 2, "plain"),
        ("momentum", 1, "bfloat16"),
    ],
)
def test_the_rate_of_an_update_is_divided_by_its_staleness(name: str, num_ps: int, wire: str) -> None:
    """A worker is held while the other makes 0, 1 and 3 updates; slots are those of an optimizer with these rates."""
    make = OPTIMIZERS[name]
    with shared_servers():
        reference, held = Reference(make), Held(lambda: make(RATE))
        by_hand = ByHand(held, num_ps, staleness_lr=True, wire=wire)
        for missed in (0, 1, 3, 0):
            begun = by_hand.begin(1)
            by_hand.step(0, missed)
            begun.end()
            for _ in range(missed):
                reference.apply(gradients_of(0), RATE)
            reference.apply(gradients_of(1), np.float32(RATE) / np.float32(max(1, missed)))
            assert_equal(by_hand.values(), reference.values(), rows_differ="adam" in name)


def test_an_update_in_a_branch_is_divided_too() -> None:
    """The whole update then is one critical section, and has the rate that its staleness asks for."""
    with shared_servers():
        by_hand = ByHand(Held(lambda: IfSmall(1.0)), 2, staleness_lr=True)
        begun = by_hand.begin(1)
        by_hand.step(0, 4)
        begun.end()
        by_hand.step(1)
        np.testing.assert_array_equal(by_hand.values()["first"], [1 - 4 - 2 / 4 - 2] * 2)


def test_a_workers_own_update_counts_if_another_of_its_runs_is_in_flight() -> None:
    """A run that is held while others of the worker take two steps is stale by these."""
    with shared_servers():
        by_hand = ByHand(Held(lambda: tf.train.GradientDescentOptimizer(1.0)), 1, staleness_lr=True)
        run = by_hand.begin(0)
        by_hand.step(0, 2)
        run.end()
        np.testing.assert_array_equal(by_hand.values()["first"], [1 - 1 - 1 - 1 / 2] * 2)


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_each_step_of_a_run_reads_the_count_afresh(wire: str) -> None:
    """Of three steps in one run only the second is held while the other worker updates: only it is stale."""
    with shared_servers():
        by_hand = ByHand(Held(lambda: tf.train.GradientDescentOptimizer(1.0)), 1, staleness_lr=True, wire=wire)
        built = by_hand.built[1]
        with built.graph.as_default():
            steps = UnrolledStep(built.graph, built.fetches)
            run = by_hand.begin(1, [steps.copy(index)(built.step.train_op) for index in range(3)])
        run.go_on()
        assert run.wait()[0][0] == 1 - 2
        second = run.event
        by_hand.step(0, 4)
        second.set()
        assert run.wait()[0][0] == 1 - 2 - 4 - 2 / 4
        run.end()
        np.testing.assert_array_equal(by_hand.values()["first"], [1 - 2 - 4 - 2 / 4 - 2] * 2)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda: tf.train.FtrlOptimizer(1.0), "by FtrlOptimizer is not known to be proportional"),
        (lambda: tf.train.ProximalGradientDescentOptimizer(1.0), "by ProximalGradientDescentOptimizer is not known"),
        (
            lambda: type("Mine", (tf.train.GradientDescentOptimizer,), {})(1.0),
            "by Mine is not known to be proportional",
        ),
        (lambda: _Stating(lambda g, v: [v.assign(v - g)]), "changes weight with AssignVariableOp"),
        (lambda: _Stating(lambda g, v: [v.assign_sub(g), v.assign_sub(0.1 * v)]), "changes weight several times"),
    ],
)
def test_an_optimizer_that_may_not_be_proportional_to_its_rate_is_refused(optimizer: Any, why: str) -> None:
    """By its class, or by what it does to a variable."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=optimizer())

    with pytest.raises(ModelError, match=f"--staleness_lr .*{why}"):
        builder.training(
            JobConfig(staleness_lr=True), Cluster(("p:1",), ("w:1",)), Task("worker", 0), model_of(ones, model_fn)
        )


class _Stating(tf.train.Optimizer):  # type: ignore[misc]
    """States that it is proportional to its rate."""

    proportional_to_rate = True

    def __init__(self, changes: Any) -> None:
        super().__init__(False, "stating")
        self._changes = changes

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        return tf.group(*(change for pair in grads_and_vars for change in self._changes(*pair)))


def test_a_class_may_state_that_it_is_proportional_to_its_rate() -> None:
    """Then the change that it adds is divided."""
    config, cluster = JobConfig(staleness_lr=True), Cluster(("p:1",), ("w:1",))
    for optimizer in (_Stating(lambda g, v: [v.assign_sub(g)]), IfSmall(1.0)):
        spec = lambda *args, one=optimizer: tfps.ModelSpec(loss=linear(*args).loss, optimizer=one)  # noqa: E731
        graph = builder.training(config, cluster, Task("worker", 0), model_of(ones, spec)).graph
        kinds = ("AssignSubVariableOp", "ResourceApplyGradientDescent")
        changes = [op for op in graph.get_operations() if op.type in kinds]
        assert any(tensor.op.type == "RealDiv" for op in changes for tensor in op.inputs)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_all_variables_of_a_ps_get_the_same_rate(tmp_path: Path, num_ps: int) -> None:
    """Small, large and sparse ones, with three workers and several steps and runs in flight, both flags given."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        zeros = tf.zeros_initializer()
        weights = [tf.get_variable(f"w{size}", [size], initializer=zeros) for size in (2, 3, 1 << 18)]
        table = tf.get_variable("table", [4, 2], initializer=zeros)
        rows = tf.nn.embedding_lookup(table, tf.constant([1, 3]))
        loss = -tf.add_n([tf.reduce_sum(one) for one in (*weights, rows)])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    flags: dict[str, Any] = {"steps_per_run": 4, "runs_in_flight": 2, "save_checkpoint_secs": 0.1}
    job = {"staleness_lr": True, "delay_compensation": 1e-30, "max_steps": 300, "model_dir": str(tmp_path)}
    train(model_of(ones, model_fn), num_ps, 3, **flags, **job)
    found = variables_of(tmp_path)
    values = {float(value) for name, value in found.items() if name.startswith("w") for value in np.ravel(value)}
    values |= {float(value) for value in np.ravel(found["table"][[1, 3]])}
    assert found["global_step"] == 300
    assert len(values) <= num_ps
    assert all(50 < value < 300 for value in values)
