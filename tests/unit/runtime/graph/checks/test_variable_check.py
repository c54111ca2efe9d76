"""Variables whose values would be wrong are refused: a counter that nothing raises, one named by its number."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.models.model import Model
from tfps.runtime.graph import builder
from tfps.runtime.graph.checks import variable_check

CLUSTER = Cluster(("ps:1",), ("worker:1", "worker:2"))  # of which nothing is started


class _Counting(tf.train.GradientDescentOptimizer):
    """Raises a counter with each update."""

    def __init__(self, rate: Any, counter: Any) -> None:
        super().__init__(rate)
        self._counter = counter

    def _finish(self, update_ops: Any, name_scope: str) -> Any:  # noqa: ARG002
        return tf.group(*update_ops, self._counter.assign_add(1))


def _model(use_resource: bool, changed_by: str) -> Model:
    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return dataset_of(np.float32([1])).repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        step = tf.Variable(0, trainable=False, use_resource=use_resource)
        rate = tf.train.exponential_decay(0.1, step, 1, 0.5)
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = weight * features["x"]
        if changed_by == "updates":
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, step.assign_add(1))
        if changed_by == "the loss":
            loss += tf.cast(step.assign_add(1), tf.float32)
        if changed_by == "the optimizer":
            return tfps.ModelSpec(loss=loss, optimizer=_Counting(rate, step))
        return tfps.ModelSpec(
            loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1 if changed_by == "nothing, unused" else rate)
        )

    return model_of(input_fn, model_fn)


def _build(mode: str, index: int, model: Model) -> builder.TrainGraph:
    return builder.training(JobConfig(mode=mode), CLUSTER, Task("worker", index), model)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("use_resource", [True, False])
def test_a_counter_that_nothing_changes_is_refused(use_resource: bool, mode: str) -> None:
    """``minimize(loss, global_step)`` raised it in the script; here the rate would stay that of step 0."""
    with pytest.raises(ModelError, match=r"line \d+: nothing changes variable 'Variable', .*get_or_create_global_step"):
        _build(mode, 0, _model(use_resource, "nothing"))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("changed_by", ["updates", "the loss", "the optimizer", "nothing, unused"])
def test_other_counters_are_not(changed_by: str, mode: str) -> None:
    """Each worker of each mode builds its step; in sync, the chief's alone has the model's updates."""
    for index in range(2):
        built = _build(mode, index, _model(True, changed_by))
        assert "Variable" in {variable.op.name for variable in built.graph.get_collection("variables")}


def _graph_of(*shapes: tuple[int, ...], scope: str = "") -> tf.Graph:
    with tf.Graph().as_default() as graph, tf.name_scope(scope or None):
        for shape in shapes:
            tf.Variable(tf.zeros(shape))
        tf.get_variable("weight", [2])
    return graph


@pytest.mark.parametrize("scope", ["", "tower"])
@pytest.mark.parametrize(
    ("in_eval", "in_train", "other"),
    [
        ([(2,)], [(2,), (2,)], "Variable_1"),
        ([(3,), (2,)], [(3,), (2,), (4,), (2,)], "Variable_3"),
        ([(2,), (3,)], [(2,), (3,)], None),
        ([(2, 3), (3,)], [(2, 3), (3,), ()], None),
        ([], [(2,), (2,)], None),
    ],
)
def test_a_number_that_does_not_show_which_variable_it_is(
    in_eval: list[tuple[int, ...]], in_train: list[tuple[int, ...]], other: str | None, scope: str
) -> None:
    """TensorFlow numbers variables without names in each graph; with another shape none can be taken for another."""
    model = _model(True, "nothing")
    graph, trained = _graph_of(*in_eval, scope=scope), _graph_of(*in_train, scope=scope)
    if other is None:
        variable_check.check(model, "eval", graph, trained)
        return
    names = f"'{scope + '/' if scope else ''}{other}', mode='eval' has only one of them"
    with pytest.raises(ModelError, match=re.escape(names)):
        variable_check.check(model, "eval", graph, trained)


def test_a_layer_of_keras_2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its updates are in no collection, so an average would keep its first value. A directory's name is no sign."""
    keras = types.ModuleType("tf_keras")
    keras.__file__ = str(tmp_path / "tf_keras" / "__init__.py")
    code = "import tensorflow.compat.v1 as tf\nmake = lambda: tf.get_variable('bn/moving_mean', [2], trainable=False)\n"
    made: dict[str, Any] = {}
    exec(compile(code, str(tmp_path / "tf_keras" / "bn.py"), "exec"), made)
    with tf.Graph().as_default() as graph:
        variable_check.check_layers(_model(True, "nothing"), graph, ())
        made["make"]()
    variable_check.check_layers(_model(True, "nothing"), graph, ())
    monkeypatch.setitem(sys.modules, "tf_keras", keras)
    with pytest.raises(ModelError, match=r"variable 'bn/moving_mean' is of tf_keras"):
        variable_check.check_layers(_model(True, "nothing"), graph, ())
