"""How ``sync`` combines the gradients of an update: computed by hand from each worker's gradients, on real servers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import by_worker, model_of, train, variables_of
from support.service import together

import tfps

pytestmark = pytest.mark.slow

STEPS, WORKERS, ROWS = 12, 3, 5
DENSE = np.random.default_rng(3).integers(-80, 80, [WORKERS, STEPS, 4]).astype(np.float32) / 8
PICKS = np.random.default_rng(4).integers(0, ROWS, [WORKERS, STEPS, 2])
input_fn = by_worker(x=DENSE, rows=PICKS)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """Be a model with two dense variables, whose gradient is ``x``, and a table, whose rows get a part of ``x``."""
    zeros = tf.zeros_initializer()
    first, second = (tf.get_variable(name, [4], initializer=zeros) for name in ("first", "second"))
    table = tf.get_variable("table", [ROWS, 2], initializer=zeros)
    looked_up = tf.nn.embedding_lookup(table, features["rows"])
    parts = [first * features["x"], second * features["x"], looked_up * features["x"][:2]]
    loss = tf.add_n([tf.reduce_sum(part) for part in parts])
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=1.0))


def of_table(worker: int, step: int) -> Any:
    """Return the gradient of the table, with its rows that are not looked up."""
    gradient = np.zeros([ROWS, 2], np.float32)
    np.add.at(gradient, PICKS[worker, step], DENSE[worker, step, :2])
    return gradient


def trimmed(stack: Any) -> Any:
    """Return the mean of three without the smallest and the largest."""
    return np.sort(stack, axis=0)[1]


COMBINE: dict[str, Callable[[Any], Any]] = {
    "mean": lambda stack: stack.sum(axis=0) / np.float32(len(stack)),
    "sum": lambda stack: stack.sum(axis=0),
    "median": lambda stack: np.median(stack, axis=0),
    "trimmed_mean": trimmed,
}


@pytest.mark.parametrize("aggregate", COMBINE)
@pytest.mark.parametrize(("num_ps", "wire"), [(1, "packed"), (2, "plain")])
def test_an_update_is_what_the_flag_says(aggregate: str, num_ps: int, wire: str, tmp_path: Path) -> None:
    """Also the rows of a table, where a worker that has not looked a row up has the gradient 0 there."""
    sizes = {"min_slice_mb": 0.0} if num_ps > 1 else {}
    flags = {"mode": "sync", "aggregate": aggregate, "wire": wire, "max_steps": STEPS, **sizes}
    train(model_of(input_fn, model_fn), num_ps, WORKERS, model_dir=str(tmp_path), **flags)
    combine = COMBINE[aggregate]
    dense = -sum(combine(DENSE[:, step]) for step in range(STEPS))
    table = -sum(combine(np.stack([of_table(i, step) for i in range(WORKERS)])) for step in range(STEPS))
    saved = variables_of(tmp_path)
    assert saved["global_step"] == STEPS
    np.testing.assert_allclose(saved["first"], dense, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(saved["second"], dense, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(saved["table"], table, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_krum_in_a_service_selects_over_all_servers(num_ps: int) -> None:
    """Five workers push to real servers, one of them huge gradients: the parameters are those of NumPy, to the bit."""
    first = {"w": np.zeros([20, 3], np.float32), "b": np.zeros(30, np.float32)}
    random = np.random.default_rng(8)
    pushes = [
        [{k: random.normal(size=v.shape).astype(v.dtype) for k, v in first.items()} for _ in "01234"] for _ in "012"
    ]
    for step, turn in enumerate(pushes):
        turn[step] = {name: np.full_like(value, 1e30) for name, value in first.items()}
    expected = first
    for turn in pushes:
        flat = np.stack([np.concatenate([np.float64(one).ravel() for one in each.values()]) for each in turn])
        nearest = np.sort(((flat[:, None] - flat[None]) ** 2).sum(axis=2), axis=1)[:, 1:3]
        chosen = turn[int(np.argmin(nearest.sum(axis=1)))]
        expected = {name: value - chosen[name] for name, value in expected.items()}
    flags = {"optimizer": "sgd", "learning_rate": 1.0, "mode": "sync", "num_workers": 5, "aggregate": "krum"}

    def work(address: str, worker: int) -> Any:
        with tfps.connect(address, worker=worker) as ps:
            ps.init(first)
            for turn in pushes:
                ps.pull()
                ps.push(turn[worker])
            return ps.step, ps.pull()

    with tfps.serve(num_ps=num_ps, **flags) as address:
        found = together(*(lambda w=worker: work(address, w) for worker in range(5)))
    for step, weights in found:
        assert step == len(pushes)
        for name, value in expected.items():
            np.testing.assert_array_equal(weights[name], value)
