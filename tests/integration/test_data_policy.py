"""Whole jobs with ``--data_policy``: each example is read once an epoch, and a resumed job goes on in its epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import job, model_of, train, variables_of, wait_until

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.data.order import Order
from tfps.data.position import HEAD, NAME
from tfps.errors import ModelError, StoppedError
from tfps.modes.registry import problems_of
from tfps.runtime.graph import builder

pytestmark = pytest.mark.slow

SIZE = 96


def input_fn(mode: str, params: Any, context: Any) -> Any:
    """Offer the numbers from 0 as examples; their classes are 0 to 7, in turns."""
    if mode == "eval":
        return None
    return tfps.Examples(SIZE, lambda ids: ({"id": ids}, tf.zeros_like(ids)), classes=np.arange(SIZE) % 8)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Count each example in the parameters: SGD with rate 1 adds 1 over the size of the mean's batch to its row.

    So a batch of 4 and a mean over 2 workers adds 1/4 or 1/8, which is exact.
    """
    table = tf.get_variable("table", [SIZE], initializer=tf.zeros_initializer())
    loss = -tf.reduce_mean(tf.gather(table, features["id"]))
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=1.0))


MODEL = model_of(input_fn, model_fn)
WITHOUT_PS = [{"mode": "allreduce"}, {"mode": "gossip", "topology": "ring", "collect_every": 5}]


def seen(model_dir: Path, share: float) -> Any:
    """Return how many times each example is in the parameters of the newest checkpoint."""
    return variables_of(model_dir)["table"] / np.float32(share)


def flags_of(mode: str, model_dir: Path, **more: Any) -> dict[str, Any]:
    """Return the flags of a job of batches of 4."""
    return {"mode": mode, "data_policy": "shard", "batch_size": 4, "model_dir": str(model_dir), **more}


