"""What the harness of ``tests/faults`` takes for wrong in a parameter service; no service is run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_main
from service import SLOTS, BrokenError, Run


def run_of(directory: Path, *journals: str, mode: str = "async") -> Run:
    """Return a run whose clients have written something down."""
    run = Run(mode, directory)
    for slot, text in enumerate(journals):
        (directory / f"{slot}.txt").write_text(text)
        run.clients.append(None)  # type: ignore[arg-type]  only counted
    return run


def counts(*numbers: int) -> Any:
    """Return the parameter that has a number for each client."""
    return np.array([*numbers, *[0] * (SLOTS - len(numbers))], np.float32)


TWO, KILLED = "b\nd 1 5.0\nb\nd 3 6.0\n", "b\nd 2 5.5\nb\n"


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (counts(2, 1), ""),
        (counts(2, 2), ""),  # the push in which it was killed counts, or not
        (counts(1, 1), "client 0: 2 pushes applied, 0 unknown, 1 counted"),
        (counts(3, 1), "client 0: 2 pushes applied, 0 unknown, 3 counted"),
        (counts(2, 0), "client 1: 1 pushes applied, 1 unknown, 0 counted"),
        (counts(2, 3), "client 1: 1 pushes applied, 1 unknown, 3 counted"),
    ],
)
def test_every_push_counts_once(tmp_path: Path, found: Any, problem: str) -> None:
    """One that has returned is there, and none twice."""
    run = run_of(tmp_path, TWO, KILLED)
    if not problem:
        run._check_counts(found, counts(), -math.inf)
        return
    with pytest.raises(BrokenError, match=problem):
        run._check_counts(found, counts(), -math.inf)


@pytest.mark.parametrize(("last", "is_fine"), [(7, True), (6, True), (5, False), (8, False)])
def test_after_a_loss_the_pushes_since_the_checkpoint_count(tmp_path: Path, last: int, is_fine: bool) -> None:
    """The first of them may be in the checkpoint: it was under way at the loss, and was sent again."""
    run = run_of(tmp_path, "b\nd 1 5.0\nb\nd 2 9.0\nb\nd 3 9.5\n")
    if is_fine:
        run._check_counts(counts(last), counts(5), 7.0)
        return
    with pytest.raises(BrokenError):
        run._check_counts(counts(last), counts(5), 7.0)


@pytest.mark.parametrize(("mode", "size"), [("async", 1), ("sync", 2)])
def test_a_checkpoint_is_whole(tmp_path: Path, mode: str, size: int) -> None:
    """No parameter has more or fewer pushes than the step says."""
    run = run_of(tmp_path, mode=mode)
    values = {"a": np.full(5, 3.0 * size), "b": np.full(5, 3.0 * size), "counts": counts(3 * size)}
    run._check_whole(3, values)
    for name, value in values.items():
        wrong = {**values, name: value + np.eye(1, len(value))[0]}
        with pytest.raises(BrokenError, match="checkpoint 3 holds"):
            run._check_whole(3, wrong)


def test_the_pause_is_the_longest_time_without_a_push(tmp_path: Path) -> None:
    """Of anybody, from the fault on."""
    run = run_of(tmp_path, TWO, KILLED)
    run.at = 4.9
    assert run.pause(8.0) == pytest.approx(2.0)
    assert run.pushes(1).pending == 1


def test_the_table_has_what_did_not_hold() -> None:
    """With the number of runs that held."""
    runs = [
        service_main.Result("garbage", "async", 1, settle_secs=1.0, lost=0, left=0),
        service_main.Result("garbage", "async", 2, outcome="failed", problem="it hung", settle_secs=3.0, left=1),
    ]
    found = service_main.table(runs, ["scripts/faults --service"])
    assert "| async | 2 | 1 | 2.0 / 3.0 | 0 | - | 1 |" in found
    assert "- garbage on the ports, 200 times, async: it hung" in found
