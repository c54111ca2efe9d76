"""What an error of a run is taken for."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, job, linear, model_of, run_job, shared_servers, target_of, wait_until

import tfps
from tfps.cluster.spec import Task
from tfps.errors import DataError, ModelError
from tfps.models.model import Model
from tfps.runtime import error_translation
from tfps.runtime.graph import cancel_safe_iterator
from tfps.runtime.graph.passes import nan_guard


def test_an_error_says_nothing_of_those_before_it() -> None:
    """TensorFlow would append what it logged of them: a lost PS or a model's mistake after a NaN would be a NaN."""
    model = model_of(lambda *_: None, linear)
    with shared_servers(), tf.Graph().as_default() as graph:
        nan = tf.debugging.check_numerics(tf.placeholder_with_default(float("nan"), []), "the loss")
        broken = tf.strings.to_number(tf.placeholder_with_default("no number", []))
        with tf.Session(target_of(Task("worker", 0)), graph=graph) as session:
            with pytest.raises(tf.errors.InvalidArgumentError, match="the loss"):
                session.run([nan, tf.no_op()])
            with pytest.raises(tf.errors.InvalidArgumentError) as wrong:
                session.run([broken, tf.no_op()])
    assert "the loss" not in wrong.value.message
    assert nan_guard.find_non_finite(wrong.value) is None
    error = error_translation.failed(wrong.value, model, graph, 1)
    assert isinstance(error, ModelError), error
    assert "no number" in str(error)


def never(x: Any) -> Any:
    """Be a Python function with a mistake: it looks for what is not there."""
    return next(value for value in [x] if value is None)


def at_fault(how: str) -> Model:
    """Return a model whose input, or step, or evaluation fails as a lost PS, or the end of the input, would fail."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        data = dataset_of(np.ones(8, np.float32))
        if how == "input_directory":
            return tf.data.TextLineDataset("/proc").map(lambda line: ({"x": tf.strings.to_number(line)}, 0.0))
        if how == "input_stops":
            return data.filter(lambda f, _: tf.ensure_shape(tf.numpy_function(never, [f["x"]], tf.bool), []))
        return data

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        x = features["x"]
        if how == "step_directory":
            x += tf.strings.to_number(tf.io.read_file(tf.strings.join(["/pr", "oc"])))
        if how in ("step_stops", f"{mode}_stops"):
            x = tf.ensure_shape(tf.numpy_function(never, [x], tf.float32), [])
        return linear({"x": x}, labels, mode, params)

    return model_of(input_fn, model_fn)


@pytest.mark.parametrize(
    ("how", "kind", "code", "reported"),
    [
        ("input_directory", DataError, "def input_fn", "the input failed: FailedPreconditionError: /proc; Is a"),
        ("input_stops", DataError, "return next(", "the input failed: InternalError: .*StopIteration"),
        ("step_directory", ModelError, "x += ", "FailedPreconditionError: /proc; Is a directory"),
        ("step_stops", ModelError, "x = tf.ensure_shape", "OutOfRangeError: StopIteration"),
        ("eval_stops", ModelError, "x = tf.ensure_shape", "OutOfRangeError: StopIteration"),
    ],
)
def test_what_a_model_does_is_not_taken_for_another_s(
    how: str, kind: type[Exception], code: str, reported: str
) -> None:
    """Neither a directory where a file should be for a lost PS, nor Python's ``StopIteration`` for the input's end."""
    ended = run_job(at_fault(how), num_workers=1, max_steps=4)
    assert isinstance(ended["worker/0"], kind), ended
    line, *_ = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.strip().startswith(code)]
    assert re.search(f"{__file__}, line {line}: {reported}", str(ended["worker/0"]))


def recurrent(kind: str, **options: bool) -> Model:
    """Return a model with one of Keras' recurrent layers."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones((8, 1, 5, 4), np.float32))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        out = getattr(tf.keras.layers, kind)(6, **options)(features["x"])
        loss = tf.reduce_mean(out)
        return tfps.ModelSpec(loss=loss, optimizer=tfps.make_optimizer(params, "sgd", learning_rate=0.1))

    return model_of(input_fn, model_fn)


@pytest.mark.parametrize(("kind", "fix"), [("LSTM", "unroll=True"), ("GRU", "unroll=True, reset_after=False")])
def test_a_recurrent_layer_of_keras_has_to_be_unrolled(kind: str, fix: str) -> None:
    """Its loop fails, each kind in its own way, as it is built or as it runs: the error names the fix, which works."""
    with job(recurrent(kind), num_workers=1, max_steps=2) as running:
        wait_until(lambda: "worker/0" in running.ended, 300)  # one that cannot be built meets no PS
        error = running.ended["worker/0"]
    assert isinstance(error, ModelError), error
    assert fix in str(error).partition("\n")[0]
    assert "\x1b" not in str(error)
    options = {option.partition("=")[0]: option.endswith("True") for option in fix.split(", ")}
    assert run_job(recurrent(kind, **options), num_workers=1, max_steps=2)["worker/0"] is None


