"""Call a model's functions, only here, and check their results. Errors name the line of the model."""

import contextlib
import dataclasses
import random
import re
from collections.abc import Collection, Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.data import stream
from tfps.errors import OWN_LIMITS, DataError, ModelError
from tfps.models.model import Model, built_by
from tfps.models.params import TrackedFlags, tracked_flags
from tfps.models.spec import ModeKeys, ModelSpec
from tfps.modes.registry import mode_of
from tfps.text import kind_of, show
from tfps.tf_types import Dataset, DType, Nested, Optimizer, Tensor

_OPTIMIZER_FLAGS = ("optimizer", "learning_rate")
_FILE_ERRORS = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError)


def dataset(
    model: Model, mode: str, config: JobConfig, pipelines: int, index: int, params: TrackedFlags | None = None
) -> Dataset:
    """Return the result of ``input_fn``: a dataset of pairs (features, labels), or ``None`` if there is no evaluation.

    Args:
        model: The model.
        mode: One of ``ModeKeys``.
        config: The job.
        pipelines: The number of workers.
        index: The index of this worker among them.
        params: The flags of the job, if which of them ``input_fn`` reads is to be known.

    Raises:
        DataError: If ``input_fn`` cannot read its data.
        ModelError: If the result is something else.
    """
    context = tf.distribute.InputContext(pipelines, index, mode_of(config).gradients_per_update(config, pipelines))
    in_step = mode_of(config).is_blocking
    params, where = params or tracked_flags(config), f"--model={model.name}: {model.line_of('input_fn')}"
    own = _input_of(model, mode, config, context, params)
    given = built_by(
        model, lambda: stream.of(own, mode, params, pipelines, index, where, in_step), "input_fn", "no examples"
    )
    if given is None and mode == ModeKeys.EVAL:
        return None
    if not isinstance(given, tf.compat.v2.data.Dataset):  # the base of both versions of the class
        taken = any(_is_taken(part) for part in tf.nest.flatten(given))
        fix = ": return the dataset itself, not its iterator's get_next()" if taken else ""
        raise ModelError(
            f"{where}: input_fn returned {kind_of(given)}; it must return a tf.data.Dataset of (features, labels){fix}."
        )
    element = tf.data.get_output_types(given)
    if not (isinstance(element, tuple) and len(element) == 2):
        raise ModelError(
            f"{where}: input_fn's dataset has elements of {element}; they must be pairs (features, labels)."
        )
    return given


def _input_of(model: Model, mode: str, config: JobConfig, context: Any, params: TrackedFlags) -> Any:
    """Call ``input_fn``; a file or a directory that it cannot read is a ``DataError``."""
    try:
        with tf.name_scope("tfps/input_fn/"):  # else a variable could not have a name such as "count" in training
            return model.input_fn(mode, MappingProxyType(params), context)
    except ModelError as error:
        cause = error.__cause__
        if isinstance(cause, DataError):
            raise cause from None
        if isinstance(cause, KeyError):
            raise _explained(error, cause) from cause
        if isinstance(cause, _FILE_ERRORS) or (isinstance(cause, OSError) and cause.errno not in OWN_LIMITS):
            text, line, source = str(error).partition("\n")
            given = f"check --data_dir={show(config.data_dir)}" if config.data_dir else "--data_dir is not given"
            raise DataError(f"{text}: {given}.{line}{source}") from cause
        raise


def spec(model: Model, mode: str, config: JobConfig, features: Nested, labels: Nested) -> ModelSpec:
    """Return the result of ``model_fn`` for one batch, or raise ``ModelError``. A loss that is required is a scalar."""
    return _spec(model, mode, tracked_flags(config), features, labels)


def training_spec(
    model: Model, config: JobConfig, features: Nested, labels: Nested
) -> tuple[ModelSpec, Collection[str]]:
    """Return the ``spec`` for training, and the names of the flags that ``model_fn`` has read.

    Raises:
        ModelError: As ``spec``, or if an optimizer flag is given that the model does not read.
    """
    params = tracked_flags(config)
    given = _spec(model, ModeKeys.TRAIN, params, features, labels)
    _check_used(model, config, params.read)
    return given, params.read


