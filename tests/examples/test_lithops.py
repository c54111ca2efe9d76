"""The program of the page ``service-lithops``: 25 functions of Lithops on this machine, 5 times."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.page_programs import check_async, check_sync, run
from support.processes import wait_gone

pytest.importorskip("lithops")

PAGE = "service-lithops.md"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory; end what Lithops leaves behind, which deletes its files for a few seconds."""
    yield tmp_path
    left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_in(pid, tmp_path)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    wait_gone(left, 30)


def _is_in(pid: int, directory: Path) -> bool:
    try:
        return f"TMPDIR={directory}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def test_sync_is_the_arithmetic_of_one_process(directory: Path) -> None:
    """The sum of 25 gradients makes an update."""
    check_sync(directory / "job", run(PAGE, directory, "sync", "job", secs=250))


def test_async_applies_each_gradient_once(directory: Path) -> None:
    """In whichever order they come."""
    check_async(directory / "job", run(PAGE, directory, "async", "job", secs=250))
