"""What is private to another library, or to another object, is used in few places."""

import ast
from collections.abc import Iterator, Mapping

import pytest
from support.processes import REPO

MODULES = {str(file.relative_to(REPO / "tfps")): file for file in sorted((REPO / "tfps").rglob("*.py"))}

_EXIT = "ends the process without Python's clean-up; a documented function, whatever its name"
EXCEPTIONS: Mapping[str, Mapping[str, str]] = {
    "client/adapters/torch_module.py": {"_orig_mod": "PyTorch has no public name for the module that was compiled"},
    "cli/run.py": {"_exit": _EXIT, "_run_exitfuncs": "runs the exit handlers before such an end"},
    "launchers/local/fork_server.py": dict.fromkeys(
        ("_forkserver_address", "_forkserver_pid"), "Python has no public name for it"
    ),
    "runtime/checkpoint/restore.py": {"_get_save_slice_info": "to be graph_editor.slice_info"},
    "runtime/checkpoint/manifest.py": {"_asdict": "a documented method of named tuples, whatever its name"},
    "runtime/coordination/failure_notice.py": {"_exit": _EXIT},
    "runtime/error_translation.py": {"_functions": "to be a function of graph_editor"},
    "runtime/graph/cancel_safe_iterator.py": dict.fromkeys(
        ("_flat_structure", "_apply_debug_options", "_variant_tensor", "_input_dataset", "_buffer_size"),
        "an iterator of its own needs the inside of tf.data's; nothing else does",
    ),
    "runtime/graph/passes/variable_splitting.py": {
        "_embedding_lookup_and_transform": "the patch of the embedding lookup replaces it"
    },
    "runtime/process/forkserver_preload.py": {"_exit": _EXIT},
    "runtime/process/request_ids.py": {"_handle": "ctypes has no public name for the handle of a library"},
    "runtime/process/session.py": dict.fromkeys(("_c_op", "_as_tf_output"), "the session calls TensorFlow's C API"),
    "runtime/process/shutdown.py": {"_exit": _EXIT},
    "runtime/service/parameters/store.py": dict.fromkeys(
        ("_create_slots", "_finish", "_non_slot_variables", "_prepare"),
        "a server needs the optimizer's own variables before its first update, and an update of none of its parameters",
    ),
}
GRAPH_EDITOR = "runtime/graph/graph_editor.py"


def private_names(source: str) -> Iterator[str]:
    """Yield each private attribute that a module uses of an object that is not ``self``, ``cls`` or ``super()``."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        if ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.attr


@pytest.mark.parametrize("name", [name for name in MODULES if name != GRAPH_EDITOR])
def test_private_names_are_used_in_the_graph_editor(name: str) -> None:
    """No module but ``graph_editor`` uses what is private to another object, except for the list with its reasons."""
    assert set(private_names(MODULES[name].read_text())) == set(EXCEPTIONS.get(name, ()))


def test_the_graph_editor_uses_each_private_name_in_one_function() -> None:
    """A change of TensorFlow's private graph API concerns one or two functions, of one module."""
    functions = [
        node for node in ast.parse(MODULES[GRAPH_EDITOR].read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    uses: dict[str, list[str]] = {}
    for function in functions:
        for name in set(private_names(ast.unparse(function))):
            uses.setdefault(name, []).append(function.name)
    several = {name: users for name, users in uses.items() if len(users) > 1}
    assert several.keys() <= {"_add_control_inputs", "_get_control_flow_context"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("op._add_control_input(other)", ["_add_control_input"]),
        ("self._graph._is_function(name)", ["_is_function"]),
        ("super()._close()\nself._x = cls._y", []),
        ("type(one).__name__", []),
    ],
)
def test_the_check_finds_private_names(source: str, names: list[str]) -> None:
    """The check sees chains of attributes, and lets an object use its own."""
    assert list(private_names(source)) == names
