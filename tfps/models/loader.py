"""Find a model by name, and import it.

A model is a built-in name, a ``.py`` file or a dotted module; ``model`` describes its two functions. ``find`` and
``check_data`` do not import TensorFlow. ``load`` runs the model's module, which does.
"""

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tfps.errors import DataError, ModelError
from tfps.models.model import Model, mistake_in
from tfps.text import show

BUILTIN: Mapping[str, str] = {"linear": "tfps.models.linear", "mnist": "tfps.models.mnist"}

# Checks of a built-in model's --data_dir that need no TensorFlow: module:function(data_dir, num_workers).
DATA_CHECKS: Mapping[str, str] = {"mnist": "tfps.data.idx:check"}


def check_data(name: str, data_dir: str, num_workers: int) -> None:
    """Check a model's data for mistakes without TensorFlow.

    Raises:
        DataError: If ``--data_dir`` does not exist, or is not what the built-in model reads.
    """
    if not data_dir or "://" in data_dir:
        return
    if name in DATA_CHECKS:
        module, _, function = DATA_CHECKS[name].partition(":")
        getattr(importlib.import_module(module), function)(data_dir, num_workers)
    elif not Path(data_dir).exists():
        raise DataError(f"--data_dir={show(data_dir)} does not exist: give the directory that the model reads.")


def is_path(name: str) -> bool:
    """Return whether ``--model`` is a path; else it is a built-in model or a module, even if a file has that name."""
    return name.endswith(".py") or os.sep in name


def package_of(name: str, source: Path) -> str | None:
    """Return the package that the directory of a model's file is.

    It is empty for a path, as imports begin in that directory, and ``None`` for a module that is in no package.
    """
    if is_path(name):
        return ""
    return (name if source.name == "__init__.py" else name.rpartition(".")[0]) or None


def find(name: str) -> Path:
    """Return the source file of a model.

    Raises:
        ModelError: If there is none.
    """
    if is_path(name):
        if not Path(name).is_file():
            wrong = " is a directory: give" if Path(name).is_dir() else ": no such file. Give"
            raise ModelError(f"--model={show(name)}{wrong} a .py file that defines input_fn and model_fn.")
        return Path(name).resolve()
    if not all(part.isidentifier() for part in name.split(".")):
        raise ModelError(_not_found(name))
    with contextlib.suppress(FileNotFoundError):  # the working directory is gone and holds no module
        _import_from(os.getcwd())
    try:
        spec = importlib.util.find_spec(BUILTIN.get(name, name))
    except (Exception, SystemExit) as error:  # a dotted name imports its parent packages, the user's code
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ModelError(_not_found(name)) from None
        raise mistake_in(name, Path(name), error) from None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ModelError(_not_found(name))
    return Path(spec.origin)


def load(name: str) -> Model:
    """Import a model.

    Raises:
        ModelError: As ``find``, or if the import fails: the text shows the user's own line.
    """
    source = find(name)
    try:
        return Model(name, source, _import(name, source))
    except (Exception, SystemExit) as error:
        raise mistake_in(name, source, error) from error


def _import_from(directory: str) -> None:
    """Make imports search ``directory`` first, as Python does for a script."""
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _import(name: str, source: Path) -> ModuleType:
    if not is_path(name):
        return importlib.import_module(BUILTIN.get(name, name))
    _import_from(str(source.parent))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    if spec is None or spec.loader is None:
        raise ModelError(f"--model={show(name)} is not a Python file: give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(source.stem, module)
    spec.loader.exec_module(module)
    return module


def _not_found(name: str) -> str:
    close = difflib.get_close_matches(name.lower()[:80], list(BUILTIN), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"--model={show(name)} is not a model: give a built-in name ({', '.join(BUILTIN)}), "
        f"a .py file, or a module that can be imported from here.{hint}"
    )
