"""``--local_epochs`` on real servers: rounds over shares of different sizes, against NumPy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import LINEAR, cluster_of, model_of, train, variables_of
from support.processes import summary

import tfps
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.data.examples import Examples
from tfps.data.order import Order
from tfps.errors import ModelError
from tfps.modes.registry import problems_of
from tfps.runtime.graph import builder

pytestmark = pytest.mark.slow

SIZE, BATCH, WORKERS, SEED = 25, 4, 3, 3
VALUES = np.random.default_rng(8).integers(-64, 64, [SIZE]).astype(np.float32) / 16
CLASSES = np.arange(SIZE) % 5


def _read(indices: Any) -> Any:
    values = tf.gather(tf.constant(VALUES), indices)
    return {"x": values}, values


EXAMPLES = Examples(SIZE, _read, CLASSES)


def _input(mode: str, params: Any, context: Any) -> Any:
    return None if mode == "eval" else EXAMPLES


def _model(features: Any, labels: Any, mode: str, params: Any) -> Any:
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = 0.5 * tf.reduce_mean((weight - features["x"]) ** 2)
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.25))


MODEL = model_of(_input, _model)
FLAGS = {"mode": "local", "batch_size": BATCH, "seed": SEED}


class Hand:
    """FedAvg by hand."""

    def __init__(self, epochs: int, partition: str = "even", size: int = WORKERS) -> None:
        self._order = Order(EXAMPLES, SEED, WORKERS, partition)
        self.steps = [-(-epochs * len(share) // BATCH) for share in self._order.shares]
        self._size, self.weight, self.began, self.taken = size, 0.0, 0, [0] * WORKERS
        self.rounds = 0
        self.restart()

    def restart(self) -> None:
        """Read the data from the beginning."""
        never = np.zeros(SIZE, np.int64)
        self._data = [
            np.concatenate([VALUES[self._order.rest(worker, never, epoch)] for epoch in range(50)])
            for worker in range(WORKERS)
        ]

    def round(self, max_steps: int) -> None:
        """Train for a round."""
        self.rounds += 1
        drawn = self._drawn()
        steps = [min(self.steps[one], max_steps - self.began) if one in drawn else 0 for one in range(WORKERS)]
        changes = [self._change(worker, count) for worker, count in enumerate(steps)]
        self.weight += float(np.dot(steps, changes)) / sum(steps)  # batches are of one size
        self.began += max(steps)
        self.taken = [before + count for before, count in zip(self.taken, steps, strict=True)]

    def _change(self, worker: int, steps: int) -> float:
        weight = self.weight
        for _ in range(steps):
            weight -= 0.25 * (weight - float(self._data[worker][:BATCH].mean()))
            self._data[worker] = self._data[worker][BATCH:]
        return weight - self.weight

    def _drawn(self) -> Sequence[int]:
        with tf.Graph().as_default(), tf.Session() as session:
            numbers = tf.random.stateless_uniform([WORKERS], [SEED, self.began])
            drawn: Sequence[int] = session.run(tf.math.top_k(numbers, self._size).indices).tolist()
            return drawn


@pytest.mark.parametrize(
    ("epochs", "partition", "fraction", "size"), [(1, "even", None, 3), (2, "label", None, 3), (1, "even", 0.5, 2)]
)
def test_the_rounds_are_those_by_hand(
    epochs: int, partition: str, fraction: float | None, size: int, tmp_path: Path
) -> None:
    """Of workers with shares of different sizes, with a shorter last round, and of a sample of them."""
    hand, flags = Hand(epochs, partition, size), {"local_epochs": epochs, "partition": partition}
    assert len(set(hand.steps)) > 1
    most = 4 * max(hand.steps) + 1
    while hand.began < most:
        hand.round(most)
    train(MODEL, 2, WORKERS, model_dir=str(tmp_path), max_steps=most, worker_fraction=fraction, **FLAGS, **flags)
    saved = variables_of(tmp_path)
    assert saved["global_step"] == hand.began == most
    np.testing.assert_allclose(saved["weight"], hand.weight, rtol=1e-5)
    steps = [summary(tmp_path)["tasks"][f"worker/{worker}"]["steps"] for worker in range(WORKERS)]
    assert steps == hand.taken
    rounds = {"made": hand.rounds, "fewest_steps": min(hand.steps), "most_steps": max(hand.steps)}
    assert summary(tmp_path)["rounds"] == rounds


def test_a_resumed_job_goes_on_with_a_round(tmp_path: Path) -> None:
    """From the variables; the data begin again, as without ``--data_policy``."""
    hand = Hand(1)
    ends = (2 * max(hand.steps), 4 * max(hand.steps))
    for end in ends:
        hand.restart()
        while hand.began < end:
            hand.round(end)
        train(MODEL, 1, WORKERS, model_dir=str(tmp_path), max_steps=end, local_epochs=1, **FLAGS)
        np.testing.assert_allclose(variables_of(tmp_path)["weight"], hand.weight, rtol=1e-5)
    assert variables_of(tmp_path)["global_step"] == ends[-1]


def test_a_dataset_has_no_shares() -> None:
    """The message names the flag and the fix."""
    config = JobConfig(mode="local", local_epochs=2)
    with pytest.raises(ModelError, match=r"--local_epochs=2: tfps cannot divide .* return tfps.Examples"):
        builder.training(config, cluster_of(1, 2), Task("worker", 0), LINEAR)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"sync_every": 5}, "--local_epochs=2 is not for --sync_every=5"),
        ({"async_rounds": True}, "--local_epochs=2 is not for --async_rounds=1"),
        ({"data_policy": "shard"}, "--data_policy=shard is not for --local_epochs=2"),
        ({"mode": "sync"}, "--local_epochs=2 is for --mode=local"),
    ],
)
def test_what_the_flag_cannot_be_with(flags: dict[str, Any], named: str) -> None:
    """Each is told with both flags."""
    [problem] = problems_of(JobConfig(**{"mode": "local", "local_epochs": 2, **flags}), 4)
    assert problem.startswith(named)
