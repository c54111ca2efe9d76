"""Whole jobs with ``--data_policy=dynamic`` and ``--epochs``: how often each example is used in an update."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import job, model_of, train, variables_of, wait_until
from support.processes import summary

import tfps
from tfps import report
from tfps.config.job_config import JobConfig
from tfps.data.position import HEAD, NAME
from tfps.errors import StoppedError
from tfps.modes.registry import problems_of
from tfps.summary import JobSummary

pytestmark = pytest.mark.slow

SIZE = 203
STEPS = 10**6  # more than any job here has


def input_of(delays: dict[int, float]) -> Any:
    """Return an ``input_fn`` that offers the numbers from 0; some workers need some seconds for a batch."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        secs = delays.get(context.input_pipeline_id, 0.0)

        def late(ids: Any) -> Any:
            time.sleep(secs)
            return ids

        def read(ids: Any) -> Any:
            if secs:
                ids = tf.reshape(tf.numpy_function(late, [ids], tf.int64), tf.shape(ids))
            return {"id": ids}, tf.zeros_like(ids)

        return tfps.Examples(SIZE, read)

    return input_fn


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Count each example in the parameters: SGD with rate 1 adds 1 to its row, however large the batch is."""
    table = tf.get_variable("table", [SIZE], initializer=tf.zeros_initializer())
    loss = -tf.reduce_sum(tf.gather(table, features["id"]))
    return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=1.0))


MODEL = model_of(input_of({}), model_fn)
WITHOUT_PS = [{"mode": "allreduce"}, {"mode": "gossip", "topology": "ring", "collect_every": 5}]


def used(model_dir: Path) -> Any:
    """Return how many times each example is in the parameters; the counts of the checkpoint agree."""
    saved = variables_of(model_dir)
    return saved["table"]


def flags_of(mode: str, model_dir: Path, **more: Any) -> dict[str, Any]:
    """Return the flags of a job of batches of 4."""
    flags = {"mode": mode, "data_policy": "dynamic", "batch_size": 4, "model_dir": str(model_dir), "max_steps": STEPS}
    return {**flags, **more}


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("policy", ["shard", "dynamic"])
@pytest.mark.parametrize(("num_ps", "num_workers", "epochs"), [(1, 1, 2), (2, 2, 1), (1, 3, 3)])
def test_each_example_is_used_once_an_epoch(
    tmp_path: Path, mode: str, policy: str, num_ps: int, num_workers: int, epochs: int
) -> None:
    """A job ends by itself when each example has been used so often, and no example more."""
    train(MODEL, num_ps, num_workers, **flags_of(mode, tmp_path, data_policy=policy, epochs=epochs))
    np.testing.assert_array_equal(used(tmp_path), np.full(SIZE, epochs))
    np.testing.assert_array_equal(variables_of(tmp_path)[NAME][HEAD:], np.full(SIZE, epochs))


@pytest.mark.parametrize("steps_per_run", [3, 8])
def test_runs_of_several_steps_are_exact(tmp_path: Path, steps_per_run: int) -> None:
    """What a run and the pipeline have ahead at the end of the data is used, and nothing twice."""
    flags = flags_of("async", tmp_path, epochs=4, steps_per_run=steps_per_run, runs_in_flight=2)
    train(MODEL, 1, 2, **flags)
    np.testing.assert_array_equal(used(tmp_path), np.full(SIZE, 4))


@pytest.mark.parametrize("policy", ["shard", "dynamic"])
@pytest.mark.parametrize("workers", [(2, 3), (3, 1)])
def test_a_resumed_job_reads_what_is_left(tmp_path: Path, policy: str, workers: tuple[int, int]) -> None:
    """A job ends at ``--max_steps`` in an epoch, with batches in its pipelines; the next one has other workers."""
    flags = {"data_policy": policy, "epochs": 3, "steps_per_run": 2}
    train(MODEL, 1, workers[0], **flags_of("async", tmp_path, max_steps=70, **flags))
    first = used(tmp_path)
    assert first.sum() == 70 * 4
    train(MODEL, 1, workers[1], **flags_of("async", tmp_path, **flags))
    np.testing.assert_array_equal(used(tmp_path), np.full(SIZE, 3))


def test_a_stopped_job_goes_on_in_its_epoch(tmp_path: Path) -> None:
    """All tasks are stopped by SIGTERM in an epoch; the checkpoint has the position."""
    slow = model_of(input_of({0: 0.01, 1: 0.01}), model_fn)
    with job(slow, 1, 2, **flags_of("async", tmp_path, epochs=3, save_checkpoint_secs=0.0)) as running:
        wait_until(lambda: list(tmp_path.glob("model.ckpt-*.index")))
        running.stop()
        ended = running.wait()
    assert all(error is None or isinstance(error, StoppedError) for error in ended.values()), ended
    assert used(tmp_path).sum() < 3 * SIZE
    train(MODEL, 1, 2, **flags_of("async", tmp_path, epochs=3))
    np.testing.assert_array_equal(used(tmp_path), np.full(SIZE, 3))


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_fast_worker_takes_more(tmp_path: Path, mode: str) -> None:
    """Worker 1 needs a twentieth of a second for a batch: in async, it takes few; in ssp, as many as the bound says."""
    slow = model_of(input_of({1: 0.05}), model_fn)
    train(slow, 1, 2, **flags_of(mode, tmp_path, epochs=4, staleness=2 if mode == "ssp" else None))
    np.testing.assert_array_equal(used(tmp_path), np.full(SIZE, 4))
    steps = [summary(tmp_path)["tasks"][f"worker/{index}"]["steps"] for index in range(2)]
    assert steps[0] > steps[1] * (2 if mode == "async" else 0.5), steps


@pytest.mark.parametrize("flags", WITHOUT_PS, ids=lambda flags: flags["mode"])
@pytest.mark.parametrize(("num_workers", "epochs"), [(1, 2), (2, 1), (3, 3)])
def test_workers_without_ps_take_turns(tmp_path: Path, flags: dict[str, Any], num_workers: int, epochs: int) -> None:
    """Each step has the next examples of the epochs; the last one has what is left."""
    train(MODEL, 0, num_workers, **flags_of(model_dir=tmp_path, epochs=epochs, **flags))
    np.testing.assert_allclose(used(tmp_path), np.full(SIZE, epochs) / num_workers, rtol=1e-5)
    whole, left = divmod(SIZE * epochs, 4 * num_workers)
    assert variables_of(tmp_path)["global_step"] == whole + (left >= num_workers)


@pytest.mark.parametrize("flags", WITHOUT_PS, ids=lambda flags: flags["mode"])
def test_a_worker_alone_without_ps_takes_several_steps_in_a_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Each step has the next examples, as with one step in a run."""
    train(MODEL, 0, 1, **flags_of(model_dir=tmp_path, epochs=2, steps_per_run=3, **flags))
    np.testing.assert_allclose(used(tmp_path), np.full(SIZE, 2), rtol=1e-5)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_sync_takes_turns(tmp_path: Path, num_workers: int, epochs: int) -> None:
    """Each update has the next examples of the epochs; the last one has what is left."""
    train(MODEL, 2, num_workers, **flags_of("sync", tmp_path, epochs=epochs))
    np.testing.assert_allclose(used(tmp_path), np.full(SIZE, epochs) / num_workers, rtol=1e-5)
    whole, left = divmod(SIZE * epochs, 4 * num_workers)
    assert variables_of(tmp_path)["global_step"] == whole + (left >= num_workers)