@pytest.mark.parametrize(("num_ps", "num_workers"), [(1, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_sync_reads_each_example_once_an_epoch(tmp_path: Path, num_ps: int, num_workers: int, epochs: int) -> None:
    """After as many steps as an epoch has, the parameters have seen each example exactly once."""
    steps = epochs * SIZE // 4 // num_workers
    train(MODEL, num_ps, num_workers, **flags_of("sync", tmp_path, max_steps=steps))
    np.testing.assert_allclose(seen(tmp_path, 1 / 4 / num_workers), np.full(SIZE, epochs), rtol=1e-6)


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_the_counts_of_a_checkpoint_are_what_its_parameters_have_seen(tmp_path: Path, mode: str, num_ps: int) -> None:
    """Counts and parameters agree, and no share is read unevenly: no example is two epochs ahead of its worker's."""
    train(MODEL, num_ps, 2, **flags_of(mode, tmp_path, max_steps=30))
    counts = variables_of(tmp_path)[NAME][HEAD:]
    np.testing.assert_array_equal(counts, seen(tmp_path, 1 / 4))
    assert counts.sum() == 30 * 4
    for share in Order(input_fn("train", {}, None), 1, 2).shares:
        assert np.ptp(counts[share]) <= 1


def test_a_resumed_sync_job_goes_on_in_its_epoch_with_another_number_of_workers(tmp_path: Path) -> None:
    """7 steps of 2 workers, then 10 of 1 worker: an epoch, with each example once."""
    train(MODEL, 1, 2, **flags_of("sync", tmp_path, max_steps=7))
    first = seen(tmp_path, 1 / 8)
    assert sorted(set(first)) == [0, 1]
    assert first.sum() == 7 * 8
    train(MODEL, 1, 1, **flags_of("sync", tmp_path, max_steps=17))
    second = (variables_of(tmp_path)["table"] - first / 8) * 4
    np.testing.assert_array_equal(first + second, np.ones(SIZE))


@pytest.mark.parametrize("flags", WITHOUT_PS, ids=lambda flags: flags["mode"])
def test_a_resumed_job_without_ps_goes_on_in_its_epoch(tmp_path: Path, flags: dict[str, Any]) -> None:
    """7 steps of 2 workers, then 5 of 2 workers: an epoch, with each example once."""
    train(MODEL, 0, 2, **flags_of(model_dir=tmp_path, max_steps=7, **flags))
    first = seen(tmp_path, 1 / 8)
    np.testing.assert_allclose(sorted(first), [0] * 40 + [1] * 56, rtol=1e-5)
    train(MODEL, 0, 2, **flags_of(model_dir=tmp_path, max_steps=12, **flags))
    np.testing.assert_allclose(seen(tmp_path, 1 / 8), np.ones(SIZE), rtol=1e-5)


@pytest.mark.parametrize("modes", [("async", "sync"), ("sync", "async")])
def test_a_job_may_be_resumed_in_another_mode(tmp_path: Path, modes: tuple[str, str]) -> None:
    """One worker reads a third of an epoch in one mode, and the rest in the other."""
    train(MODEL, 1, 1, **flags_of(modes[0], tmp_path, max_steps=8))
    train(MODEL, 1, 1, **flags_of(modes[1], tmp_path, max_steps=SIZE // 4))
    np.testing.assert_array_equal(seen(tmp_path, 1 / 4), np.ones(SIZE))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_stopped_and_resumed_job_reads_as_one_that_was_not(tmp_path: Path, mode: str) -> None:
    """A job is stopped somewhere in its epochs, by SIGTERM to all, and resumed: the sum is exact and even."""
    workers = 2
    flags = flags_of(mode, tmp_path, save_checkpoint_secs=0.0)
    with job(MODEL, 1, workers, max_steps=10**6, **flags) as running:
        wait_until(lambda: list(tmp_path.glob("model.ckpt-*.index")))
        running.stop()
        ended = running.wait()
    assert all(error is None or isinstance(error, StoppedError) for error in ended.values()), ended
    step = int(variables_of(tmp_path)["global_step"])
    per_epoch = SIZE // 4 // (workers if mode == "sync" else 1)
    last = (step // per_epoch + 2) * per_epoch
    train(MODEL, 1, workers, max_steps=last, **flags)
    share = 1 / 4 / (workers if mode == "sync" else 1)
    counts = seen(tmp_path, share)
    assert counts.sum() == last * 4 * (workers if mode == "sync" else 1)
    for own in Order(input_fn("train", {}, None), 1, workers).shares:
        assert np.ptp(counts[own]) <= (0 if mode == "sync" else 1)


def test_label_shares_need_no_policy(tmp_path: Path) -> None:
    """``--partition=label`` alone gives a worker examples of few classes."""
    train(MODEL, 1, 2, partition="label", batch_size=4, model_dir=str(tmp_path), max_steps=6)
    assert seen(tmp_path, 1 / 4).sum() == 24
    for share in Order(input_fn("train", {}, None), 1, 2, "label").shares:
        assert len(set(share % 8)) == 4


@pytest.mark.parametrize("flag", ["data_policy=shard", "partition=label"])
def test_a_model_without_examples_is_refused(flag: str) -> None:
    """The message says what to return."""
    plain = model_of(lambda *_: tf.data.Dataset.from_tensors(({"id": [0]}, [0])).repeat(), model_fn)
    name, _, value = flag.partition("=")
    config = JobConfig(**{name: value})
    with pytest.raises(ModelError, match=rf"--{flag}: .* return tfps\.Examples\(size, read\) for training"):
        builder.training(config, Cluster(("a:1",), ("b:1",)), Task("worker", 0), plain)


def test_examples_without_classes_cannot_be_divided_by_them() -> None:
    """It is a mistake of the model or the flag, and the message has the place of ``input_fn``."""
    plain = model_of(lambda *_: tfps.Examples(SIZE, lambda ids: ({"id": ids}, ids)), model_fn)
    config = JobConfig(partition="label")
    with pytest.raises(
        ModelError, match=r"^--model=.*: .*, line \d+: --partition=label: the examples have no classes: "
    ):
        builder.training(config, Cluster(("a:1",), ("b:1",)), Task("worker", 0), plain)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"backup_workers": 1}, "--data_policy=shard is not for --backup_workers=1"),
        ({"on_nan": "skip"}, "--data_policy=shard is not for --on_nan=skip in sync"),
    ],
)
def test_sync_refuses_what_would_leave_batches_out(flags: dict[str, Any], what: str) -> None:
    """The step could not tell the position any more."""
    config = JobConfig(mode="sync", data_policy="shard", **flags)
    assert [problem for problem in problems_of(config, 3) if what in problem]
