"""The program of the page ``service-pool``: 25 functions in a pool of processes, 5 times."""

from pathlib import Path
from typing import Any

from support.page_programs import check_async, check_sync, program, run
from support.service import service

PAGE = "service-pool.md"


def test_sync_is_the_arithmetic_of_one_process(tmp_path: Path) -> None:
    """The sum of 25 gradients makes an update."""
    check_sync(tmp_path / "job", run(PAGE, tmp_path, "sync", "job"))


def test_async_applies_each_gradient_once(tmp_path: Path) -> None:
    """In whichever order they come."""
    check_async(tmp_path / "job", run(PAGE, tmp_path, "async", "job"))


def test_a_function_that_runs_again_does_not_push() -> None:
    """After the update that it was started for; in async, for which it gets no step, it does."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(program(PAGE), PAGE, "exec"), names)
    with service() as running, running.client() as ps:
        ps.init(names["FIRST"])
        steps = [(names["work"](running.hosts, step, 3), ps.step)[1] for step in (0, 0, 1, 0, None)]
    assert steps == [1, 1, 2, 2, 3]
