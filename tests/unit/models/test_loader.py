"""Models as their authors write them: what is refused before TensorFlow is imported, and in which words."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfps.errors import DataError, ModelError
from tfps.models import loader

INPUT_FN = "def input_fn(mode, params, input_context):\n    return make()\n"
MODEL_FN = "def model_fn(features, labels, mode, params):\n    return spec\n"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
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
        loader.check(name)
    assert caught.value.exit_code == 2
    assert all(problem.startswith(f"--model={loader.show(name)}") for problem in caught.value.problems)
    return [problem.removeprefix(f"--model={loader.show(name)}") for problem in caught.value.problems]


def with_body(function: str, body: str) -> str:
    """Return a model in which one function has this body."""
    head = MODEL_FN if function == "model_fn" else INPUT_FN
    other = INPUT_FN if function == "model_fn" else MODEL_FN
    return other + head.partition("\n")[0] + "\n" + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize("name", ["no_such.py", "no/such.py", "no/such", "linear.py", "$(x).py", "a b.py"])
def test_no_such_file(name: str) -> None:
    """A file that is not there is said not to be there, with what a model file is."""
    assert refusal(name) == [": no such file. Give a .py file that defines input_fn and model_fn."]


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    """A directory is called one, with or without a slash."""
    (tmp_path / "d.py").mkdir()
    for name in (str(tmp_path), f"{tmp_path}/", "d.py"):
        assert refusal(name) == [": is a directory. Give a .py file that defines input_fn and model_fn."]


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
    assert f"{problem}{loader.show(name)}".isprintable()
    assert len(problem) < 200


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without leave to read it is said so."""
    name = write(INPUT_FN + MODEL_FN)

    def forbidden(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert refusal(name) == [" cannot be read: Permission denied."]


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("x = 1\ndef f(:\n    pass\n", 2, "def f(:"),
        (INPUT_FN + MODEL_FN + "    retrun 100 % {x}\n", 5, "retrun 100 % {x}"),
        ("s = 'not closed\n", 1, "s = 'not closed"),
        ("if x:\nprint(1)\n", 2, "print(1)"),
    ],
)
def test_a_syntax_error_shows_file_line_and_text(text: str, line: int, shown: str) -> None:
    """A model that does not parse is answered with file, line, the parser's words and the user's own line."""
    name = write(text)
    [problem] = refusal(name)
    assert problem.startswith(f": {whole(name)}, line {line}: ")
    assert problem.endswith(f"\n    {shown}")


def test_a_file_that_is_no_text() -> None:
    """A file that is not Python source at all is refused with its name."""
    name = write("")
    for data in (b"\x00", b"\xff\xfe\xfa", b"\x7fELF\x00\x01"):
        Path(name).write_bytes(data)
        [problem] = refusal(name)
        assert problem.startswith(f": {whole(name)}")


def test_missing_functions_are_told_together() -> None:
    """A module that lacks both functions is told of both, with what to add."""
    name = write("x = 1\n")
    assert refusal(name) == [
        f": {whole(name)} defines no input_fn: add def input_fn(mode, params, input_context).",
        f": {whole(name)} defines no model_fn: add def model_fn(features, labels, mode, params).",
    ]
    assert refusal(write("class Model:\n    def model_fn(self): pass\n" + INPUT_FN)) == [
        f": {whole(name)} defines no model_fn: add def model_fn(features, labels, mode, params)."
    ]


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "features",
        "features, labels, mode",
        "a, b, c, d, e",
        "a, b, c, *, d",
        "a, b, c, d, *, e",
        "*, a, b, c, d",
        "**kw",
    ],
)
def test_wrong_parameters_are_refused(parameters: str) -> None:
    """A function that cannot be called as it will be is refused, with its line and what it must take."""
    name = write(f"{INPUT_FN}\ndef model_fn({parameters}):\n    return spec\n")
    assert refusal(name) == [f": {whole(name)}, line 4: model_fn must take model_fn(features, labels, mode, params)."]


@pytest.mark.parametrize(
    "parameters",
    ["features, labels, mode, params", "a, b, c, d, e=1", "*args", "a, *rest", "a, b, c, d, *, e=1", "a, b, /, c, d"],
)
def test_other_ways_to_take_four_are_fine(parameters: str) -> None:
    """Whatever can be called with four values is accepted, whatever its parameters are called."""
    loader.check(write(f"{INPUT_FN}\ndef model_fn({parameters}):\n    return spec\n"))


@pytest.mark.parametrize(
    "body",
    [
        "return",
        "return 3",
        "return (loss, optimizer)",
        "return {'loss': 1}",
        "return loss + reg",
        "return f'{loss}'",
        "if mode == 'eval':\n    return [1]\nreturn spec",
        "return tf.reduce_mean(x)",
        "return tensorflow.nn.relu(x)",
    ],
)
def test_a_model_fn_that_plainly_returns_something_else(body: str) -> None:
    """A ``return`` that cannot be a ModelSpec is refused with its line and text."""
    name = write(with_body("model_fn", body))
    wrong = next(line.strip() for line in body.splitlines() if "return" in line)
    line = 1 + [text.strip() for text in Path(name).read_text().splitlines()].index(wrong)
    [problem] = refusal(name)
    told, _, shown = problem.partition("\n")
    assert told == f": {whole(name)}, line {line}: model_fn must return a tfps.ModelSpec."
    assert shown == f"    {wrong}"


