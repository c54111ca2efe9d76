"""Whole jobs of ``ssp``: their arithmetic, their bound, and who is not waited for."""

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import assert_done, job, linear, model_of, train, variables_of, wait_until
from support.processes import summary

import tfps
from tfps.config.job_config import JobConfig
from tfps.errors import StoppedError
from tfps.modes.registry import problems_of
from tfps.runtime.coordination import heartbeat, restart_barrier
from tfps.runtime.coordination.allowance import Allowance
from tfps.runtime.training.steps.training_loop import Loop

pytestmark = pytest.mark.slow

ENOUGH = 10**6  # batches


def inputs(before: Callable[[int], Any] = lambda _: None, sizes: Mapping[int, int] | None = None) -> Callable[..., Any]:
    """Return an ``input_fn`` that gives worker i the number 2^i, so many times as ``sizes`` says.

    It calls ``before`` with the index before each batch.
    """

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        index = context.input_pipeline_id

        def wait(x: Any) -> Any:
            before(index)
            return x

        one = tf.data.Dataset.from_tensors(np.float32(2**index)).repeat((sizes or {}).get(index, ENOUGH))
        return one.map(lambda x: ({"x": tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [])}, 0.0))

    return input_fn


@pytest.fixture
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each of three workers take its first step when all have joined."""
    all_there, run = threading.Barrier(3), Loop.run

    def run_together(loop: Loop) -> None:
        all_there.wait(100)
        run(loop)

    monkeypatch.setattr(Loop, "run", run_together)


def heavy(sizes: Mapping[int, int]) -> Callable[..., Any]:
    """Return an ``input_fn`` without end and without Python, so that runs may take several steps.

    It gives worker i the number 256^i, and a square matrix of the size that makes its steps slow.
    """

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        index = context.input_pipeline_id
        size = sizes.get(index, 1)
        return tf.data.Dataset.from_tensors(({"x": 256.0**index, "work": np.zeros([size, size], "f")}, 0.0)).repeat()

    return input_fn


def showing_reads(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` from whose weight each step of worker i subtracts 256^i. It logs each step's worker.

    It also logs how many steps of each of three workers are in the weight that the step reads.
    """
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    read = weight.read_value()
    work = tf.reduce_sum(tf.matmul(features["work"], features["work"]))
    taken = tf.cast(-read, tf.int32)
    shown = {f"of_{index}": tf.bitwise.right_shift(taken, 8 * index) % 256 for index in range(3)}
    optimizer = tf.train.GradientDescentOptimizer(1.0)
    return tfps.ModelSpec(
        loss=read * features["x"] + work, optimizer=optimizer, log_tensors={"x": features["x"], **shown}
    )


def leads_in(log: str, until: int) -> list[int]:
    """Return by how many steps each step's worker was ahead of the slowest, as ``showing_reads`` has logged it.

    Ignore steps that read more than ``until`` steps: workers leave then, and are not waited for.
    """
    own_steps, leads = {1: 0, 256: 0, 65536: 0}, []
    for line in log.splitlines():
        if "of_0=" not in line:
            continue
        shown = dict(re.findall(r"(\w+)=(\S+)", line))
        counts = [int(shown[f"of_{index}"]) for index in range(3)]
        own = int(shown["x"])
        assert counts[sorted(own_steps).index(own)] == own_steps[own], "a worker reads all of its own steps"
        if sum(counts) <= until:
            leads.append(own_steps[own] - min(counts))
        own_steps[own] += 1
    return leads


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[Allowance]:
    """Return a list of the allowances of the workers that have waited, in order."""
    waiting, renew = list[Allowance](), Allowance._renew_once

    def noted(allowance: Allowance) -> None:
        if allowance not in waiting:
            waiting.append(allowance)
        renew(allowance)

    monkeypatch.setattr(Allowance, "_renew_once", noted)
    return waiting


@pytest.mark.parametrize(
    ("num_ps", "num_workers", "flags"),
    [
        (1, 1, {}),
        (1, 2, {"staleness": 0}),
        (2, 3, {"staleness": 1, "steps_per_run": 1}),
        (2, 3, {}),
        (1, 3, {"staleness": 2, "steps_per_run": 8}),
        (2, 2, {"staleness": 100, "wire": "plain"}),
    ],
)
def test_each_gradient_is_applied_once(tmp_path: Path, num_ps: int, num_workers: int, flags: dict[str, Any]) -> None:
    """The weight is what all steps of all workers have subtracted, and there are ``max_steps`` of them."""
    late = lambda index: time.sleep(0.003 * (index == 1))  # noqa: E731
    flags = {"mode": "ssp", "max_steps": 101, "model_dir": str(tmp_path), **flags}
    train(model_of(inputs(late), linear), num_ps, num_workers, **flags)
    reported = summary(tmp_path)
    steps = [reported["tasks"][f"worker/{index}"]["steps"] for index in range(num_workers)]
    saved = variables_of(tmp_path)
    assert saved["global_step"] == sum(steps) == sum(reported["staleness"]) == 101
    assert saved["weight"] == -sum(2**index * count for index, count in enumerate(steps))
    assert min(steps) > 0
    assert reported["pace"]["steps_per_run"] <= flags.get("staleness", 3) + 1


