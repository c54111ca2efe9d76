"""A loaded model, and plain messages for the mistakes in its code. Does not import TensorFlow.

A model has two functions at its top level::

    def input_fn(mode, params, input_context): ...        # -> tf.data.Dataset of (features, labels)
    def model_fn(features, labels, mode, params): ...     # -> tfps.ModelSpec
"""

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar, cast

from tfps.errors import ModelError, without_colors
from tfps.models.spec import ModelSpec
from tfps.text import show
from tfps.tf_types import Dataset

_T = TypeVar("_T")

_MAX_CHARS = 1000  # of an error's message
_UNROLL = "a recurrent Keras layer: give it unroll=True, as in tf.keras.layers.LSTM(..., unroll=True)"

_NO_MESSAGE = "no message"

# The replacement to suggest, by a pattern of the error's message; of its line, too, where there is no message.
_HINTS: Mapping[str, str] = {
    r"PartitionedVariable": "tfps splits this variable over the PS: a larger --min_slice_mb keeps it whole",
    r"(RNN|LSTM|GRU)Cell` is not available": "use a layer such as tf.keras.layers.LSTM(..., unroll=True), or tf.scan",
    r"(?<!Cell`) is not available with Keras 3": "tf.layers was removed: use tf.keras.layers, or tf.nn",
    r"tensorflow\S*' has no attribute 'layers'": "use tf.keras.layers, or tf.get_variable and tf.nn",
    r"tensorflow.*\bcontrib\b|\bcontrib\b.*tensorflow": (
        "tf.contrib was removed: use tf.keras.layers for its layers, tfps.make_optimizer or tf.train for its "
        "optimizers, tf.data for its input, or the tf-slim package for slim"
    ),
    r"tensorflow.*estimator|estimator.*tensorflow": (
        "tf.estimator was removed: use tfps.ModelSpec for EstimatorSpec, tfps.ModeKeys for ModeKeys"
    ),
    r"module 'tensorflow(\._api\.v2(?!\.compat)\S*)?' has no attribute '(?!contrib|estimator|layers)": (
        "a name of TensorFlow 1.x: write `import tensorflow.compat.v1 as tf`"
    ),
    rf"{_NO_MESSAGE}: .*\binitialized_value\(\)": "use the variable's initial_value",
    r"Unknown command line flag|before flags were parsed": (
        "a model does not parse flags: use params for the job's own, and constants for others"
    ),
    r"TensorArray output_ta_\S+ Could not write to TensorArray index": _UNROLL,  # as Keras names them
    r"GRUCell\.call\(\)[\s\S]*Attempting to slice scalar input": (
        "Keras' GRU: use tf.keras.layers.GRU(..., unroll=True, reset_after=False)"
    ),
    r"unexpected keyword argument '(train_op|training_hooks|export_outputs|scaffold)'": (
        "tfps runs the step itself: give optimizer=, loss= and predictions= alone"
    ),
    r"(?<![\w/])global_step\"? already exists": "the graph has it: tf.train.get_or_create_global_step()",
    r"Argument `labels` must not be None": "mode 'infer' has none: return ModelSpec(predictions=...) before",
    r"None values not supported": (
        "params['learning_rate'], for one, is None without its flag: tfps.make_optimizer has a default"
    ),
    r"Do not use tf.reset_default_graph": "leave it out: tfps makes each graph",
    rf"{_NO_MESSAGE}: .*\btf\.app\.run\(": "leave it out: tfps calls input_fn and model_fn",
    r"^[0-9]+: .*\bparse_(known_)?args\(": "a model does not parse flags: use params for the job's own",
    r"ModelSpec\S* got multiple values for argument": "ModelSpec has no mode: give each field by its name",
    r"'SymbolicTensor' object has no attribute 'numpy'": (
        "model_fn builds a graph and sees no values: use log_tensors, or tf.print"
    ),
    r"keras\S*\.(metrics|losses)' has no attribute '[a-z]": (
        "a name of TensorFlow 1.x: write `import tensorflow.compat.v1 as tf`"
    ),
    r"expected min_ndim=\d+": "input_fn must return batches: data.batch(params['batch_size'])",
    r"KerasTensor": "call Keras layers on the features themselves, without tf.keras.Input",
    r"is out of scope|must be from the same graph": "create layers and tensors in model_fn: each mode has its graph",
}


class Frame(Protocol):
    """One line of a stack: of a traceback, or of the creation of an operation."""

    @property
    def filename(self) -> str:
        """The file."""

    @property
    def lineno(self) -> int | None:
        """The number of the line."""

    @property
    def line(self) -> str | None:
        """The text of the line."""


