"""How the modules hang together: who may import whom, who may import TensorFlow, and what the tables name."""

import ast
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.processes import REPO, environment

from tfps.config.command_line import FLAGS
from tfps.launchers.local import task_process
from tfps.launchers.registry import LAUNCHERS
from tfps.models import loader
from tfps.modes.registry import MODES
from tfps.optimizers.registry import OPTIMIZERS

# What the modules of a package may import of tfps, at any depth. The longest name that fits a module is its line.
# Its own package is always allowed.
_BASE = ("tfps.errors", "tfps.config", "tfps.text", "tfps.timeouts")
# What a job writes, and how.
_SUMMARY = ("tfps.summary", "tfps.summary_entries")
_FILES = ("tfps.json_object", "tfps.progress", "tfps.report", "tfps.storage", *_SUMMARY, "tfps.text")
_OUTSIDE = (*_BASE, *_FILES, "tfps.cluster")  # what is known of a job outside its tasks
_CONTENT = ("tfps.models", "tfps.optimizers", "tfps.data")  # what a job trains
_PLATFORM = (*_OUTSIDE, "tfps.models.loader", "tfps.jobs", "tfps.launchers.base", "tfps.launchers.common")
# What the modes use of the graph, which is below them.
_EDITOR, _EFFECTS = "tfps.runtime.graph.graph_editor", "tfps.runtime.graph.passes.side_effects"
_FUNCTIONS = "tfps.runtime.graph.passes.functions"
_TASK = (*_OUTSIDE, *_CONTENT, "tfps.modes", "tfps.tf_types", "tfps.runtime.process")
_TASKS = (*_TASK, "tfps.runtime.graph", "tfps.runtime.checkpoint", "tfps.runtime.coordination")
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "tfps.errors": (),
    "tfps.config": ("tfps.errors", "tfps.text"),
    "tfps.text": ("tfps.errors",),
    "tfps.progress": ("tfps.text",),
    "tfps.report": ("tfps.storage", *_SUMMARY, "tfps.text"),
    "tfps.json_object": (),
    "tfps.malloc": (),
    "tfps.storage": ("tfps.errors",),
    "tfps.summary": ("tfps.errors", "tfps.json_object", "tfps.storage", "tfps.summary_entries"),
    "tfps.summary_entries": ("tfps.json_object",),
    "tfps.plugins": ("tfps.errors",),
    "tfps.tf_types": (),
    "tfps.timeouts": (),
    "tfps.cluster": _BASE,
    "tfps.data": (*_BASE, "tfps.tf_types"),
    "tfps.optimizers": ("tfps.plugins", "tfps.tf_types"),
    "tfps.models": (*_BASE, "tfps.data", "tfps.tf_types"),
    "tfps.modes": (*_BASE, "tfps.cluster", "tfps.plugins", "tfps.tf_types", _EDITOR, _EFFECTS, _FUNCTIONS),
    "tfps.jobs": _OUTSIDE,
    "tfps.launchers": (),
    "tfps.launchers.base": ("tfps.jobs",),
    "tfps.launchers.registry": ("tfps.plugins", "tfps.launchers.base"),
    "tfps.launchers.common": (*_OUTSIDE, "tfps.models.loader", "tfps.jobs", "tfps.launchers.base"),
    "tfps.launchers.docker": _PLATFORM,
    "tfps.launchers.kubernetes": _PLATFORM,
    "tfps.launchers.local": _PLATFORM,
    "tfps.launchers.ray": _PLATFORM,
    "tfps.launchers.slurm": _PLATFORM,
    "tfps.launchers.ssh": _PLATFORM,
    "tfps.runtime": (),
    "tfps.runtime.process": (*_OUTSIDE, "tfps.modes", "tfps.tf_types"),
    "tfps.runtime.graph": _TASK,
    _EDITOR: ("tfps.tf_types", "tfps.cluster.spec"),  # below the modes and all of the graph
    _EFFECTS: ("tfps.tf_types", _EDITOR, _FUNCTIONS, "tfps.runtime.graph.placement"),
    "tfps.runtime.checkpoint": (*_TASK, "tfps.runtime.graph"),
    "tfps.runtime.coordination": _TASK,
    "tfps.runtime.error_translation": _TASKS,
    "tfps.runtime.results": (*_TASKS, "tfps.runtime.error_translation"),
    "tfps.runtime.training": (*_TASKS, "tfps.malloc", "tfps.runtime.error_translation", "tfps.runtime.results"),
    "tfps.runtime.task": (
        *(*_TASKS, "tfps.malloc", "tfps.runtime.results", "tfps.runtime.training", "tfps.runtime.service"),
    ),
    "tfps.client": (*_BASE, "tfps.cluster.addresses", "tfps.malloc"),
    "tfps.runtime.service": (*_TASKS, "tfps.runtime.results", "tfps.client"),
    "tfps.cli": (*_OUTSIDE, *_CONTENT, "tfps.client", "tfps.modes", "tfps.jobs", "tfps.launchers", "tfps.runtime"),
}
# The packages that never import TensorFlow, not even inside a function.
NO_TENSORFLOW = (
    *("tfps.errors", "tfps.config", *_FILES, "tfps.malloc", "tfps.plugins", "tfps.tf_types", "tfps.timeouts"),
    *("tfps.cluster", "tfps.jobs", "tfps.launchers", "tfps.client"),
)

