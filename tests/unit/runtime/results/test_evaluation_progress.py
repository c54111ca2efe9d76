"""An evaluation that makes no progress any more."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, job, linear, model_of, wait_until
from support.processes import summary

from tfps.errors import StallError
from tfps.runtime.results.evaluation_progress import EvaluationProgress

_TIMEOUT_SECS = 15.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a time in seconds that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def look(clock: list[float], watched: EvaluationProgress, secs: int) -> Exception | None:
    """Let seconds pass, with a look in each as a worker's main thread has them; return the first error."""
    for _ in range(secs):
        clock[0] += 1.0
        if error := watched.error():
            return error
    return None


def test_only_a_batch_that_does_not_end_is_a_stall(clock: list[float]) -> None:
    """Neither the time between two evaluations counts nor that of batches that do end."""
    watched = EvaluationProgress(100.0)
    assert look(clock, watched, 200) is None
    for _ in range(2):
        with watched.running():
            assert look(clock, watched, 90) is None
            watched.batches += 1
            assert look(clock, watched, 90) is None
        assert look(clock, watched, 200) is None
    with watched.running():
        assert look(clock, watched, 99) is None
        error = look(clock, watched, 5)
    assert str(error).startswith("no evaluation batch for 101 s, the last was 0: ")


def test_a_job_whose_evaluation_blocks_ends(tmp_path: Path) -> None:
    """The input of the last evaluation gives one batch and then none: the chief ends, with what was saved before."""
    given = threading.Event()

    def blocked() -> Iterator[Any]:
        yield np.float32(1)
        given.wait(200)

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "train":
            return dataset_of(np.ones(4, np.float32)).repeat()
        return tf.data.Dataset.from_generator(blocked, tf.float32, []).batch(1).map(lambda x: ({"x": x}, x))

    flags = {"max_steps": 8, "model_dir": str(tmp_path), "stall_timeout_secs": _TIMEOUT_SECS}
    with job(model_of(input_fn, linear), 1, 1, **flags) as running:
        wait_until(lambda: "worker/0" in running.ended, 150)
        given.set()
        error = running.ended["worker/0"]
    assert isinstance(error, StallError), error
    assert "no evaluation batch for " in str(error)
    assert ", the last was 1: " in str(error)
    assert summary(tmp_path)["status"] == "failed"
    assert (tmp_path / "model.ckpt-8.index").is_file()