@dataclass(frozen=True)
class Model:
    """A loaded model: its module and the file that its author wrote."""

    name: str
    source: Path
    module: ModuleType

    def input_fn(self, *args: object) -> Dataset:
        """Call the module's ``input_fn``; see the docstring of this file."""
        return self._call("input_fn", *args)

    def model_fn(self, *args: object) -> ModelSpec:
        """Call the module's ``model_fn``; see the docstring of this file."""
        return cast(ModelSpec, self._call("model_fn", *args))  # the caller checks what it is

    def _call(self, function: str, *args: object) -> object:
        try:
            return getattr(self.module, function)(*args)
        except (Exception, SystemExit) as error:
            raise mistake_in(self.name, self.source, error) from error

    def line_of(self, function: str) -> str:
        """Return ``file, line N`` of a function of the model."""
        code = getattr(getattr(self.module, function), "__code__", None)
        return f"{code.co_filename}, line {code.co_firstlineno}" if code else str(self.source)


def mistake(model: Model, error: BaseException, frames: Sequence[Frame]) -> ModelError:
    """Return a plain error message, with the user's own line, for an error that the model's code caused.

    Args:
        model: The model.
        error: The exception, from the code itself or from an operation that it built.
        frames: The stack with the innermost frame last: a traceback's frames, or those of the operation's creation.
    """
    return mistake_in(model.name, model.source, error, frames)


def where(model: Model, frames: Sequence[Frame]) -> str:
    """Return ``file, line N`` of the user's innermost line among some frames; empty if no frame is the user's."""
    users = _of_model(model.source, frames)
    return f"{users[-1].filename}, line {users[-1].lineno}" if users else ""


def users_lines(frames: Sequence[Frame]) -> tuple[tuple[str, int | None], ...]:
    """Return the file and line of each frame that is the user's."""
    return tuple((frame.filename, frame.lineno) for frame in frames if _is_users(frame.filename))


def _of_model(source: Path, frames: Sequence[Frame]) -> Sequence[Frame]:
    return [f for f in frames if f.filename == str(source)] or [f for f in frames if _is_users(f.filename)]


def mistake_in(name: str, source: Path, error: BaseException, frames: Sequence[Frame] | None = None) -> ModelError:
    """Return the error message of ``mistake`` for a model that may not be loaded.

    By default, the frames are those of the error.
    """
    if isinstance(error, ModelError):
        return error
    frames = traceback.extract_tb(error.__traceback__) if frames is None else frames
    users = _of_model(source, frames)
    text = _gist(without_colors(str(getattr(error, "message", error)))) or _NO_MESSAGE
    is_exit = isinstance(error, SystemExit)  # its message is a number at most
    seen = f"{text}: {users[-1].line}" if users and (is_exit or text == _NO_MESSAGE) else text
    text += hints(seen)
    if not users:
        return ModelError(f"--model={show(name)}: {type(error).__name__}: {text}")
    place = f"{users[-1].filename}, line {users[-1].lineno}"
    return ModelError(f"--model={show(name)}: {place}: {type(error).__name__}: {text}\n    {users[-1].line}")


def hints(text: str) -> str:
    """Return what to write instead, in parentheses, for an error message of TensorFlow or Python; empty if unknown."""
    return "".join(f" ({hint})" for pattern, hint in _HINTS.items() if re.search(pattern, text))


def _gist(text: str) -> str:
    """Return a message of any length as one short line, which launchers and ``summary.json`` keep whole.

    Keras gives the cause in its second line, and the arguments of the call after it. A traceback ends with the cause.
    """
    lines = [line.strip() for line in text.partition("\nArguments received by")[0].splitlines()]
    short = " ".join(line for line in lines if line)
    return short if len(short) <= _MAX_CHARS else f"{short[: _MAX_CHARS // 2]} ... {short[-_MAX_CHARS // 2 :]}"


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or "site-packages" in filename:
        return False
    return not {Path(__file__).parents[1], Path(traceback.__file__).parent} & set(Path(filename).parents)


def built_by(
    model: Model,
    build: Callable[[], _T],
    function: str = "model_fn",
    failure: str = "no gradient step can be built",
) -> _T:
    """Build what depends on code of a model, such as what a mode adds for it.

    Errors in there come from the model if they lead through a line of the user's, or if TensorFlow raises them, as
    where it finds no gradient.

    Args:
        model: The model.
        build: Builds it.
        function: The function of the model whose place an error names that leads through no line of the user's.
        failure: What such an error means.
    """
    try:
        return build()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if where(model, frames):
            raise mistake(model, error, frames) from error
        if not isinstance(error, (ValueError, TypeError, NotImplementedError)) and type(error) is not LookupError:
            raise
        place, why = model.line_of(function), str(error) + hints(str(error)) or type(error).__name__
        raise ModelError(f"--model={model.name}: {place}: {failure}: {why}") from error
