"""Claims about checkpoints that are saved while updates are applied: each holds as many as its step says."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from cluster_in_process import model_of, train, wait_until

import tfps
from tfps.runtime import checkpoint
from tfps.runtime.worker import Worker

BIG = 1 << 18  # floats: too large to be packed


def endless(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of two ids, without end."""
    if mode == "eval":
        return None
    return tf.data.Dataset.from_tensors(({"ids": np.int64([0, 3])}, 0.0)).repeat()


def counting(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` each of whose updates raises every weight that it uses by 1."""
    small = [tf.get_variable(f"small{index}", [2], initializer=tf.zeros_initializer()) for index in range(3)]
    big = tf.get_variable("big", [BIG], initializer=tf.zeros_initializer())
    table = tf.get_variable("table", [4, BIG // 4], initializer=tf.zeros_initializer())
    rows = tf.nn.embedding_lookup(table, features["ids"])
    loss = -tf.add_n([tf.reduce_sum(each) for each in (*small, big, rows)])
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))


COUNTING = model_of(endless, counting)


def counts(path: str) -> dict[str, set[float]]:
    """Return by variable how many updates a checkpoint of ``counting`` holds."""
    reader = tf.train.load_checkpoint(path)
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    values["table"] = values["table"][[0, 3]]
    return {name: set(np.ravel(value).tolist()) for name, value in values.items()}


@pytest.mark.parametrize(("num_ps", "wire"), [(1, "packed"), (1, "plain"), (2, "packed")])
def test_a_checkpoint_of_a_job_under_way_holds_the_updates_of_its_step(tmp_path: Path, num_ps: int, wire: str) -> None:
    """Small, large and sparsely updated weights of every checkpoint have had as many updates as ``global_step`` says.

    They are saved many times while three workers apply updates as fast as they can.
    """
    with mock.patch.object(checkpoint, "_KEEP", 1000):
        flags: dict[str, Any] = {"max_steps": 400, "save_checkpoint_secs": 0.01, "wire": wire}
        train(COUNTING, num_ps, 3, secs=90, model_dir=str(tmp_path), **flags)
    saved = sorted(path.with_suffix("") for path in tmp_path.glob("model.ckpt-*.index"))
    assert len(saved) > 2
    for path in saved:
        step = float(path.name.rpartition("-")[2])
        found = counts(str(path))
        assert set(found) == {"global_step", "small0", "small1", "small2", "big", "table"}
        assert all(value == {step} for value in found.values()), (step, found)


def test_a_job_saves_before_all_of_its_workers_have_begun(tmp_path: Path) -> None:
    """A worker that comes late, or never, keeps no checkpoint from being saved."""
    begin = Worker._begin

    def late(worker: Worker, session: Any) -> None:
        if not worker._task.is_chief:
            wait_until(lambda: list(tmp_path.glob("model.ckpt-*.index")))
        begin(worker, session)

    with mock.patch.object(Worker, "_begin", late):
        train(COUNTING, 2, 2, secs=60, model_dir=str(tmp_path), max_steps=300, save_checkpoint_secs=0.01)
    assert counts(tf.train.latest_checkpoint(str(tmp_path)))["small0"] == {300.0}
