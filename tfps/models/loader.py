"""Find a model by name, check it before TensorFlow is imported, and import it.

A model is a built-in name, a ``.py`` file or a dotted module, with two functions at its top level::

    def input_fn(mode, params, input_context): ...        # -> tf.data.Dataset of (features, labels)
    def model_fn(features, labels, mode, params): ...     # -> tfps.ModelSpec

``check`` only reads the source, so that a mistake is reported immediately. ``load`` runs it, which imports TensorFlow.
"""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tfps.errors import DataError, ModelError, without_colors
from tfps.text import show

BUILTIN: Mapping[str, str] = {"linear": "tfps.models.linear", "mnist": "tfps.models.mnist"}

# Checks of a built-in model's --data_dir that need no TensorFlow: module:function(data_dir, num_workers).
DATA_CHECKS: Mapping[str, str] = {"mnist": "tfps.data.idx:check"}

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "input_fn": ("mode", "params", "input_context"),
    "model_fn": ("features", "labels", "mode", "params"),
}

_MOST_CHARS = 1000  # of an error's message
_UNROLL = "a recurrent layer of Keras: give it unroll=True, as in tf.keras.layers.LSTM(..., unroll=True)"

# The replacement to suggest, by a pattern of the error's message.
_HINTS: Mapping[str, str] = {
    r"PartitionedVariable": "what tfps splits over the PS, a larger --min_slice_mb keeps whole",
    r"is not available with Keras 3": "tf.layers was removed: use tf.keras.layers, or tf.get_variable and tf.nn",
    r"tensorflow\S*' has no attribute 'layers'": "use tf.keras.layers, or tf.get_variable and tf.nn",
    r"tensorflow.*\bcontrib\b|\bcontrib\b.*tensorflow": (
        "tf.contrib was removed: use tf.keras.layers for its layers, tfps.make_optimizer or tf.train for its "
        "optimizers, tf.data for its input, or the tf-slim package for slim"
    ),
    r"tensorflow.*estimator|estimator.*tensorflow": (
        "tf.estimator was removed: use tfps.ModelSpec for EstimatorSpec, tfps.ModeKeys for ModeKeys"
    ),
    r"module 'tensorflow' has no attribute '(?!contrib|estimator|layers)": (
        "a name of TensorFlow 1.x: import tensorflow.compat.v1 as tf"
    ),
    r"TensorArray output_ta_\S+ Could not write to TensorArray index": _UNROLL,  # as Keras names them
    r"GRUCell\.call\(\)[\s\S]*Attempting to slice scalar input": (
        "Keras' GRU: use tf.keras.layers.GRU(..., unroll=True, reset_after=False)"
    ),
    r"KerasTensor": "call Keras layers on the features themselves, without tf.keras.Input",
    r"is out of scope|must be from the same graph": "make layers and tensors within model_fn: each mode has its graph",
}


@dataclass(frozen=True)
class Model:
    """A loaded model: its module and the file that its author wrote."""

    name: str
    source: Path
    module: ModuleType

    def input_fn(self, *args: Any) -> Any:
        """Call the module's ``input_fn``; see the docstring of this file."""
        return self._call("input_fn", *args)

    def model_fn(self, *args: Any) -> Any:
        """Call the module's ``model_fn``; see the docstring of this file."""
        return self._call("model_fn", *args)

    def _call(self, function: str, *args: Any) -> Any:
        try:
            return getattr(self.module, function)(*args)
        except (Exception, SystemExit) as error:
            raise _mistake(self.name, self.source, error) from error

    def line_of(self, function: str) -> str:
        """Return ``file, line N`` of a function of the model."""
        code = getattr(getattr(self.module, function), "__code__", None)
        return f"{code.co_filename}, line {code.co_firstlineno}" if code else str(self.source)


