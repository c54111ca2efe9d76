"""Models are found by their names, and imported."""

from pathlib import Path

import pytest
from support.model_files import INPUT_FN, MODEL_FN, load_error, refusal, whole, write

from tfps.errors import DataError
from tfps.models import loader, static_check
from tfps.text import show

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.parametrize("name", ["no_such.py", "no/such.py", "no/such", "linear.py", "$(x).py", "a b.py"])
def test_no_such_file(name: str) -> None:
    """A file that is not there is said not to be there, with what a model file is."""
    assert refusal(name) == [": no such file. Give a .py file that defines input_fn and model_fn."]


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    """A directory is called one, with or without a slash."""
    (tmp_path / "d.py").mkdir()
    for name in (str(tmp_path), f"{tmp_path}/", "d.py"):
        assert refusal(name) == [" is a directory: give a .py file that defines input_fn and model_fn."]


@pytest.mark.parametrize("name", ["nosuch", "no.such.module", "minst", "LINEAR", "tfps.nosuch", "sys", "math"])
def test_no_such_module(name: str) -> None:
    """A name that is neither built in nor a module written in Python is answered with what a model can be."""
    [problem] = refusal(name)
    assert problem.startswith(" is not a model: give a built-in name (linear, mnist), a .py file, or a module that can")
    assert problem.endswith("Did you mean mnist?") == (name == "minst")
    assert problem.endswith("Did you mean linear?") == (name == "LINEAR")


@pytest.mark.parametrize("name", [".", "..", ".mine", "a..b", "mine.", "a b", "$(x)", "a-b", "é\n", "1", "x" * 70_000])
def test_no_module_name(name: str) -> None:
    """A text that cannot be a module's name is the same answer on one short line, not an import's error."""
    [problem] = refusal(name)
    assert problem.startswith(" is not a model: ")
    assert f"{problem}{show(name)}".isprintable()
    assert len(problem) < 200


def test_a_dotted_module_is_found_from_here() -> None:
    """``--model=package.module`` is looked for in the current directory, in source, and then imported."""
    write("", "package/__init__.py")
    source = write(f"spec = 5\n{INPUT_FN}{MODEL_FN}", "package/module.py")
    static_check.check("package.module")
    model = loader.load("package.module")
    assert str(model.source) == whole(source)
    assert model.model_fn(1, 2, "train", {}) == 5
    write("def input_fn(mode): return 1\n", "package/other.py")
    assert refusal("package.other")[0].startswith(f": {Path.cwd()}/package/other.py, line 1: input_fn must take ")


def test_a_package_that_cannot_be_imported_shows_its_own_line() -> None:
    """If a dotted module's package fails, its author sees where; a module missing there is not the model missing."""
    source = write("import json\nimport no_such_library\n", "broken/__init__.py")
    write(INPUT_FN + MODEL_FN, "broken/model.py")
    says = "ModuleNotFoundError: No module named 'no_such_library'\n    import no_such_library"
    assert refusal("broken.model") == [f": {whole(source)}, line 2: {says}"]


def test_a_file_is_imported_with_its_neighbors() -> None:
    """A model file imports modules beside it, wherever the command is run, and its functions are called as they are."""
    write("SPEC = 'from beside'\n", "there/beside_it.py")
    name = write(f"from beside_it import SPEC as spec\n{INPUT_FN}{MODEL_FN}", "there/mine.py")
    model = loader.load(name)
    assert model.model_fn({}, None, "train", {}) == "from beside"
    assert model.line_of("model_fn") == f"{whole(name)}, line 4"


def test_an_error_while_importing_shows_the_users_line() -> None:
    """A model that fails as it is imported is answered with the user's line, not with the importer's."""
    name = "mine.py"
    said = load_error(f"import os\nrate = os.environ['NO_SUCH_RATE']\n{INPUT_FN}{MODEL_FN}")
    assert (
        said
        == f"--model={name}: {whole(name)}, line 2: KeyError: 'NO_SUCH_RATE'\n    rate = os.environ['NO_SUCH_RATE']"
    )
    said = load_error(f"{INPUT_FN}{MODEL_FN}\nimport no_such_library\n")
    shown = "ModuleNotFoundError: No module named 'no_such_library'\n    import no_such_library"
    assert said == f"--model={name}: {whole(name)}, line 6: {shown}"


def test_data_of_a_users_model_is_at_least_there(tmp_path: Path) -> None:
    """``--data_dir`` of a model that nobody knows must exist, unless it is a URL; exit 65."""
    for good in ("", str(tmp_path), "gs://bucket/data"):
        loader.check_data("mine.py", good, 2)
    with pytest.raises(
        DataError, match=r"^--data_dir=/no/such does not exist: give the directory that the model reads\.$"
    ) as caught:
        loader.check_data("mine.py", "/no/such", 2)
    assert caught.value.exit_code == 65
