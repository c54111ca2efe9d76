"""Build the graph that serves a model: placeholders instead of the input pipeline, and no variables on a cluster."""

import re
from collections.abc import Mapping

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.models.model import Model
from tfps.models.spec import ModeKeys
from tfps.runtime.graph import model_calls, placement
from tfps.runtime.graph.graph_editor import add_control_inputs, can_wait, is_handle
from tfps.runtime.graph.graph_scope import new_graph
from tfps.tf_types import DType, Graph, Nested, Operation, Shape, Tensor


def prediction(config: JobConfig, model: Model) -> tuple[Graph, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Build the serving graph. Placeholders have the shapes of the evaluation features, with a free batch dimension.

    Returns:
        The graph, its inputs by name, its predictions by name.

    Raises:
        ModelError: If the model fails or returns no predictions.
    """
    types, shapes = _features(model, config)
    with new_graph(config) as graph:
        features = _placeholders(types, shapes)
        tf.train.get_or_create_global_step()  # a model may use it
        spec = model_calls.spec(model, ModeKeys.PREDICT, config, features, None)
        inputs = features if isinstance(features, dict) else {"features": features}
    return graph, inputs, spec.predictions or {}


def initializer(outputs: Mapping[str, Tensor]) -> Operation:
    """Add an operation that initializes the tables, and after them the local variables, and return it.

    Their first values may be looked up in a table.
    """
    tables, local = tf.tables_initializer(), tf.local_variables_initializer()
    served = [part for output in outputs.values() for part in tf.nest.flatten(output, expand_composites=True)]
    early = set(placement.ancestors([tables, *served]))
    for op in placement.ancestors([local]):
        if op not in early and can_wait(op) and any(map(is_handle, op.inputs)):
            add_control_inputs(op, [tables])
    return tf.group(tables, local)


def _features(model: Model, config: JobConfig) -> tuple[Nested, Nested]:
    """Return types and shapes of the evaluation features. The input pipeline is not part of the serving graph."""
    with new_graph(config):
        dataset = model_calls.dataset(model, ModeKeys.EVAL, config, 1, 0)
        if dataset is None:
            raise ModelError(
                f"--model={model.name}: input_fn(mode='eval') returned None; export needs its features' shapes."
            )
        if problem := _unservable(tf.data.experimental.get_structure(dataset)[0]):
            raise ModelError(f"--model={model.name}: {model.line_of('input_fn')}: {problem}")
        return tf.data.get_output_types(dataset)[0], tf.data.get_output_shapes(dataset)[0]


def _unservable(features: Nested) -> str:
    """Return why features cannot be inputs of a signature (dense tensors by name), or an empty string if they can."""
    named = features if isinstance(features, dict) else {"features": features}
    odd = [name for name, spec in named.items() if not isinstance(spec, tf.TensorSpec)]
    if not odd:
        return ""
    kind = type(named[odd[0]]).__name__.replace("TensorSpec", " tensor").lower()
    return (
        f"feature {odd[0]!r} is a {kind}; export takes one dense tensor, or a dict of them: return it dense from "
        "input_fn(mode='eval'), and convert it in model_fn."
    )


def _placeholders(types: Nested, shapes: Nested) -> Nested:
    if isinstance(types, dict):
        return {name: _placeholder(name, types[name], shapes[name]) for name in types}
    return _placeholder("features", types, shapes)


def _placeholder(name: str, dtype: DType, shape: Shape) -> Tensor:
    free = [None, *shape.as_list()[1:]] if shape.rank else shape
    return tf.placeholder(dtype, free, name="serving_" + re.sub("[^A-Za-z0-9_./-]", "_", name))