def test_sync_goes_on_in_its_epoch_with_another_number_of_workers(tmp_path: Path) -> None:
    """33 updates of 3 workers, and then a worker alone, to the end of the third epoch; then there is no more."""
    train(MODEL, 1, 3, **flags_of("sync", tmp_path, max_steps=33, epochs=3))
    first = used(tmp_path) * 3
    assert set(np.round(first)) == {1, 2}  # 396 examples of the two first epochs
    train(MODEL, 1, 1, **flags_of("sync", tmp_path, epochs=3))
    np.testing.assert_allclose(used(tmp_path) - first / 3 + first, np.full(SIZE, 3), rtol=1e-5)
    train(MODEL, 1, 1, **flags_of("sync", tmp_path, epochs=3))
    train(MODEL, 1, 1, **flags_of("async", tmp_path, epochs=4))  # in another mode
    np.testing.assert_allclose(used(tmp_path) - first / 3 + first, np.full(SIZE, 4), rtol=1e-5)


@pytest.mark.parametrize("policy", ["shard", "dynamic"])
def test_local_reads_each_example_once_an_epoch(tmp_path: Path, policy: str) -> None:
    """200 of the 203 examples: 25 steps of two workers, in rounds of 10; the PS take the mean of what they add."""
    flags = flags_of("local", tmp_path, sync_every=10, data_policy=policy)
    train(MODEL, 1, 2, **{**flags, "max_steps": 25})
    first = used(tmp_path) * 2
    assert first.sum() == 200
    assert set(np.round(first)) == {0, 1}