@pytest.mark.parametrize(
    ("function", "body", "says"),
    [
        ("model_fn", "loss = 1", "model_fn returns nothing; it must return a tfps.ModelSpec."),
        ("model_fn", "def inner():\n    return spec", "model_fn returns nothing; it must return a tfps.ModelSpec."),
        ("model_fn", "yield spec", "model_fn is a generator; it must return a tfps.ModelSpec."),
        ("input_fn", "pass", "input_fn returns nothing; it must return a tf.data.Dataset."),
        ("input_fn", "while True:\n    yield 1, 2", "input_fn is a generator; it must return a tf.data.Dataset."),
    ],
)
def test_a_function_without_a_result(function: str, body: str, says: str) -> None:
    """A function that returns nothing, or yields, is refused at its ``def``."""
    name = write(with_body(function, body))
    assert refusal(name) == [f": {whole(name)}, line 3: {says}"]


@pytest.mark.parametrize(
    "body",
    [
        "spec = make()\nreturn spec",
        "return make(features)",
        "return self.spec",
        "return specs[mode]",
        "if mode == 'infer':\n    return one\nelif mode == 'eval':\n    return two()\nreturn tfps.ModelSpec(loss=3)",
        "return a if mode == 'eval' else b",
        "def loss_of():\n    return 3\nreturn make(lambda: 5)",
        "class Helper:\n    def value(self):\n        return 3\nreturn Helper().spec()",
        "raise NotImplementedError",
        "with scope():\n    return spec",
        "try:\n    return one()\nexcept ValueError:\n    return two()",
        "return (spec)",
        "return spec._replace(loss=3)",
    ],
)
def test_what_may_be_right_is_not_refused(body: str) -> None:
    """Where the source alone does not prove a mistake there is no complaint."""
    loader.check(write(with_body("model_fn", body)))


@pytest.mark.parametrize(
    "text",
    [
        "from other import input_fn, model_fn\n",
        "from other import *\n",
        "import other\ninput_fn = other.input_fn\nmodel_fn = functools.partial(other.model_fn, x=1)\n",
        "from other import make_input as input_fn\nmodel_fn: Any = build()\n",
        "input_fn, model_fn = build()\n",
        "if x:\n    def input_fn(m, p, i):\n        return 3\nelse:\n    input_fn = f\nfrom a import model_fn\n",
        "try:\n    from a import input_fn\nexcept ImportError:\n    def input_fn(m, p, i): return 3\nmodel_fn = f\n",
        "class model_fn:\n    pass\ninput_fn = lambda mode, params, context: None\n",
        f"@decorate\ndef model_fn(features, labels, mode, params, config):\n    return 3\n{INPUT_FN}",
        f"def input_fn():\n    pass\n{INPUT_FN}{MODEL_FN}",
    ],
)
def test_functions_may_come_from_anywhere(text: str) -> None:
    """The two names may be imported, assigned, defined under a condition, decorated, or defined anew."""
    loader.check(write(text))


def test_a_dotted_module_is_found_from_here() -> None:
    """``--model=package.module`` is looked for in the current directory, in source, and then imported."""
    write("", "package/__init__.py")
    source = write(f"spec = 5\n{INPUT_FN}{MODEL_FN}", "package/module.py")
    loader.check("package.module")
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


def test_a_file_is_imported_with_its_neighbours() -> None:
    """A model file imports modules beside it, wherever the command is run, and its functions are called as they are."""
    write("SPEC = 'from beside'\n", "there/beside_it.py")
    name = write(f"from beside_it import SPEC as spec\n{INPUT_FN}{MODEL_FN}", "there/mine.py")
    model = loader.load(name)
    assert model.model_fn({}, None, "train", {}) == "from beside"
    assert model.line_of("model_fn") == f"{whole(name)}, line 4"


def load_error(text: str) -> str:
    """Return what is said of a model that cannot be imported."""
    with pytest.raises(ModelError) as caught:
        loader.load(write(text))
    assert len(caught.value.problems) == 1
    return str(caught.value)


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


def test_an_error_in_a_function_shows_the_users_line() -> None:
    """A function that fails is answered with the innermost line of the model's own file, also through a library's."""
    text = "import json\ndef parse(text):\n    return json.loads(text)\n"
    name = write(f"{text}{INPUT_FN}def model_fn(features, labels, mode, params):\n    return parse('{{')\n")
    with pytest.raises(ModelError) as caught:
        loader.load(name).model_fn({}, None, "train", {})
    first, _, shown = str(caught.value).partition("\n")
    assert first.startswith(f"--model={name}: {whole(name)}, line 3: JSONDecodeError: Expecting property name")
    assert shown == "    return json.loads(text)"


