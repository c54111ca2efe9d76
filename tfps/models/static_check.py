"""Check a model's source for mistakes without running it, so that they are reported immediately.

Does not import TensorFlow.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfps.errors import ModelError
from tfps.models.loader import find
from tfps.text import show

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "input_fn": ("mode", "params", "input_context"),
    "model_fn": ("features", "labels", "mode", "params"),
}


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


def beside(source: Path, folder: Path | None = None, package: str = "") -> list[str]:
    """Return the files and packages in a model's own directory that a file imports: missing if only its file is sent.

    Args:
        source: The file, in that directory or below it.
        folder: The directory; by default the one of the file.
        package: The package that the directory is; empty if the names of imports begin there.
    """
    folder, prefix = folder or source.parent, f"{package}." if package else ""
    own = [*filter(None, package.split(".")), *source.parent.relative_to(folder).parts]
    imported = sorted(_imported(ast.parse(source.read_bytes(), str(source)), own))
    names = [name.removeprefix(prefix).partition(".")[0] for name in imported if name.startswith(prefix)]
    found = [folder / name for name in names if name]
    files = [path.with_suffix(".py") if path.with_suffix(".py").is_file() else path for path in found]
    return list(dict.fromkeys(path.name for path in files if path.is_file() or (path / "__init__.py").is_file()))


def _imported(tree: ast.Module, package: Sequence[str]) -> set[str]:
    """Return the names that a file of a package imports, those of ``from a import b`` as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: max(0, len(package) + 1 - node.level)] if node.level else []
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return names


def _syntax_error(name: str, source: Path, error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f"{source}, line {line}" if line else str(source)
    text = (getattr(error, "text", None) or "").strip()
    message = f"--model={show(name)}: {where}: {getattr(error, 'msg', None) or error}"
    return f"{message}\n    {text}" if text else message


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
    returns = [child for child in _statements(node) if isinstance(child, ast.Return)]
    expected = "a tfps.ModelSpec" if node.name == "model_fn" else "a tf.data.Dataset"
    if any(isinstance(child, (ast.Yield, ast.YieldFrom)) for child in _statements(node)):
        return f", line {node.lineno}: {node.name} is a generator; it must return {expected}."
    if not returns and not any(isinstance(child, ast.Raise) for child in _statements(node)):
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
    plain = [a for a in _statements(node) if isinstance(a, ast.Assign) and stores and a.targets[0] in stores]
    return bool(plain) and len(plain) == len(stores) and all(_is_no_spec(a.value) for a in plain)


def _is_tensor_call(value: ast.expr) -> bool:
    """Return whether an expression calls one of TensorFlow's own functions, like ``tf.reduce_mean(...)``."""
    if not isinstance(value, ast.Call):
        return False
    root = value.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in ("tf", "tensorflow")


def _statements(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function's body, without those of nested functions and classes."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            found += [child, *_statements(child)]
    return found
