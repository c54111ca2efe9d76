"""Claims about the harness of ``tests/faults``: what it counts, and what it takes for wrong; no job is run."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report
import sums
import tensorflow.compat.v1 as tf
import timeline
from faults import FAULTS
from forked import HERE
from modes import MODES
from result import Result
from timeline import Line, Mark

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.models import loader
from tfps.runtime.graph import builder, placement


@pytest.fixture(scope="module", autouse=True)
def _tf1() -> None:
    tf.disable_v2_behavior()
    tf.enable_resource_variables()


def saved(step: int, wrong: float = 0, weight: float | None = None, of: int = 1) -> sums.Saved:
    """Return a checkpoint of a step, of which one weight has had other updates than the rest."""
    values = {"updates/large0": np.full([4], step), "updates/small0": np.array([step, step + wrong])}
    if weight is not None:
        values["weight"] = np.float32(weight)
    return sums.of_values(f"model.ckpt-{step}", {**values, "global_step": np.int64(step)})


def test_a_checkpoint_holds_as_many_updates_as_its_step_says() -> None:
    """One element of one weight that has had one update more or fewer, in any checkpoint, is wrong; and is reported."""
    for mode in MODES:
        assert not sums.check([saved(7), saved(9)], sums.Job(MODES[mode]))
        for wrong in (-1, 1, 0.5):
            reported = sums.check([saved(7, wrong), saved(9)], sums.Job(MODES[mode]))
            assert reported.startswith("model.ckpt-7 holds other updates than its step says: updates/small0"), reported
    assert saved(7, -3).off == 3
    assert saved(7).off == 0


def test_a_checkpoint_that_cannot_be_read_counts_nothing_or_lies_about_its_step_is_wrong() -> None:
    """A check that has nothing to look at does not pass."""
    assert "cannot be read" in sums.check([sums.Saved("model.ckpt-7", error="gone")], sums.Job(MODES["async"]))
    assert "no weight" in sums.check(
        [sums.of_values("model.ckpt-7", {"global_step": np.int64(7)})], sums.Job(MODES["async"])
    )
    lying = sums.of_values("model.ckpt-9", {"global_step": np.int64(7), "updates/a": np.float32([7])})
    assert "holds global_step 7" in sums.check([lying], sums.Job(MODES["async"]))


def test_sync_is_the_exact_mean() -> None:
    """With two workers, whose gradients are 1 and 2, a step moves the weight by 1.5; in async it may be any of both."""
    assert not sums.check([saved(4, weight=-6)], sums.Job(MODES["sync"]))
    assert "not of exact means" in sums.check([saved(4, weight=-5)], sums.Job(MODES["sync"]))
    assert not sums.check([saved(4, weight=-5)], sums.Job(MODES["async"]))


def test_gossip_keeps_the_mean_but_for_rounding() -> None:
    """With three workers, whose gradients are 1, 2 and 4, a step moves the mean by 7/3, and none may be missing."""
    job = sums.Job(MODES["gossip"], num_ps=0, num_workers=3)
    assert not sums.check([saved(300, weight=-700.01)], job)
    for weight in (-700 + 1 / 3, -700 - 1 / 3):
        assert "not of exact means" in sums.check([saved(300, weight=weight)], job)


@pytest.mark.parametrize(
    ("mode", "num_ps", "lost", "most"),
    [("sync", 2, 3, 0), ("async", 1, 3, 0), ("async", 2, 0, 0), ("async", 2, 1, 2), ("async", 2, 3, 6)],
)
def test_only_lost_workers_of_async_jobs_on_several_ps_leave_parts_of_steps(
    mode: str, num_ps: int, lost: int, most: int
) -> None:
    """One step of each run that a lost worker had under way, and nothing anywhere else."""
    job = sums.Job(MODES[mode], num_ps, runs=2, lost={"": lost})
    assert not sums.check([saved(7, most)], job)
    assert sums.check([saved(7, most + 1)], job)
    assert sums.check([saved(7, -most - 1)], job)


def test_updates_are_counted_by_adagrad_too() -> None:
    """Its accumulator begins at 0.1, and each gradient of -1 adds 1, in float32: exact after rounding."""
    accumulator = np.float32(0.1)
    for _ in range(30_000):
        accumulator += np.float32(1)
    values = {"updates/a": np.float32([12.5]), "updates/a/Adagrad": np.array([accumulator])}
    assert not sums.check(
        [sums.of_values("model.ckpt-30000", {**values, "global_step": 30_000})], sums.Job(MODES["async"])
    )
    assert sums.check([sums.of_values("model.ckpt-30001", {**values, "global_step": 30_001})], sums.Job(MODES["async"]))


def lines(*said: tuple[str, str]) -> list[Line]:
    """Return lines, one each second."""
    return [Line(at, task, text) for at, (task, text) in enumerate(said)]


def test_workers_that_are_lost_count_until_all_goes_back_to_a_checkpoint() -> None:
    """A worker that is killed and started again is one; those that come back as others were lost are none."""
    before = [
        ("worker/0", "saved /m/model.ckpt-1"),
        ("worker/1", timeline.KILLED),
        ("worker/1", "restarted after SIGKILL (1 of 3)"),
        ("worker/0", "restarted after SIGKILL (1 of 3)"),
        ("worker/0", "saved /m/model.ckpt-2"),
    ]
    after = [
        ("ps/1", timeline.KILLED),
        ("worker/1", "restarted after exit code 170, as others were lost"),
        ("worker/0", "resumed from /m/model.ckpt-2"),
        ("worker/0", "saved /m/model.ckpt-3"),
    ]
    assert timeline.lost_workers(lines(*before[1:])) == {"model.ckpt-2": 2, "": 2}
    assert timeline.lost_workers(lines(*before, *after)) == dict.fromkeys(["model.ckpt-1", "model.ckpt-2"], 2) | {
        "model.ckpt-3": 2,
        "": 2,
    }
    assert timeline.lost_workers(lines(*after)) == {"model.ckpt-3": 0, "": 0}


def test_what_a_job_says_of_its_step_and_its_pace_is_understood() -> None:
    """The checkpoint that it goes on from, and how many steps may be under way."""
    said = lines(
        ("worker/0", "pace: 8 steps a run, 2 runs in flight"),
        ("worker/1", "pace: 1 step a run"),
        ("worker/0", "resumed from /a/m/model.ckpt-17"),
    )
    assert timeline.under_way(said) == (8, 2)
    assert timeline.under_way([]) == (1, 1)
    assert timeline.reported_step(said, Mark(0, 1, [])) == 17
    assert timeline.reported_step(said, Mark(0, 3, [])) is None
    at_zero = lines(("worker/0", "no checkpoint in /a/m: training begins at step 0"))
    assert timeline.reported_step(at_zero, Mark(0, 0, [])) == 0


def test_a_saved_step_that_is_lost_is_wrong_however_long_a_save_takes() -> None:
    """What was called saved before the fault, and not after it; steps that no checkpoint held may be lost with a PS."""
    said = [
        ("worker/0", "saved /m/model.ckpt-10"),
        ("worker/0", "step=60 loss=1"),
        ("ps/1", timeline.KILLED),
        ("worker/0", "saved /m/model.ckpt-60"),
    ]
    mark = Mark(2, 4, ["ps/1"])
    assert timeline.lost_saved(lines(*said), mark) == 0
    for step, lost in ((10, 0), (7, 3)):
        assert timeline.lost_saved(lines(*said, ("worker/0", f"resumed from /m/model.ckpt-{step}")), mark) == lost
    ps, worker = FAULTS["ps_killed_saving"], FAULTS["worker_killed"]
    runs = [Result("f", "sync", "tfps", "launch", 1, lost=50, lost_saved=lost, code=0) for lost in (0, 3)]
    assert [ps.problem(run) for run in runs] == ["", "3 steps lost that had been saved"]
    assert all("50 steps lost" in worker.problem(run) for run in runs)


def test_the_table_tells_by_how_much_updates_and_steps_differ() -> None:
    """Median and maximum of the runs, in a column of its own."""
    runs = [Result("worker_killed", "async", "tfps", "launch", n, lost=0, off=off) for n, off in enumerate((0, 0, 2))]
    rows = report.table(FAULTS, runs, []).splitlines()
    head, row = (next(row for row in rows if row.startswith(begin)) for begin in ("| fault", "| a worker is killed"))
    cells = dict(zip(*(text.strip("| ").split(" | ") for text in (head, row)), strict=True))
    assert cells["updates - step"] == "0 / 2"
    assert cells["steps lost"] == "0"


def placed(name: str, num_ps: int, strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the variables of one of the harness's models by PS, and those of them that live packed."""
    monkeypatch.syspath_prepend(str(HERE))
    config = JobConfig(model=str(HERE / "models" / f"{name}.py"), data_dir=str(tmp_path), ps_strategy=strategy)
    cluster = Cluster(tuple(f"p:{n + 1}" for n in range(num_ps)), ("w:1", "w:2"))
    built = builder.training(config, cluster, Task("worker", 0), loader.load(config.model))
    kinds = [(re.sub(r"\d+$", "", v.name), v.ps) for v in placement.variables(built.graph) if "updates/" in v.name]
    return Counter(kinds), {place for place in built.places if place.startswith("updates/")}


@pytest.mark.parametrize("strategy", ["greedy", "round_robin"])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_each_ps_has_weights_of_each_kind(
    num_ps: int, strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the graph that a worker builds: one or more large ones, tables and small ones, and only these live packed."""
    kinds, packed = placed("exact", num_ps, strategy, monkeypatch, tmp_path)
    assert set(kinds) == {(f"updates/{kind}", ps) for kind in ("large", "table", "small") for ps in range(num_ps)}
    assert {re.sub(r"\d.*", "", name) for name in packed} == {"updates/small"}
    assert len(packed) == 4


def test_the_soaks_model_counts_on_each_ps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of its weights are for that alone, and packed as the others are."""
    kinds, packed = placed("digits", 2, "greedy", monkeypatch, tmp_path)
    assert {kinds["updates/small", ps] for ps in range(2)} == {1}
    assert {"updates/small0:0", "updates/small1:0"} <= packed
