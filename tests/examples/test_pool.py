"""The program of the page ``service-pool``: 25 functions in a pool of processes, 5 times."""

from pathlib import Path

from support.page_programs import check_async, check_sync, run

PAGE = "service-pool.md"


def test_sync_is_the_arithmetic_of_one_process(tmp_path: Path) -> None:
    """The sum of 25 gradients makes an update."""
    check_sync(tmp_path / "job", run(PAGE, tmp_path, "sync", "job"))


def test_async_applies_each_gradient_once(tmp_path: Path) -> None:
    """In whichever order they come."""
    check_async(tmp_path / "job", run(PAGE, tmp_path, "async", "job"))
