"""The final report of a job."""

import math
from typing import Any

import pytest

from tfps import report
from tfps.summary import JobSummary


def final_lines(summary: dict[str, Any], model_dir: str | None) -> list[str]:
    """Return the report of a job whose ``summary.json`` has these entries."""
    return report.final_lines(JobSummary.from_json(summary), model_dir)


@pytest.mark.parametrize(
    ("steps", "runs", "reported"),
    [
        (1, 1, "1 step a run"),
        (8, 1, "8 steps a run"),
        (8, 2, "8 steps a run, 2 runs in flight"),
    ],
)
def test_the_report_tells_the_pace(steps: int, runs: int, reported: str) -> None:
    """How many steps a run took, and how many runs were in flight: facts, and no warning."""
    tasks: dict[str, object] = {name: {} for name in ("ps/0", "worker/0", "worker/1")}
    summary = {"pace": {"steps_per_run": steps, "runs_in_flight": runs}, "tasks": tasks}
    assert final_lines(summary, None)[1:] == [f"  pace           {reported}"]


@pytest.mark.parametrize(
    ("rounds", "steps", "reported"),
    [
        ((20, 16, 16), 320, "20 of 16 steps"),
        ((21, 16, 16), 330, "21 of at most 16 steps"),
        ((1, 1, 1), 1, "1 of 1 step"),
        ((4, 12, 16), 64, "4 of 16 steps, 12 of the worker with the fewest"),
    ],
)
def test_the_report_tells_the_rounds(rounds: tuple[int, int, int], steps: int, reported: str) -> None:
    """How many this run has made, and of how many steps; the last one may be shorter."""
    made = dict(zip(("made", "fewest_steps", "most_steps"), rounds, strict=True))
    summary = {"global_step": 7 + steps, "resumed_from_step": 7, "rounds": made}
    assert final_lines(summary, None)[1:] == [f"  rounds         {reported}"]


def test_the_final_report() -> None:
    """A job's last words: steps, time, speed, loss, metrics, and where its files are."""
    summary: dict[str, Any] = {"global_step": 1000, "seconds": 61.2, "examples_per_sec": 12345.6, "loss": 0.04567}
    summary |= {"eval": {"accuracy": 0.9153, "loss": 0.25, "note": "text"}, "checkpoint": "m/model.ckpt-1000"}
    summary |= {"tasks": {"ps/0": {"restarts": 0}, "worker/1": {"restarts": 2}}, "batches_skipped": 1234}
    summary |= {"first_step_secs": 4.26}
    assert final_lines(summary, "m") == [
        "done: step 1,000 after 61 s, 12,346 examples/s",
        "  first step     4.3 s after the start of the command",
        "  training loss  0.04567 (chief)",
        "  eval accuracy  0.9153",
        "  eval loss      0.25",
        "  restarts       worker/1 2",
        "  skipped        1,234 batches",
        "  checkpoint     m/model.ckpt-1000",
        "  logs           m/logs",
    ]


def test_the_report_says_why_there_is_no_training_loss() -> None:
    """The chief has taken no step, and others have; if it is not known who has, the line is left out."""
    steps = {"worker/0": {"steps": 0}, "worker/1": {"steps": 7}}
    none = "  training loss  none: it is that of the chief, worker/0, which took no step"
    assert final_lines({"global_step": 7, "tasks": steps}, None)[1:] == [none]
    for tasks in ({}, {"worker/0": {}, "worker/1": {"steps": 7}}, {"worker/0": {"steps": 0}}):
        assert final_lines({"global_step": 7, "tasks": tasks}, None)[1:] == []


def test_a_job_that_was_at_its_end_had_nothing_to_train() -> None:
    """The report says so, without a time and a pace, which no step had."""
    summary: dict[str, Any] = {"global_step": 1400, "max_steps": 1400, "resumed_from_step": 1400, "seconds": 0.3}
    nothing = "done: nothing to train, step 1,400 was reached before: raise --max_steps to continue"
    assert final_lines(summary | {"eval": {"accuracy": 0.5}}, None) == [nothing, "  eval accuracy  0.5"]
    assert final_lines(summary | {"first_step_secs": None, "recovery_secs": 0.0}, None) == [nothing]
    lost_a_ps = summary | {"first_step_secs": 4.0}
    assert final_lines(lost_a_ps, None)[0] == "done: step 1,400 after 0.3 s, resumed from step 1,400"
    input_ended = summary | {"max_steps": 2000}
    assert final_lines(input_ended, None) == ["done: step 1,400 after 0.3 s, resumed from step 1,400"]