@pytest.mark.parametrize(
    ("staleness", "sizes", "flags"),
    [
        (0, {1: 500}, {}),
        (2, {2: 900}, {"steps_per_run": 8}),
        (2, {0: 900, 1: 500}, {"steps_per_run": 1}),
        (3, {1: 900}, {"num_ps": 2}),
    ],
)
@pytest.mark.usefixtures("_together")
def test_the_bound_is_reached_and_never_exceeded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, staleness: int, sizes: dict[int, int], flags: dict[str, Any]
) -> None:
    """Every step's parameters contain all steps of all workers but the last s of each; with s=0, it is lockstep."""
    caplog.set_level(logging.INFO, "tfps")
    flags = {"mode": "ssp", "staleness": staleness, "max_steps": 150, "num_ps": 1, "steps_to_validate": 1, **flags}
    train(model_of(heavy(sizes), showing_reads), num_workers=3, model_dir=str(tmp_path), **flags)
    leads = leads_in(caplog.text, 150 - 6 * (staleness + 1))
    assert len(leads) > 100
    assert max(leads) == staleness
    assert variables_of(tmp_path)["global_step"] == 150
    if flags.get("steps_per_run") == 8:
        assert f"--steps_per_run=8: --mode=ssp allows {staleness + 1} in a run" in caplog.text
        assert summary(tmp_path)["pace"]["steps_per_run"] == staleness + 1


@pytest.mark.parametrize("max_steps", [120, 1000])
def test_who_has_no_more_input_is_not_waited_for(tmp_path: Path, max_steps: int) -> None:
    """Inputs that end one after another: every batch is used that there is a step for."""
    sizes = {0: 100, 1: 7, 2: 60}
    flags = {"mode": "ssp", "staleness": 1, "max_steps": max_steps, "model_dir": str(tmp_path)}
    train(model_of(inputs(sizes=sizes), linear), 2, 3, **flags)
    saved, tasks = variables_of(tmp_path), summary(tmp_path)["tasks"]
    steps = [tasks[f"worker/{index}"]["steps"] for index in range(3)]
    assert saved["global_step"] == sum(steps) == min(max_steps, sum(sizes.values()))
    assert saved["weight"] == -(steps[0] + 2 * steps[1] + 4 * steps[2])
    assert steps[1] == sizes[1]


def test_who_is_stopped_while_it_waits_ends_at_once_and_is_not_waited_for(
    tmp_path: Path, waiting: list[Allowance]
) -> None:
    """It sees the request between two looks, the others take all steps, and the chief saves while it waits."""
    go_on = threading.Event()
    model = model_of(inputs(lambda index: index == 1 and go_on.wait(100)), linear)
    flags: dict[str, Any] = {"mode": "ssp", "staleness": 1, "max_steps": 40, "save_checkpoint_secs": 0.1}
    with job(model, 1, 3, model_dir=str(tmp_path), **flags) as running:
        wait_until(lambda: len(waiting) == 2)
        wait_until((tmp_path / "model.ckpt-4.index").exists)  # s + 1 steps of each of the two
        running.stop("worker/2")
        asked = time.monotonic()
        wait_until(lambda: "worker/2" in running.ended)
        assert time.monotonic() - asked < 5
        assert isinstance(running.ended["worker/2"], StoppedError)
        go_on.set()
        wait_until(lambda: len(running.ended) == 3)  # the PS wait for its replacement
        assert_done({name: running.ended[name] for name in ("worker/0", "worker/1")})
    assert variables_of(tmp_path)["global_step"] == 40
    assert summary(tmp_path)["tasks"]["worker/2"]["steps"] == 2


def test_the_slow_worker_is_reported_and_those_that_wait_for_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a worker waits is not its own slowness. All take as many steps: the slow one sets the pace."""
    monkeypatch.setattr(heartbeat, "EVERY_SECS", 0.05)
    monkeypatch.setattr(restart_barrier, "_LISTEN_SECS", 0.05)
    pauses = {0: 0.02, 1: 0.1, 2: 0.02}
    model = model_of(inputs(lambda index: time.sleep(pauses[index])), linear)
    train(model, 1, 3, mode="ssp", staleness=2, max_steps=150, steps_per_run=1, model_dir=str(tmp_path))
    found = summary(tmp_path)
    assert found["behind"]["worker/1"] > 0.6
    assert sum(found["behind"].get(name, 0) for name in ("worker/0", "worker/2")) < 0.2
    steps = {name: task["steps"] for name, task in found["tasks"].items()}
    assert all(0 <= steps[name] - steps["worker/1"] <= 8 for name in ("worker/0", "worker/2")), steps


def test_flags() -> None:
    """``--staleness`` is for ssp, and several runs in flight are not."""
    assert problems_of(JobConfig(mode="ssp", staleness=0), 2) == []
    [problem] = problems_of(JobConfig(mode="async", staleness=0), 2)
    assert (
        problem == "--staleness=0 is for --mode=ssp, and this job has --mode=async: give --mode=ssp, or leave it out."
    )
    [problem] = problems_of(JobConfig(mode="ssp", runs_in_flight=2), 2)
    assert "--runs_in_flight=2" in problem