def limited(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that fails at batch 203."""
    with tf.control_dependencies([tf.debugging.assert_less(features["x"], 203.0, message="too many batches")]):
        return linear({"x": tf.identity(features["x"])}, labels, mode, params)


def test_what_fails_in_a_further_step_of_a_run_is_shown_with_its_line() -> None:
    """Each step of a run is reported as the first is, although the operations of the others were made by no line."""

    def numbers(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.arange(1, 400, dtype=np.float32))

    ended = run_job(model_of(numbers, limited), num_workers=1, max_steps=300, steps_per_run=8)
    assert isinstance(ended["worker/0"], ModelError), ended
    line = limited.__code__.co_firstlineno + 2
    assert f"{__file__}, line {line}: InvalidArgumentError: " in str(ended["worker/0"])
    assert "too many batches" in str(ended["worker/0"])


def too_many(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that looks up a row that its table does not have."""
    table = tf.get_variable("items", [10, 1])
    rows = tf.nn.embedding_lookup(table, tf.cast(features["x"], tf.int32))
    return tfps.ModelSpec(loss=tf.reduce_mean(rows), optimizer=tf.train.GradientDescentOptimizer(0.1))


@pytest.mark.parametrize(("wire", "line"), [("packed", 2), ("plain", 3)])
def test_a_lookup_of_a_row_that_is_not_there_names_the_variable(wire: str, line: int) -> None:
    """The packed wire's lookup was made by no line of the model; that of the variable is shown."""

    def numbers(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.arange(1, 400, dtype=np.float32))

    error = run_job(model_of(numbers, too_many), num_workers=1, max_steps=300, wire=wire)["worker/0"]
    assert isinstance(error, ModelError), error
    assert f"{__file__}, line {too_many.__code__.co_firstlineno + line}: InvalidArgumentError: " in str(error)
    assert " = 10 is not in [0, 10), in a lookup of rows of the variable 'items'" in str(error)


@pytest.mark.parametrize("copy", ["", "tfps/step_3/", "tfps/step_3_1/"])
def test_an_operation_of_an_imported_graph_may_fail(copy: str) -> None:
    """What a model imports was made by no line: the error is reported without one."""
    with tf.Graph().as_default() as made:
        tf.strings.to_number(tf.placeholder(tf.string, [], name="text"), name="number")
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(made.as_graph_def(), name="model")
        tf.import_graph_def(graph.as_graph_def(), name=copy.rstrip("/") or "tfps/other")
    text = f"no number\n\t [[{{{{node {copy}model/number}}}}]]"
    error = error_translation.failed(tf.errors.InvalidArgumentError(None, None, text), at_fault("none"), graph, 32)
    assert str(error).startswith("--model=test: InvalidArgumentError: no number")


LOST = """
=====================
UNAVAILABLE: From /job:ps/replica:0/task:0:
Socket closed
Additional GRPC error information from remote target /job:ps/replica:0/task:0 while calling /tensorflow.WorkerService/X:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}
CANCELLED: From /job:worker/replica:0/task:2:
GetNextFromShard was cancelled
\t [[{{node MultiDeviceIteratorGetNextFromShard}}]]
=====================
"""  # what TensorFlow 2.21 said of a PS that was killed


@pytest.mark.parametrize(
    ("kind", "text", "is_lost"),
    [
        (tf.errors.UnavailableError, LOST, True),
        (tf.errors.FailedPreconditionError, LOST.replace("UNAVAILABLE", "FAILED_PRECONDITION"), True),
        (tf.errors.UnavailableError, LOST[LOST.index("From /job:worker") :], False),
    ],
)
def test_an_input_that_was_broken_off_has_not_failed(kind: Any, text: str, is_lost: bool) -> None:
    """A worker that was waiting for its input when a PS was lost tells both; only the first is the cause."""
    with tf.Graph().as_default() as graph:
        iterator = cancel_safe_iterator.CancelSafeIterator(dataset_of(np.ones(8, np.float32)))
        iterator.get_next()
    assert error_translation.is_of_peers(kind(None, None, text), graph) is is_lost


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("OOM when allocating tensor with shape[9]", True),
        ("failed to allocate memory", True),
        ("MemoryError: Unable to create", True),
        ("/data/a; Too many open files", False),
        ("/tmp/b; No space left on device", False),
    ],
)
def test_what_is_used_up_may_be_no_memory(text: str, is_memory: bool) -> None:
    """A smaller batch is the fix only where memory is out."""
    error = tf.errors.ResourceExhaustedError(None, None, text)
    reported = str(error_translation.failed(error, at_fault("none"), tf.Graph(), 32))
    assert text in reported
    assert ("--batch_size" in reported) == is_memory
