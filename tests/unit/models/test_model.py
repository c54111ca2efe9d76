"""The mistakes of a model that runs, in plain messages."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.model_files import INPUT_FN, load_error, whole, write
from support.processes import POWERS, run_tfps

from tfps.errors import ModelError
from tfps.models import loader
from tfps.models.model import Model, mistake

pytestmark = pytest.mark.usefixtures("own_directory")


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


def test_of_a_message_of_many_lines_the_cause_is_reported() -> None:
    """What Keras tells in its second line is in the first of the error, without colors; a long one keeps its end."""
    model = Model("m", Path("/no/such.py"), sys)
    [reported] = mistake(model, ValueError(KERAS), []).problems
    assert "Exception encountered when calling GRUCell.call(). Attempting to slice scalar input. for" in reported
    assert "unroll=True, reset_after=False" in reported
    assert not {"\n", "\x1b", "•"} & set(reported)
    assert "unroll" not in str(mistake(model, ValueError(KERAS.replace("GRUCell", "Dense")), []))
    [reported] = mistake(
        model, ValueError("in user code:\n" + "File x\n" * 1000 + "ValueError: the cause"), []
    ).problems
    assert reported.startswith("--model=m: ValueError: in user code: File x")
    assert reported.endswith("ValueError: the cause")
    assert len(reported) < 1100


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "ModelSpec.__init__() got an unexpected keyword argument 'train_op'",
            "give optimizer=, loss= and",
        ),
        ("Unknown command line flag 'ps_hosts'", "use params for the job's own"),
        ("Trying to access flag --rate before flags were parsed.", "use params for the job's own"),
        ("ModelSpec.__init__() got multiple values for argument 'loss'", "ModelSpec has no mode"),
        ("'SymbolicTensor' object has no attribute 'numpy'", "use log_tensors, or tf.print"),
        ("module 'keras._tf_keras.keras.metrics' has no attribute 'accuracy'", "import tensorflow.compat.v1 as tf"),
        ("Variable global_step already exists, disallowed.", "tf.train.get_or_create_global_step()"),
        ('"global_step" already exists.', "tf.train.get_or_create_global_step()"),
        ("Argument `labels` must not be None.", "return ModelSpec(predictions=...) before"),
        (
            "`LSTMCell` is not available with Keras 3.",
            "Keras 3. (use a layer such as tf.keras.layers.LSTM(..., unroll=True)",
        ),
        ("`dense` is not available with Keras 3.", "Keras 3. (tf.layers was removed"),
        ("None values not supported.", "params['learning_rate'], for one, is None without its flag"),
        ("Do not use tf.reset_default_graph() to clear nested graphs.", "leave it out"),
        ("Input 0 of layer 'dense' is incompatible: expected min_ndim=2, found ndim=1", "must return batches"),
    ],
)
def test_what_ported_models_get_wrong_has_a_hint(message: str, hint: str) -> None:
    """Python's and Keras' words alone do not say what to write instead."""
    assert hint in str(mistake(Model("m", Path(__file__), ModuleType("m")), TypeError(message), []))


def test_a_model_that_parses_flags_or_runs_itself_has_a_hint() -> None:
    """Both end Python, with nothing that names the cause."""
    parsing = load_error("import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n")
    assert "line 2: SystemExit: 2 (a model does not parse flags: use params" in parsing
    # In a process of its own, as absl takes over the logging of the process in which it runs.
    running = write(f"{POWERS}\ntf.app.run(lambda _: None, ['x'])\n")
    ended = run_tfps("plan", f"--model={whole(running)}")
    assert ended.returncode == 2
    assert "SystemExit: no message (leave it out: tfps calls input_fn and model_fn)" in ended.stderr


def test_an_error_without_a_message_has_a_hint_by_its_line() -> None:
    """TensorFlow 2 raises it for a method of TensorFlow 1.x that resource variables do not have."""
    body = "with tf.Graph().as_default():\n        return tf.Variable(1.0).initialized_value() * 2.0\n"
    name = write(
        f"import tensorflow.compat.v1 as tf\n{INPUT_FN}def model_fn(features, labels, mode, params):\n    {body}"
    )
    with pytest.raises(ModelError, match=r"no message \(use the variable's initial_value\)"):
        loader.load(name).model_fn({}, None, "train", {})


def test_a_model_error_of_tfps_itself_is_passed_on() -> None:
    """What a model raises as a ModelError is not wrapped again."""
    body = "def model_fn(features, labels, mode, params):\n    raise ModelError('as it is')\n"
    name = write(f"from tfps.errors import ModelError\n{INPUT_FN}{body}")
    with pytest.raises(ModelError, match=r"^as it is$"):
        loader.load(name).model_fn({}, None, "train", {})


def test_an_error_that_is_not_in_the_model_has_no_line() -> None:
    """An error without a frame of the user's is reported without inventing one."""
    model = Model("m", Path("/no/such.py"), sys)
    reported = mistake(model, ValueError("x % {y}"), [])
    assert reported.problems == ["--model=m: ValueError: x % {y}"]