def _spec(model: Model, mode: str, params: TrackedFlags, features: Nested, labels: Nested) -> ModelSpec:
    try:
        given: ModelSpec = model.model_fn(_own(features), _own(labels), mode, MappingProxyType(params))
    except ModelError as error:
        if isinstance(error.__cause__, KeyError):
            raise _explained(error, error.__cause__, features) from error.__cause__
        raise
    if problem := _spec_problem(given, mode):
        where = f"--model={model.name}: {model.line_of('model_fn')}"
        raise ModelError(f"{where}: model_fn(mode={mode!r}) returned {problem}")
    if given.loss is not None and given.loss.shape.rank is None:
        given = dataclasses.replace(given, loss=tf.reshape(given.loss, []))
    predictions = _predictions(given) if mode == ModeKeys.PREDICT else given.predictions
    logs = {name: _scalar(value) for name, value in _items(given.log_tensors)}
    return dataclasses.replace(given, log_tensors=logs, predictions=predictions)


def _own(batch: Nested) -> Nested:
    """Return the same tensors in dicts and tuples of the model's own: it may add features, change or remove them."""
    return tf.nest.map_structure(lambda part: part, batch)


def _explained(error: ModelError, cause: KeyError, features: Nested = None) -> ModelError:
    """Return the error of a name that ``params`` or the features do not have, with what they have."""
    text, line, source = str(error).partition("\n")
    key = re.escape(repr(cause.args[0])[1:-1]) if cause.args else ""
    if re.search(rf"\bparams\[[\"']{key}[\"']\]", source):
        text += " (params holds the flags of the job; other values are constants of the model file)"
    elif isinstance(features, Mapping) and re.search(rf"\bfeatures\[[\"']{key}[\"']\]", source):
        text += f" (features has {', '.join(map(repr, features))})"
    return ModelError(f"{text}{line}{source}")


def _is_taken(part: object) -> bool:
    """Return whether something is an element of a dataset, from an iterator."""
    return isinstance(part, tf.Tensor) and part.op.type == "IteratorGetNext"


def _check_used(model: Model, config: JobConfig, asked: Container[str]) -> None:
    """Check that a model has read the given optimizer flags, which would otherwise be ignored without a message.

    Raises:
        ModelError: If it has not.
    """
    given = {name: getattr(config, name) for name in _OPTIMIZER_FLAGS}
    unused = [f"--{name}={value}" for name, value in given.items() if value is not None and name not in asked]
    if unused:
        where = f"--model={model.name}: {model.line_of('model_fn')}"
        raise ModelError(
            f"{where}: {' and '.join(unused)} would be ignored: the model makes its optimizer without it. Leave it "
            "out, or let model_fn return optimizer=tfps.make_optimizer(params, ...)."
        )


@contextlib.contextmanager
def seeded(seed: int, own: int) -> Iterator[None]:
    """Make the operations created inside draw the same numbers in each run.

    Keras draws the seeds of initial weights from Python's random numbers. Their state is restored afterwards.

    Args:
        seed: The seed of Python's random numbers: what a model draws there, such as an order of its features, is part
            of the model.
        own: The seed of the graph, which each worker has its own of.
    """
    before = random.getstate()
    random.seed(seed)
    tf.set_random_seed(own)
    try:
        yield
    finally:
        random.setstate(before)


def _scalar(value: object) -> Tensor:
    """Return a loggable value as a scalar tensor."""
    tensor = tf.convert_to_tensor(value)
    return tf.reshape(tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor, [])


def _spec_problem(given: Any, mode: str) -> str:
    if not isinstance(given, ModelSpec):
        return f"{kind_of(given)}; it must return a tfps.ModelSpec."
    if mode == ModeKeys.PREDICT:
        return _predictions_problem(given)
    if not isinstance(given.loss, tf.Tensor):
        return f"loss={kind_of(given.loss)}; it must be a scalar tensor."
    if given.loss.shape.rank not in (0, None):
        return f"a loss of shape {given.loss.shape}; it must be a scalar: take its mean."
    if mode == ModeKeys.TRAIN and (problem := _optimizer_problem(given.optimizer)):
        return problem
    return _log_problem(given.log_tensors) or (_metrics_problem(given.eval_metric_ops) if mode == ModeKeys.EVAL else "")


