"""Call a model's functions, here and nowhere else, and check what they give back: mistakes are told with their line."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.config import JobConfig
from tfps.errors import ModelError
from tfps.models import Model
from tfps.models.spec import ModeKeys, ModelSpec


def params_of(config: JobConfig) -> Mapping[str, Any]:
    """Return what a model gets as ``params``: every flag of the job, read-only."""
    return MappingProxyType(config.to_dict())


def dataset(model: Model, mode: str, config: JobConfig, pipelines: int, index: int) -> Any:
    """Return what ``input_fn`` gives: a dataset of pairs (features, labels), or ``None`` where there is no evaluation.

    Args:
        model: The model.
        mode: One of ``ModeKeys``.
        config: The job.
        pipelines: How many workers read such an input.
        index: Which of them this is.

    Raises:
        ModelError: If it gives something else.
    """
    context = tf.distribute.InputContext(pipelines, index, pipelines if config.mode == "sync" else 1)
    given = model.input_fn(mode, params_of(config), context)
    if given is None and mode == ModeKeys.EVAL:
        return None
    where = f"--model={model.name}: {model.line_of('input_fn')}"
    if not isinstance(given, tf.compat.v2.data.Dataset):  # the base of both versions of the class
        raise ModelError(
            f"{where}: input_fn returned {_named(given)}; it must return a tf.data.Dataset of (features, labels)."
        )
    element = tf.data.get_output_types(given)
    if not (isinstance(element, tuple) and len(element) == 2):
        raise ModelError(
            f"{where}: input_fn's dataset has elements of {element}; they must be pairs (features, labels)."
        )
    return given


def spec(model: Model, mode: str, config: JobConfig, features: Any, labels: Any) -> ModelSpec:
    """Return what ``model_fn`` gives for one batch; its loss is a scalar, where there has to be one.

    Raises:
        ModelError: If it gives something else.
    """
    given: ModelSpec = model.model_fn(features, labels, mode, params_of(config))
    if problem := _spec_problem(given, mode):
        where = f"--model={model.name}: {model.line_of('model_fn')}"
        raise ModelError(f"{where}: model_fn(mode={mode!r}) returned {problem}")
    if given.loss is not None and given.loss.shape.rank is None:
        given = dataclasses.replace(given, loss=tf.reshape(given.loss, []))
    return given


def _spec_problem(given: Any, mode: str) -> str:
    if not isinstance(given, ModelSpec):
        return f"{_named(given)}; it must return a tfps.ModelSpec."
    if mode == ModeKeys.PREDICT:
        return "" if given.predictions is not None else "no predictions: give ModelSpec(predictions={...})."
    if not isinstance(given.loss, tf.Tensor):
        return f"loss={_named(given.loss)}; it must be a scalar tensor."
    if given.loss.shape.rank not in (0, None):
        return f"a loss of shape {given.loss.shape}; it must be a scalar: take its mean."
    wide = [f"{n!r} of shape {t.shape}" for n, t in given.log_tensors.items() if (t.shape.num_elements() or 1) > 1]
    if mode == ModeKeys.TRAIN and not isinstance(given.optimizer, tf.train.Optimizer):
        return f"optimizer={_named(given.optimizer)}; it must be a tf.compat.v1.train.Optimizer."
    return f"log_tensors with {wide[0]}; each must be a scalar: take its mean, or its norm." if wide else ""


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
