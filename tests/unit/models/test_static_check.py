"""What is refused of a model's source before TensorFlow is imported, and in which words."""

from pathlib import Path

import pytest
from support.model_files import INPUT_FN, MODEL_FN, refusal, whole, write

from tfps.errors import ModelError
from tfps.models import static_check

pytestmark = pytest.mark.usefixtures("own_directory")


def with_body(function: str, body: str) -> str:
    """Return a model in which one function has this body."""
    head = MODEL_FN if function == "model_fn" else INPUT_FN
    other = INPUT_FN if function == "model_fn" else MODEL_FN
    return other + head.partition("\n")[0] + "\n" + "".join(f"    {line}\n" for line in body.splitlines())


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


def test_missing_functions_are_reported_together() -> None:
    """A module that lacks both functions is reported with both, and with what to add."""
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
    static_check.check(write(f"{INPUT_FN}\ndef model_fn({parameters}):\n    return spec\n"))


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
    reported, _, shown = problem.partition("\n")
    assert reported == f": {whole(name)}, line {line}: model_fn must return a tfps.ModelSpec."
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
    static_check.check(write(with_body("model_fn", body)))


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
    static_check.check(write(text))


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
    """A ``model_fn`` that returns a variable to which it only assigns tensors is reported; in doubt it is not."""
    model = tmp_path / "mine.py"
    functions = "def input_fn(a, b, c):\n    return x\ndef model_fn(features, labels, mode, params):\n    "
    model.write_text(functions + body)
    if wrong:
        with pytest.raises(ModelError, match=r"line 5: model_fn must return a tfps\.ModelSpec"):
            static_check.check(str(model))
    else:
        static_check.check(str(model))
