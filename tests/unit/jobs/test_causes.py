"""Which task of a failed job is the cause: by exit codes, and a parameter server that was told is never it."""

import itertools

import pytest

from tfps.cluster.spec import Task
from tfps.errors import error_for_failed_worker
from tfps.jobs.causes import by_cause, is_final, may_name_cause, named_cause

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)
_IN_ORDER = [  # each explains all that follow
    *[(CHIEF, 66), (PS, 66), (WORKER, 137), (PS, 137), (WORKER, 170), (PS, 170)],
    *[(PS, 67), (CHIEF, 143), (PS, 0)],
]


@pytest.mark.parametrize(("cause", "follows"), [*itertools.combinations(_IN_ORDER, 2)])
def test_the_cause_comes_before_what_follows_from_it(cause: tuple[Task, int], follows: tuple[Task, int]) -> None:
    """Own failures, then what a restart may mend, then losses of others; then a PS that was told, and what was stopped.

    Of equal codes a worker's comes first: a PS repeats the code of a worker.
    """
    assert by_cause(*cause) < by_cause(*follows)


def test_a_task_without_a_code_comes_last() -> None:
    """It still runs, or never began: no failure of it is known."""
    assert by_cause(CHIEF, None) == by_cause(CHIEF, 0)


@pytest.mark.parametrize(
    ("task", "code", "final"),
    [(PS, 1, True), (CHIEF, 77, True), (CHIEF, 67, True), (PS, 67, False), (CHIEF, 128, False), (CHIEF, 0, False)],
)
def test_what_a_restart_does_not_mend(task: Task, code: int, final: bool) -> None:
    """A code below 128 is final, but not 67 of a PS; a worker's own 67, which its model may choose, is."""
    assert is_final(task, code) == final


@pytest.mark.parametrize(
    ("code", "ends_with"), [(2, 2), (65, 65), (66, 66), (74, 74), *((c, 67) for c in (1, 69, 137))]
)
def test_a_ps_names_the_worker_and_its_code(code: int, ends_with: int) -> None:
    """Its error is read back as it is printed; the same line of a worker, or more words, name nobody."""
    error = error_for_failed_worker(12, code)
    assert error.exit_code == ends_with
    assert named_cause(PS, str(error)) == named_cause(PS, f"error: {error}") == (Task("worker", 12), code)
    assert named_cause(WORKER, f"error: {error}") is None
    assert named_cause(PS, f"{error} Or not.") is None


def test_a_code_that_is_only_assumed_counts_less_than_what_a_ps_was_told() -> None:
    """A worker that still runs is not the cause; but it comes before what was only stopped."""
    assert by_cause(PS, 67) <= by_cause(CHIEF, 170, is_known=False) < by_cause(PS, 143)


def test_a_chief_without_ps_names_the_worker_too() -> None:
    """Only a PS or a chief that ends with 67 may name another task: any worker may print such a line."""
    line = f"error: {error_for_failed_worker(1, 1)}"
    assert named_cause(Task("worker", 0), line) == (Task("worker", 1), 1)
    assert named_cause(Task("worker", 2), line) is None
    assert [may_name_cause(Task("worker", index), 67) for index in (0, 1)] == [True, False]
    assert may_name_cause(Task("ps", 1), 67)
    assert not may_name_cause(Task("worker", 0), 66)
