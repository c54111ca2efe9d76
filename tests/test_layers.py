"""How the modules hang together: who may import whom, who may import TensorFlow, and what the tables name."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers import REPO, environment

from tfps import cli, models
from tfps.launchers import LAUNCHERS, local_task
from tfps.models.optimizers import OPTIMIZERS
from tfps.modes import MODES

# By the beginning of a module's name, what it must not import, at any depth. cli -> launchers | runtime -> modes,
# models, data -> config, cluster, errors.
_ABOVE = ("tfps.cli", "tfps.__main__", "tfps.verbs", "tfps.tables")
_ACTS = (*_ABOVE, "tfps.launchers", "tfps.runtime")
_KINDS = (*_ACTS, "tfps.modes", "tfps.models", "tfps.data")
_CLUSTER = ("tfps.cluster", "tfps.hosts", "tfps.tf_config", "tfps.slurm_env")
FORBIDDEN: Mapping[str, tuple[str, ...]] = {
    "tfps.errors": ("tfps", "tensorflow"),
    "tfps.values": ("tfps", "tensorflow"),
    "tfps.config": (*_KINDS, *_CLUSTER, "tensorflow"),
    **dict.fromkeys(_CLUSTER, (*_KINDS, "tensorflow")),
    "tfps.report": (*_KINDS, "tensorflow"),
    "tfps.models": (*_ACTS, "tfps.modes"),
    "tfps.modes": _ACTS,
    "tfps.data": (*_ACTS, "tfps.modes", "tfps.models"),
    "tfps.runtime": (*_ABOVE, "tfps.launchers"),
    "tfps.launchers": (*_ABOVE, "tfps.runtime", "tensorflow"),
}

# What runs as TensorFlow: the only modules that import it as they are imported.
_MODELS = (*models.BUILTIN.values(), "tfps.models.exact_adagrad", "tfps.models.lazy_adam")
WITH_TENSORFLOW = ("tfps.runtime", *MODES.values(), "tfps.modes.atomic_update", *_MODELS, "tfps.data.batches")


def modules() -> dict[str, Path]:
    """Return every module's file by its name."""
    files = sorted((REPO / "tfps").rglob("*.py"))
    names = [".".join(file.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


def imports(name: str, top_level: bool = False) -> set[str]:
    """Return what a module imports, ``from a import b`` as ``a.b``; only as it is imported itself, or at any time."""
    file = modules()[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in _statements(ast.parse(file.read_text()), top_level):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def _statements(tree: ast.AST, top_level: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a tree; for the top level without those in functions and in ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        yield child
        later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        checked_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not (top_level and (later or checked_only)):
            yield from _statements(child, top_level)


def within(name: str, package: str) -> bool:
    """Tell whether a name is a package's, or the package."""
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_go_one_way(layer: str) -> None:
    """No module of a layer imports anything of a layer above it, not even inside a function."""
    members = [name for name in modules() if within(name, layer)]
    assert members
    bad = {
        (name, target)
        for name in members
        for target in imports(name)
        if any(within(target, forbidden) for forbidden in FORBIDDEN[layer])
    }
    assert bad == set()


def test_every_layer_is_held() -> None:
    """Each module but those above all others belongs to a layer of the table: a new one must find its place."""
    held = (*FORBIDDEN, *_ABOVE)
    assert {n for n in modules() if n != "tfps" and not any(within(n, layer) for layer in held)} == set()


def test_tensorflow_is_imported_late() -> None:
    """Outside what runs as TensorFlow no module imports it at its top level."""
    eager = {name for name in modules() for target in imports(name, top_level=True) if within(target, "tensorflow")}
    assert "tfps.runtime.graph" in eager
    assert {name for name in eager if not any(within(name, of) for of in WITH_TENSORFLOW)} == set()


def test_the_command_line_and_the_launchers_do_not_load_tensorflow() -> None:
    """In a fresh interpreter, importing the package, the command line and the launchers leaves TensorFlow alone."""
    names = ["tfps", "tfps.cli", "tfps.tables", *LAUNCHERS.values(), "tfps.launchers.follow", "tfps.launchers.view"]
    code = f"import sys, {', '.join(names)}; print(sorted(n for n in sys.modules if n.startswith('tensorflow')))"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_the_choices_of_the_command_line_are_the_tables() -> None:
    """``--mode``, ``--optimizer`` and ``--ps_strategy`` take what the tables hold, in their order."""
    from tfps.runtime import placement  # noqa: PLC0415  imports TensorFlow

    assert cli.CHOICES["mode"] == tuple(MODES)
    assert cli.CHOICES["optimizer"] == tuple(OPTIMIZERS)
    assert cli.CHOICES["ps_strategy"] == tuple(placement.STRATEGIES)


def test_the_tables_name_what_exists() -> None:
    """Every module and function that a table or a list names as text is there."""
    named = {*MODES.values(), *models.BUILTIN.values(), *LAUNCHERS.values(), *local_task.PRELOAD}
    functions = [check.split(":") for check in models.DATA_CHECKS.values()]
    assert named | {module for module, _ in functions} <= set(modules())
    for module, function in functions:
        tree = ast.parse(modules()[module].read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_module_says_why_it_exists() -> None:
    """Every module has a docstring."""
    assert [name for name, file in modules().items() if not ast.get_docstring(ast.parse(file.read_text()))] == []


def test_no_module_is_too_long() -> None:
    """A module that grows beyond 400 lines is two."""
    sizes = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