def test_a_model_that_exits_is_a_mistake() -> None:
    """``sys.exit`` in a model ends no task in silence: it is shown with the user's line like any error."""
    assert load_error("import sys\nsys.exit(3)\n").endswith("mine.py, line 2: SystemExit: 3\n    sys.exit(3)")
    name = write(f"{INPUT_FN}def model_fn(features, labels, mode, params):\n    raise SystemExit\n")
    with pytest.raises(ModelError, match="line 4: SystemExit: no message"):
        loader.load(name).model_fn({}, None, "train", {})


@pytest.mark.parametrize("message", ["100% of {x} and {0} %s %(y)s", "tab\tand\nline", "", "  blanks  ", "é \\n"])
def test_messages_survive_as_they_are(message: str) -> None:
    """A message with ``%`` or braces is text, not a format; an empty one is said to be so; it is one line."""
    body = f"def model_fn(features, labels, mode, params):\n    raise ValueError({message!r})\n"
    name = write(INPUT_FN + body)
    with pytest.raises(ModelError) as caught:
        loader.load(name).model_fn({}, None, "train", {})
    said = (
        f"--model={name}: {whole(name)}, line 4: ValueError: {message.strip().replace(chr(10), ' ') or 'no message'}\n"
    )
    assert str(caught.value) == f"{said}    raise ValueError({message!r})"


KERAS = """Exception encountered when calling GRUCell.call().

\x1b[1mAttempting to slice scalar input. for '{{node strided_slice}} = StridedSlice[Index=DT_INT32]'.\x1b[0m

Arguments received by GRUCell.call():
  • training=False"""  # of Keras 3


def test_of_a_message_of_many_lines_the_cause_is_told() -> None:
    """What Keras tells in its second line is in the first of the error, without colors; a long one keeps its end."""
    model = loader.Model("m", Path("/no/such.py"), sys)
    [told] = loader.mistake(model, ValueError(KERAS), []).problems
    assert "Exception encountered when calling GRUCell.call(). Attempting to slice scalar input. for" in told
    assert "unroll=True, reset_after=False" in told
    assert not {"\n", "\x1b", "•"} & set(told)
    assert "unroll" not in str(loader.mistake(model, ValueError(KERAS.replace("GRUCell", "Dense")), []))
    [told] = loader.mistake(
        model, ValueError("in user code:\n" + "File x\n" * 1000 + "ValueError: the cause"), []
    ).problems
    assert told.startswith("--model=m: ValueError: in user code: File x")
    assert told.endswith("ValueError: the cause")
    assert len(told) < 1100


def test_a_model_error_of_tfps_itself_is_passed_on() -> None:
    """What a model raises as a ModelError is not wrapped again."""
    body = "def model_fn(features, labels, mode, params):\n    raise ModelError('as it is')\n"
    name = write(f"from tfps.errors import ModelError\n{INPUT_FN}{body}")
    with pytest.raises(ModelError, match=r"^as it is$"):
        loader.load(name).model_fn({}, None, "train", {})


def test_an_error_that_is_not_in_the_model_has_no_line() -> None:
    """An error without a frame of the user's is told without inventing one."""
    model = loader.Model("m", Path("/no/such.py"), sys)
    told = loader.mistake(model, ValueError("x % {y}"), [])
    assert told.problems == ["--model=m: ValueError: x % {y}"]


def test_data_of_a_users_model_is_at_least_there(tmp_path: Path) -> None:
    """``--data_dir`` of a model that nobody knows must exist, unless it is a URL; exit 65."""
    for good in ("", str(tmp_path), "gs://bucket/data"):
        loader.check_data("mine.py", good, 2)
    with pytest.raises(DataError, match=r"^--data_dir=/no/such: no such file or directory\.$") as caught:
        loader.check_data("mine.py", "/no/such", 2)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("loss = tf.reduce_mean(labels)\n    return loss", True),
        ("spec = None\n    spec = helper(labels)\n    return spec", False),
        ("loss = tf.reduce_mean(labels)\n    for loss in [helper(loss)]:\n        pass\n    return loss", False),
        ("return labels", False),
    ],
)
def test_a_variable_that_is_only_ever_a_tensor_is_no_spec(tmp_path: Path, body: str, wrong: bool) -> None:
    """A ``model_fn`` that returns a variable to which it only assigns tensors is told so; in doubt, nothing is said."""
    model = tmp_path / "mine.py"
    functions = "def input_fn(a, b, c):\n    return x\ndef model_fn(features, labels, mode, params):\n    "
    model.write_text(functions + body)
    if wrong:
        with pytest.raises(ModelError, match=r"line 5: model_fn must return a tfps\.ModelSpec"):
            loader.check(str(model))
    else:
        loader.check(str(model))
