"""Model files as their authors write them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfps.errors import ModelError
from tfps.models import loader, static_check
from tfps.text import show

INPUT_FN = "def input_fn(mode, params, input_context):\n    return make()\n"
MODEL_FN = "def model_fn(features, labels, mode, params):\n    return spec\n"


@pytest.fixture
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Import from the test's own directory, and forget what it imported."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(text: str, name: str = "mine.py") -> str:
    """Write a model; return its name, from here."""
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return name


def whole(name: str) -> str:
    """Return the whole path of a model, as errors show it."""
    return str(Path(name).resolve())


def refusal(name: str) -> list[str]:
    """Return the problems of a model that ``check`` must refuse; each names the flag and its value."""
    with pytest.raises(ModelError) as caught:
        static_check.check(name)
    assert caught.value.exit_code == 2
    assert all(problem.startswith(f"--model={show(name)}") for problem in caught.value.problems)
    return [problem.removeprefix(f"--model={show(name)}") for problem in caught.value.problems]


def load_error(text: str) -> str:
    """Return what is said of a model that cannot be imported."""
    with pytest.raises(ModelError) as caught:
        loader.load(write(text))
    assert len(caught.value.problems) == 1
    return str(caught.value)