def check(name: str) -> None:
    """Check a model for mistakes without running it.

    Raises:
        ModelError: If there is no such file or module, or it does not parse. Also if one of the two functions is
            missing or has other parameters, or ``model_fn`` plainly returns something other than a ``ModelSpec``.
    """
    source = find(name)
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except OSError as error:
        raise ModelError(f"--model={show(name)} cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        raise ModelError(_syntax_error(name, source, error)) from None
    problems = [problem for function in SIGNATURES for problem in _function_problems(tree, function)]
    if problems:
        raise ModelError([f"--model={show(name)}: {source}{problem}" for problem in problems])


def beside(source: Path) -> list[str]:
    """Return the files in a model's own directory that it imports, which are missing if only its file is sent."""
    nodes = list(ast.walk(ast.parse(source.read_bytes(), str(source))))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    found = [source.parent / name.partition(".")[0] for name in sorted(named) if name]
    files = [path.with_suffix(".py") if path.with_suffix(".py").is_file() else path for path in found]
    return list(dict.fromkeys(path.name for path in files if path.is_file() or (path / "__init__.py").is_file()))


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
        raise DataError(f"--data_dir={show(data_dir)}: no such file or directory.")


def find(name: str) -> Path:
    """Return the source file of a model.

    Raises:
        ModelError: If there is none.
    """
    if name.endswith(".py") or os.sep in name:
        if not Path(name).is_file():
            wrong = "is a directory" if Path(name).is_dir() else "no such file"
            raise ModelError(f"--model={show(name)}: {wrong}. Give a .py file that defines input_fn and model_fn.")
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
        raise _mistake(name, Path(name), error) from None
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
        raise _mistake(name, source, error) from error


def mistake(model: Model, error: BaseException, frames: Sequence[Any]) -> ModelError:
    """Return a plain error message, with the user's own line, for an error that the model's code caused.

    Args:
        model: The model.
        error: The exception, from the code itself or from an operation that it built.
        frames: The stack with the innermost frame last: a traceback's frames, or those of the operation's creation.
    """
    return _mistake(model.name, model.source, error, frames)


def where(model: Model, frames: Sequence[Any]) -> str:
    """Return ``file, line N`` of the user's innermost line among some frames; empty if no frame is the user's."""
    own = _own(model.source, frames)
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def _own(source: Path, frames: Sequence[Any]) -> Sequence[Any]:
    return [f for f in frames if f.filename == str(source)] or [f for f in frames if _is_users(f.filename)]


def _mistake(name: str, source: Path, error: BaseException, frames: Sequence[Any] | None = None) -> ModelError:
    if isinstance(error, ModelError):
        return error
    frames = traceback.extract_tb(error.__traceback__) if frames is None else frames
    own = _own(source, frames)
    text = _gist(without_colors(str(getattr(error, "message", error)))) or "no message"
    text += "".join(f" ({hint})" for pattern, hint in _HINTS.items() if re.search(pattern, text))
    if not own:
        return ModelError(f"--model={show(name)}: {type(error).__name__}: {text}")
    where = f"{own[-1].filename}, line {own[-1].lineno}"
    return ModelError(f"--model={show(name)}: {where}: {type(error).__name__}: {text}\n    {own[-1].line}")


def _gist(text: str) -> str:
    """Return a message of any length as one short line, which launchers and ``summary.json`` keep whole.

    Keras gives the cause in its second line, and the arguments of the call after it. A traceback ends with the cause.
    """
    lines = [line.strip() for line in text.partition("\nArguments received by")[0].splitlines()]
    told = " ".join(line for line in lines if line)
    return told if len(told) <= _MOST_CHARS else f"{told[: _MOST_CHARS // 2]} ... {told[-_MOST_CHARS // 2 :]}"


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or "site-packages" in filename:
        return False
    return not {Path(__file__).parents[1], Path(traceback.__file__).parent} & set(Path(filename).parents)


def _import_from(directory: str) -> None:
    """Make imports search ``directory`` first, as Python does for a script."""
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _import(name: str, source: Path) -> ModuleType:
    if not (name.endswith(".py") or os.sep in name):
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


def _syntax_error(name: str, source: Path, error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f"{source}, line {line}" if line else str(source)
    text = (getattr(error, "text", None) or "").strip()
    told = f"--model={show(name)}: {where}: {getattr(error, 'msg', None) or error}"
    return f"{told}\n    {text}" if text else told


def _function_problems(tree: ast.Module, function: str) -> list[str]:
    """Return the problems with one of the two functions, each as ``, line N: ...``."""
    wanted = f"{function}({', '.join(SIGNATURES[function])})"
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not found:
        return [] if function in _other_names(tree) else [f" defines no {function}: add def {wanted}."]
    node = found[-1]
    if node.decorator_list:  # a decorator may change parameters and result
        return []
    if not _takes(node.args, len(SIGNATURES[function])):
        return [f", line {node.lineno}: {function} must take {wanted}."]
    return [problem for problem in (_return_problem(node),) if problem]


def _other_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds other than by a top-level ``def``; both functions for ``import *``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            names |= {child.name for child in ast.walk(node) if isinstance(child, ast.FunctionDef)}
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
    return set(SIGNATURES) if "*" in names else names


def _takes(args: ast.arguments, count: int) -> bool:
    """Return whether a function can be called with ``count`` positional arguments."""
    positional = len(args.posonlyargs) + len(args.args)
    required_keywords = sum(default is None for default in args.kw_defaults)
    enough = positional >= count or args.vararg is not None
    return enough and positional - len(args.defaults) <= count and not required_keywords


def _return_problem(node: ast.FunctionDef) -> str:
    """Return the problem with a function's ``return`` statements, if the source alone proves it; else empty."""
    returns = [child for child in _own_statements(node) if isinstance(child, ast.Return)]
    expected = "a tfps.ModelSpec" if node.name == "model_fn" else "a tf.data.Dataset"
    if any(isinstance(child, (ast.Yield, ast.YieldFrom)) for child in _own_statements(node)):
        return f", line {node.lineno}: {node.name} is a generator; it must return {expected}."
    if not returns and not any(isinstance(child, ast.Raise) for child in _own_statements(node)):
        return f", line {node.lineno}: {node.name} returns nothing; it must return {expected}."
    wrong = [r for r in returns if _is_no_spec(r.value) or _is_name_of_no_spec(node, r.value)]
    if not wrong or node.name == "input_fn":
        return ""
    return f", line {wrong[0].lineno}: {node.name} must return {expected}.\n    {ast.unparse(wrong[0])}"


def _is_no_spec(value: ast.expr | None) -> bool:
    """Return whether an expression is plainly something other than a ``ModelSpec``."""
    literal = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.JoinedStr, ast.BinOp, ast.Compare)
    return value is None or isinstance(value, literal) or _is_tensor_call(value)


def _is_name_of_no_spec(node: ast.FunctionDef, value: ast.expr | None) -> bool:
    """Return whether an expression is a variable, and ``_is_no_spec`` holds for each value assigned to it."""
    if not isinstance(value, ast.Name):
        return False
    stores = [
        n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == value.id and isinstance(n.ctx, ast.Store)
    ]
    plain = [a for a in _own_statements(node) if isinstance(a, ast.Assign) and stores and a.targets[0] in stores]
    return bool(plain) and len(plain) == len(stores) and all(_is_no_spec(a.value) for a in plain)


def _is_tensor_call(value: ast.expr) -> bool:
    """Return whether an expression calls one of TensorFlow's own functions, like ``tf.reduce_mean(...)``."""
    if not isinstance(value, ast.Call):
        return False
    root = value.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in ("tf", "tensorflow")


def _own_statements(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function's body, without those of nested functions and classes."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            found += [child, *_own_statements(child)]
    return found