_LAUNCHER_MODULES = [place.partition(":")[0] for place in LAUNCHERS.builtin.values()]
# What runs as TensorFlow: the only modules that import it as they are imported.
_MODELS = (*loader.BUILTIN.values(), "tfps.optimizers.adagrad", "tfps.optimizers.lazy_adam")
_WITH_GRAPHS = (
    "async_step",
    "copies",
    *(f"gossip.{name}" for name in ("collection", "links", "mixing", "step")),
    "local",
    "ring",
    "ssp_step",
    "staleness",
    "sync",
    "updates",
    "worker_queues",
)
_MODES = tuple(f"tfps.modes.{name}" for name in _WITH_GRAPHS)
_DATA = tuple(f"tfps.data.{name}" for name in ("batches", "dealer", "hand", "position", "stream"))
WITH_TENSORFLOW = ("tfps.runtime", *_MODES, *_MODELS, *_DATA)


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
    """Return whether a name is a package's, or the package."""
    return name == package or name.startswith(f"{package}.")


def line(name: str) -> str:
    """Return the line of ``ALLOWED`` that holds for a module."""
    return max((package for package in ALLOWED if within(name, package)), key=len, default="")


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    """No module imports what its line does not allow, not even inside a function."""
    members = [name for name in modules() if line(name) == package]
    assert members
    bad = {
        (name, target)
        for name in members
        for target in imports(name)
        if within(target, "tfps") and target.count(".") > 1 and modules().keys() & _prefixes(target)
        if not any(within(target, allowed) for allowed in (package, *ALLOWED[package]))
    }
    assert bad == set()


def _prefixes(target: str) -> set[str]:
    """Return the names of the modules that a target may be of."""
    parts = target.split(".")
    return {".".join(parts[:n]) for n in range(2, len(parts) + 1)}


def test_every_module_has_its_line() -> None:
    """Each module but the package's face belongs to a line of the table: a new one must find its place."""
    assert {name for name in modules() if not line(name)} == {"tfps", "tfps.__main__"}


@pytest.mark.parametrize("package", NO_TENSORFLOW)
def test_what_runs_without_tensorflow_never_imports_it(package: str) -> None:
    """What the command line and the launchers are made of does not import TensorFlow at any depth."""
    members = [name for name in modules() if within(name, package)]
    assert members
    assert {n for n in members if any(within(target, "tensorflow") for target in imports(n))} == set()


def test_tensorflow_is_imported_late() -> None:
    """Outside what runs as TensorFlow no module imports it at its top level."""
    eager = {name for name in modules() for target in imports(name, top_level=True) if within(target, "tensorflow")}
    assert "tfps.runtime.graph.builder" in eager
    assert {name for name in eager if not any(within(name, of) for of in WITH_TENSORFLOW)} == set()


def test_the_command_line_and_the_launchers_do_not_load_tensorflow() -> None:
    """In a fresh interpreter, importing the package, the command line and the launchers leaves TensorFlow alone."""
    names = ["tfps", "tfps.cli.main", "tfps.cli.tables", *_LAUNCHER_MODULES, "tfps.jobs.follow", "tfps.jobs.display"]
    code = f"import sys, {', '.join(names)}; print(sorted(n for n in sys.modules if n.startswith('tensorflow')))"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_the_choices_of_the_command_line_are_the_tables() -> None:
    """``--to``, ``--mode``, ``--optimizer`` and ``--ps_strategy`` take what the tables hold, in their order."""
    from tfps.runtime.graph import placement  # noqa: PLC0415  imports TensorFlow

    allowed = {name: option.allowed_values() for name, option in FLAGS.items() if option.choices}
    assert allowed["to"] is LAUNCHERS
    assert allowed["mode"] is MODES
    assert allowed["optimizer"] is OPTIMIZERS
    assert allowed["ps_strategy"] == tuple(placement.STRATEGIES)


def test_the_tables_name_what_exists() -> None:
    """Every module and function that a table or a list names as text is there."""
    choices = [option.choices for option in FLAGS.values() if isinstance(option.choices, str)]
    places = (*MODES.builtin.values(), *LAUNCHERS.builtin.values(), *choices)
    named = {*(path.partition(":")[0] for path in places), *loader.BUILTIN.values(), *task_process.PRELOAD}
    functions = [check.split(":") for check in loader.DATA_CHECKS.values()]
    assert named | {module for module, _ in functions} <= set(modules())
    for module, function in functions:
        tree = ast.parse(modules()[module].read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_module_says_why_it_exists() -> None:
    """Every module has a docstring."""
    assert [name for name, file in modules().items() if not ast.get_docstring(ast.parse(file.read_text()))] == []


def test_the_command_line_changes_no_environment() -> None:
    """Importing the command line sets no variable, which ``kubectl``, ``ssh`` and others would inherit."""
    code = "import os; before = dict(os.environ); import tfps.cli.main; print(dict(os.environ) == before)"
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)}  # not what the tests themselves have set
    ended = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"


_MAX_FUNCTION_LINES = 40
_MAX_MODULE_LINES = 300
_MAX_MODULES = 16


def test_no_function_is_too_long() -> None:
    """A function beyond 40 lines, docstring included, is several."""
    long = {
        f"{name}.{node.name}"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (node.end_lineno or 0) - node.lineno + 1 > _MAX_FUNCTION_LINES
    }
    assert long == set()


def test_no_folder_has_too_many_modules() -> None:
    """A folder with more than 16 modules is two."""
    sizes = Counter(file.parent for file in modules().values() if file.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > _MAX_MODULES} == {}


def test_no_module_grows_too_long() -> None:
    """A module beyond 300 lines is two."""
    sizes = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert {name for name, size in sizes.items() if size > _MAX_MODULE_LINES} == set()