@pytest.mark.parametrize(("epochs", "times"), [(1, "1 time"), (2, "2 times")])
def test_a_job_whose_epochs_were_complete_had_nothing_to_train(epochs: int, times: str) -> None:
    """It is reported as a job at ``--max_steps`` is, with the flag to raise; a failed one is not."""
    summary: dict[str, Any] = {"status": "done", "global_step": 126, "max_steps": 2**63 - 1, "epochs": epochs}
    summary |= {"resumed_from_step": 126, "seconds": 0.0}
    nothing = f"done: nothing to train, each example was read {times} before, at step 126: raise --epochs to continue"
    assert final_lines(summary, None) == [nothing]
    assert final_lines(summary | {"resumed_from_step": 100}, None)[0].startswith("done: step 126 after")
    assert final_lines(summary | {"status": "failed"}, None)[0].startswith("done: step 126 after")
    assert final_lines(summary | {"max_steps": 126}, None)[0].endswith("raise --max_steps to continue")


def test_a_longer_name_moves_all_values() -> None:
    """They begin in one column."""
    summary = {"eval": {"mean_per_class": 0.5}, "loss": 0.25}
    assert final_lines(summary, None)[1:] == [
        "  training loss       0.25 (chief)",
        "  eval mean_per_class 0.5",
    ]


def test_metrics_that_are_no_plain_numbers_are_in_the_final_report() -> None:
    """A loss that is NaN, which JSON has not, and a metric for each class are reported, too."""
    metrics = {"loss": None, "auc": math.nan, "recall": [0.5, None, 1.0], "matrix": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]}
    assert final_lines({"eval": metrics, "batches_skipped": 1}, None)[1:] == [
        "  eval loss      not finite",
        "  eval auc       not finite",
        "  eval recall    0.5 not finite 1",
        "  eval matrix    1 2 3 4 5 6 7 8 ... (9 in all)",
        "  skipped        1 batch",
    ]


def test_the_final_report_of_little() -> None:
    """A summary without much in it, or with nulls, makes a report too; a resumed job says from where."""
    assert final_lines({}, None) == ["done: step 0 after 0.0 s"]
    nulls = {
        "global_step": 5,
        "seconds": None,
        "examples_per_sec": None,
        "loss": None,
        "eval": None,
        "checkpoint": None,
    }
    assert final_lines({**nulls, "resumed_from_step": 3}, "m") == [
        "done: step 5 after 0.0 s, resumed from step 3",
        "  checkpoint     none",
        "  logs           m/logs",
    ]


@pytest.mark.parametrize(
    ("summary", "reported"),
    [
        ({"is_blocking": False, "steps_per_sec": {"worker/0": 10.0, "worker/1": 9.2, "worker/2": 9.6}}, ""),
        (
            {"is_blocking": False, "steps_per_sec": {"worker/0": 10.0, "worker/1": 2.5, "worker/2": 10.0}},
            "worker/1: 25% of the others' steps a second",
        ),
        ({"is_blocking": False, "steps_per_sec": {"worker/0": 10.0, "worker/1": 2.5}, "seconds": 2.0}, ""),
        ({"is_blocking": False, "steps_per_sec": {"worker/0": 10.0}}, ""),
        ({"is_blocking": True, "steps_per_sec": {"worker/0": 10.0, "worker/1": 2.5}, "behind": {}}, ""),
        ({"is_blocking": True, "behind": {"worker/0": 0.3, "worker/1": 0.4}}, ""),
        ({"is_blocking": True, "behind": {"worker/1": 0.1}}, ""),
        (
            {"is_blocking": True, "behind": {"worker/0": 0.33, "worker/1": 0.6}},
            "worker/1: the others waited for it 60% of the time",
        ),
        (
            {"is_blocking": False, "steps_per_sec": {"worker/0": 1.0, "worker/1": 1.0}, "behind": {"worker/1": 0.4}},
            "worker/1: at less than half the others' pace 40% of the time",
        ),
        (
            {"is_blocking": True, "behind": {"worker/0": 0.05, "worker/1": 0.75}},
            "worker/1: the others waited for it 75% of the time",
        ),
        ({}, ""),
    ],
)
def test_a_worker_that_is_clearly_slower_is_named(summary: dict[str, Any], reported: str) -> None:
    """In async its pace tells, in sync how often the others waited for it alone."""
    assert report.slowest(JobSummary.from_json(summary)) == reported


def test_the_course_of_a_job_is_reported() -> None:
    """The report tells what was stale, lost, started again and dropped."""
    summary: dict[str, Any] = {
        "staleness": [50, 40, 5, 3, 1, 1],
        "tasks": {
            "ps/0": {"restarts": 0},
            "worker/1": {"restarts": 2, "restarted_after": ["SIGKILL", "exit code 170"]},
        },
        "recovery_secs": 4.25,
        "gradients_dropped": 1234,
    }
    assert final_lines(summary, None)[1:] == [
        "  staleness      0: 50%, 1: 40%, 2: 5%, 3: 3%, 4: 1%, 5 or more: 1% of the steps",
        "  restarts       worker/1 2 (after SIGKILL, exit code 170); 4.2 s lost to recovery",
        "  dropped        1,234 gradients that came too late",
    ]
    assert final_lines({"staleness": [7]}, None)[1:] == []