def _predictions(given: ModelSpec) -> dict[str, Any]:
    """Return predictions by name, as tensors: a variable or a number counts as its value."""
    named = given.predictions if isinstance(given.predictions, Mapping) else {"output": given.predictions}
    kept = tf.SparseTensor, tf.RaggedTensor
    return {name: value if isinstance(value, kept) else _tensor(value) for name, value in named.items()}


def _predictions_problem(given: ModelSpec) -> str:
    if given.predictions is None:
        return "no predictions: give ModelSpec(predictions={...})."
    if isinstance(given.predictions, (list, tuple)):
        return f"predictions={kind_of(given.predictions)}; it must be a tensor, or a dict of tensors by name."
    if isinstance(given.predictions, Mapping) and (
        problem := _names_problem("predictions", given.predictions, "tensors")
    ):
        return problem
    odd = [name for name, value in _predictions(given).items() if value is None]
    if not odd:
        return ""
    given_value = given.predictions[odd[0]] if isinstance(given.predictions, Mapping) else given.predictions
    return f"predictions with {odd[0]!r}, which is {kind_of(given_value)}; each must be a tensor."


def _optimizer_problem(optimizer: Optimizer) -> str:
    if not isinstance(optimizer, tf.train.Optimizer):
        fix = ": the optimizer itself, not what its minimize() returns" if isinstance(optimizer, tf.Operation) else ""
        return f"optimizer={kind_of(optimizer)}; it must be a tf.compat.v1.train.Optimizer{fix}."
    if isinstance(optimizer, tf.train.SyncReplicasOptimizer):  # tfps would not run its queues and hooks
        return (
            f"optimizer={kind_of(optimizer)}; return the optimizer that it wraps: --issync=1 does what "
            "SyncReplicasOptimizer does."
        )
    if "minimize" in vars(optimizer) or type(optimizer).minimize is not tf.train.Optimizer.minimize:
        return (
            f"optimizer={kind_of(optimizer)}, whose own minimize() would not be called: override "
            "compute_gradients or apply_gradients."
        )
    return ""


def _log_problem(logs: Any) -> str:
    if problem := _names_problem("log_tensors", logs, "scalars"):
        return problem
    for name, value in _items(logs):
        tensor = _tensor(value)
        if tensor is None or not _is_number(tensor.dtype):
            return f"log_tensors with {name!r}, which is {_described(value, tensor)}; each must be a scalar number."
        if tensor.shape.rank is not None and tensor.shape.num_elements() != 1:
            return (
                f"log_tensors with {name!r} of shape {tensor.shape}; each must be a scalar: take its mean, or its norm."
            )
    return ""


def _metrics_problem(metrics: Any) -> str:
    pair_of = "a pair (value, update op), as tf.metrics.mean(...) returns"
    if problem := _names_problem("eval_metric_ops", metrics, "pairs (value, update op)"):
        return problem
    for name, pair in _items(metrics):
        if name == "loss":
            return "eval_metric_ops with 'loss', the name of the model's own loss over all examples: use another name."
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            return f"eval_metric_ops with {name!r}, which is {kind_of(pair)}; each must be {pair_of}."
        value, update = pair
        tensor = _tensor(value)
        if tensor is None or not _is_number(tensor.dtype):
            return f"eval_metric_ops with {name!r}, whose value is {_described(value, tensor)}; it must be numbers."
        if not (isinstance(update, tf.Operation) or hasattr(update, "op")):
            kind = kind_of(update)
            return f"eval_metric_ops with {name!r}, whose update is {kind}; it must be an operation or a tensor."
    return ""


def _names_problem(field: str, given: Any, what: str) -> str:
    if given is not None and not isinstance(given, Mapping):
        return f"{field}={kind_of(given)}; it must be a dict of {what} by name."
    odd = [name for name, _ in _items(given) if not isinstance(name, str)]
    return f"{field} with the name {odd[0]!r}; a name must be a str." if odd else ""


def _items(given: Any) -> Any:
    return () if given is None else given.items()


def _tensor(value: object) -> Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None


def _is_number(dtype: DType) -> bool:
    return bool(dtype.base_dtype == tf.bool or dtype.is_floating or dtype.is_integer)


def _described(value: object, tensor: Tensor) -> str:
    return kind_of(value) if tensor is None else f"a tensor of {tensor.dtype.base_dtype.name}"