def test_local_ends_with_the_epochs(tmp_path: Path) -> None:
    """The last round is shorter, and its last batches are."""
    train(MODEL, 1, 2, **flags_of("local", tmp_path, sync_every=10, epochs=2))
    saved = variables_of(tmp_path)
    assert saved["global_step"] == -(-2 * SIZE // 8)
    assert (saved["table"] > 0).all()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_several_devices_in_a_worker(tmp_path: Path, mode: str) -> None:
    """A step has a batch of each device; the last one may have fewer examples than devices."""
    train(MODEL, 1, 1, **flags_of(mode, tmp_path, epochs=2, devices_per_worker="cpu:3"))
    counts = variables_of(tmp_path)[NAME]
    if mode == "async":
        np.testing.assert_array_equal(counts[HEAD:], np.full(SIZE, 2))
    assert variables_of(tmp_path)["global_step"] == -(-2 * SIZE // 12)
    assert (used(tmp_path) > 0).all()


def test_the_job_of_reached_epochs_has_nothing_to_train(tmp_path: Path) -> None:
    """A second start changes nothing, ends well, and the report of the job says why."""
    for _ in range(2):
        train(MODEL, 1, 2, **flags_of("async", tmp_path, epochs=1))
        np.testing.assert_array_equal(used(tmp_path), np.ones(SIZE))
    first, *_ = report.final_lines(JobSummary.from_json(summary(tmp_path)), None)
    assert re.fullmatch(r"done: nothing to train, each example was read 1 time before, at .*: raise --epochs .*", first)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"epochs": 2}, "--epochs=2 needs --data_policy=shard or dynamic"),
        ({"epochs": 2, "data_policy": "dynamic", "on_nan": "skip"}, "--epochs=2 is not for --on_nan=skip"),
        ({"epochs": 2, "data_policy": "shard", "mode": "sync"}, "Give --data_policy=dynamic"),
        ({"data_policy": "dynamic", "partition": "label"}, "--data_policy=dynamic is not for --partition=label"),
        ({"data_policy": "dynamic", "mode": "sync", "backup_workers": 1}, "is not for --backup_workers=1"),
        ({"data_policy": "dynamic", "mode": "local", "worker_fraction": 0.5}, "is not for --worker_fraction=0.5"),
        ({"data_policy": "shard", "mode": "local", "on_nan": "skip"}, "is not for --on_nan=skip"),
        ({"data_policy": "dynamic", "mode": "local", "async_rounds": True}, "is not for --async_rounds=1"),
        ({"data_policy": "shard", "mode": "allreduce", "on_nan": "skip"}, "is not for --on_nan=skip in allreduce"),
    ],
)
def test_what_cannot_be_met_is_refused(flags: dict[str, Any], what: str) -> None:
    """One line with the flag, its value and what to do."""
    assert [problem for problem in problems_of(JobConfig(**flags), 3) if what in problem]
