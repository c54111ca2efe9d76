"""The program of the page on PyTorch, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import REPO, environment

PAGE = REPO / "tfps" / "docs" / "service-pytorch.md"


def program() -> str:
    """Return the first block of Python of the page."""
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize(("mode", "updates"), [("async", 600), ("sync", 300)])
def test_two_workers_train_the_convnet(tmp_path: Path, mode: str, updates: int) -> None:
    """All updates are made, and it reads digits of people that it has not seen; it has fewer than 60 lines."""
    assert len(program().splitlines()) < 60
    (tmp_path / "convnet.py").write_text(program())
    ended = subprocess.run(
        [sys.executable, "convnet.py", mode],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = re.fullmatch(r"step (\d+), accuracy (0\.\d+|1\.0+)\n", ended.stdout)
    assert said, ended.stdout
    assert int(said[1]) == updates
    assert float(said[2]) >= 0.85
