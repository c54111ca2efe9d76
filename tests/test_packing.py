"""Claims about variables that live packed: which do, and that nobody can tell."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from cluster_in_process import dataset_of, model_of, train, variables_of

import tfps
from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.models import Model
from tfps.models.exact_adagrad import ExactAdagradOptimizer
from tfps.runtime import graph, placement
from tfps.runtime.packing import can_pack, sizes

STEPS = 7


def numbers(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of normal numbers."""
    return None if mode == "eval" else dataset_of(np.random.default_rng(1).normal(size=(STEPS, 4, 5)).astype("f4"))


def awkward(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that reads late, keeps an average, changes one weight itself, bounds another, and shows a third."""
    first = tf.get_variable("first", [5, 3])
    second = tf.get_variable("second", [3], initializer=tf.zeros_initializer())
    third = tf.get_variable("third", [3], initializer=tf.ones_initializer())
    own = tf.get_variable("own", [3], initializer=tf.ones_initializer())
    bounded = tf.get_variable("bounded", [3], constraint=lambda weight: tf.minimum(weight, 0.25))
    scale = tf.get_variable("scale", [], initializer=tf.ones_initializer())
    average = tf.get_variable("average", [3], initializer=tf.zeros_initializer(), trainable=False)
    kept = average.assign(0.9 * average + 0.1 * second)
    with tf.control_dependencies([kept, own.assign(tf.minimum(own, 1.5))]):
        late = second.read_value()
    net = tf.matmul(features["x"], first) + second + tf.nn.relu(late) + third * own * scale + bounded
    tf.summary.histogram("third", third)
    loss = tf.reduce_mean(tf.square(net - 1))
    optimizer = tfps.make_optimizer(params, "adagrad", learning_rate=0.1)
    return tfps.ModelSpec(loss=loss, optimizer=optimizer, log_tensors={"scale": scale.value()})


AWKWARD = model_of(numbers, awkward)


def built(model: Model, num_ps: int = 1, **flags: Any) -> graph.TrainGraph:
    """Return a worker's training graph."""
    cluster = Cluster(tuple(f"p{i}:1" for i in range(num_ps)), ("w:1",))
    return graph.training(JobConfig(**flags), cluster, Task("worker", 0), model)


def updates(training: graph.TrainGraph) -> Counter[str]:
    """Return how many operations of each type update variables in a step."""
    types = [op.type for op in placement.needed(training.fetches)]
    return Counter(kind for kind in types if kind.startswith("ResourceApply"))


@pytest.mark.parametrize(("optimizer", "mode"), [("adagrad", "async"), ("adam", "sync")])
def test_an_awkward_model_trains_as_if_unpacked(tmp_path: Path, mode: str, optimizer: str) -> None:
    """Late reads, averages and own assignments come out the same, to the bit, also resumed."""
    made = []
    for wire in ("plain", "packed"):
        flags = {"mode": mode, "optimizer": optimizer, "wire": wire, "model_dir": str(tmp_path / wire)}
        for max_steps in (STEPS - 3, STEPS):
            train(AWKWARD, 1, 1, max_steps=max_steps, **flags)
        values = variables_of(tmp_path / wire)
        made.append({name: np.asarray(value).tobytes() for name, value in values.items()})
    assert made[0] == made[1]
    assert {"first", "second", "third", "own", "bounded", "average", "global_step"} < set(made[0])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_step_sees_packed_variables_alone(mode: str) -> None:
    """Nothing that a step runs, shows or applies reads a plain variable that is packed; each moment is one read."""
    training = built(AWKWARD, mode=mode)
    parts = [training.step.train_op, training.step.update, *training.spec.log_tensors.values(), training.summary]
    ops = placement.needed([part for part in parts if part is not None])
    read = Counter(op.inputs[0].op.name for op in ops if op.type == "ReadVariableOp")
    assert not {"first", "second", "third", "scale"} & set(read)
    assert read["tfps/packed"] == 2  # as the step begins, and late


def test_one_update_for_many_variables() -> None:
    """The variables that are only read are updated as one; those that the model changes or bounds, by themselves."""
    assert updates(built(AWKWARD)) == {"ResourceApplyAdagradV2": 3}
    assert updates(built(AWKWARD, wire="plain")) == {"ResourceApplyAdagradV2": 6}


def test_an_optimizer_that_may_do_anything_is_left_alone() -> None:
    """A class of the user's, TensorFlow's Adagrad and an FTRL of another power update each variable by itself."""

    class Own(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        pass

    with tf.Graph().as_default():
        left = [Own(0.1), tf.train.AdagradOptimizer(0.1), tf.train.FtrlOptimizer(0.1, learning_rate_power=-0.3)]
        assert [can_pack(optimizer) for optimizer in left] == [False] * 3
        assert can_pack(tf.train.GradientDescentOptimizer(0.1))
        assert can_pack(tf.train.FtrlOptimizer(0.1))


def test_exact_adagrad_is_adagrad() -> None:
    """Its updates are TensorFlow's but for the last bits, and it names its slots alike."""
    rng = np.random.default_rng(0)
    first, gradients = rng.normal(size=37).astype("f4"), rng.normal(size=(20, 37)).astype("f4")
    values = []
    for make in (tf.train.AdagradOptimizer, ExactAdagradOptimizer):
        with tf.Graph().as_default(), tf.Session() as session:
            weight, gradient = tf.get_variable("w", initializer=first), tf.placeholder(tf.float32, [37])
            step = make(0.1).apply_gradients([(gradient, weight)])
            session.run(tf.global_variables_initializer())
            for row in gradients:
                session.run(step, {gradient: row})
            values.append({v.op.name.rpartition("/")[0]: v.eval() for v in tf.global_variables()})
    assert set(values[0]) == set(values[1])
    for name, value in values[0].items():
        np.testing.assert_allclose(values[1][name], value, rtol=1e-6, atol=1e-7)


def test_what_lives_packed_is_counted() -> None:
    """The plan knows what packed variables and their slots take: first, second, third and scale, and as much again."""
    assert sizes(built(AWKWARD).graph) == {0: 2 * 4 * (5 * 3 + 3 + 3 + 1)}
    assert sizes(built(AWKWARD, wire="plain").graph) == {}
