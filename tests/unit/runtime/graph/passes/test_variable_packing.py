"""Claims about variables that live packed: which do, and that nobody can tell."""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train, variables_of

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ModelError
from tfps.models.model import Model
from tfps.optimizers.adagrad import ExactAdagradOptimizer
from tfps.runtime.graph import builder, layout, placement
from tfps.runtime.graph.passes.variable_packing import can_pack, sizes

pytestmark = pytest.mark.slow

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


def built(model: Model, num_ps: int = 1, **flags: Any) -> builder.TrainGraph:
    """Return a worker's training graph."""
    cluster = Cluster(tuple(f"p{i}:1" for i in range(num_ps)), ("w:1",))
    return builder.training(JobConfig(**flags), cluster, Task("worker", 0), model)


def updates(training: builder.TrainGraph) -> Counter[str]:
    """Return how many operations of each type update variables in a step."""
    types = [op.type for op in placement.ancestors(training.fetches)]
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
def test_a_packed_variable_that_is_only_waited_for(tmp_path: Path, mode: str) -> None:
    """Operations, and another packed read, wait for a read of it whose value nobody uses: it trains as if unpacked."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        a, b = (tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in "ab")
        with tf.control_dependencies([tf.convert_to_tensor(a)]):
            x = tf.identity(features["x"])
            late = b.read_value()
        with tf.control_dependencies([a]):
            loss = tf.reduce_mean(x) * tf.reduce_sum(a + late)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    model = model_of(numbers, model_fn)
    training = built(model, mode=mode)
    assert training.places.keys() == {"a:0", "b:0"}
    used = {tensor.op.name for op in placement.ancestors(training.fetches) for tensor in op.inputs}
    assert used.isdisjoint({"a", "b"})
    trained = []
    for wire in ("plain", "packed"):
        train(model, num_workers=1, max_steps=STEPS, mode=mode, wire=wire, model_dir=str(tmp_path / wire))
        trained.append({name: value.tolist() for name, value in variables_of(tmp_path / wire).items()})
    assert trained[0] == trained[1]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_step_sees_packed_variables_alone(mode: str) -> None:
    """Nothing that a step runs, shows or applies reads a plain variable that is packed; each moment is one read."""
    training = built(AWKWARD, mode=mode)
    parts = [training.step.train_op, training.step.update, *training.spec.log_tensors.values(), training.summary]
    ops = placement.ancestors([part for part in parts if part is not None])
    read = Counter(op.inputs[0].op.name for op in ops if op.type == "ReadVariableOp")
    assert not {"first", "second", "third", "scale"} & set(read)
    assert read["tfps/packed"] == 2  # as the step begins, and late


def test_one_update_for_many_variables() -> None:
    """The variables that are only read are updated as one; those that the model changes or bounds, by themselves."""
    assert updates(built(AWKWARD)) == {"ResourceApplyAdagradV2": 3}
    assert updates(built(AWKWARD, wire="plain")) == {"ResourceApplyAdagradV2": 6}


def named(names: Sequence[str]) -> Model:
    """Return a model that makes small variables in an order, each update of which adds a number of its own."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        loss = 0.0 * tf.reduce_sum(features["x"])
        for name in names:
            weight = tf.get_variable(name, [len(name), 3], initializer=tf.zeros_initializer())
            loss -= len(name) * tf.reduce_sum(weight)
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    return model_of(numbers, model_fn)


def test_workers_pack_alike_in_whatever_order_their_models_make_variables() -> None:
    """As a set gives them, whose order differs from process to process: each is in the same place on all workers."""
    names = ["a", "bb", "ccc", "dddd"]
    layouts = [built(named(order)).layout for order in (names, names[::-1])]
    assert layouts[0] == layouts[1]
    assert layouts[0]["bb"] == "float32 of shape (2, 3) on ps/0, from element 3 of 30 in tfps/packed"


def test_workers_that_find_a_variable_elsewhere_are_refused() -> None:
    """On two PS, a variable of another order may be on another PS than the chief has it: it is reported with both."""
    names = ["a", "bb", "ccc", "dddd"]
    mine, chiefs = (built(named(order), num_ps=2, ps_strategy="round_robin").layout for order in (names, names[1:]))
    with pytest.raises(ModelError, match=r"variable 'bb' is float32 .* on ps/0, .* the chief's float32 .* on ps/1, "):
        layout.check(mine, chiefs, AWKWARD)
    layout.check(mine, {}, AWKWARD)
    layout.check(mine, mine, AWKWARD)


def test_a_variable_that_is_asked_whether_it_has_a_value_stays_as_it_is(tmp_path: Path) -> None:
    """A packed one would have none of its own: a model that waits for it would train nothing."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        first, second = (tf.get_variable(name, [3], initializer=tf.zeros_initializer()) for name in ("one", "two"))
        ready = tf.cast(tf.is_variable_initialized(first), tf.float32)
        loss = -tf.reduce_sum(first + second) * ready + 0.0 * tf.reduce_sum(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(numbers, model_fn), 1, 1, max_steps=STEPS, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["one"].tolist() == variables_of(tmp_path)["two"].tolist() == [STEPS] * 3


def test_a_workers_own_variable_may_begin_with_a_packed_one(tmp_path: Path) -> None:
    """It is initialized when the variables on the PS have their values, those of a checkpoint too."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        first, second = (tf.get_variable(name, [3], initializer=tf.ones_initializer()) for name in ("one", "two"))
        key = tf.GraphKeys.LOCAL_VARIABLES
        start = tf.Variable(lambda: first.read_value() + 1.0, trainable=False, collections=[key], name="start")
        loss = -tf.reduce_sum(first * start + second) + 0.0 * tf.reduce_sum(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    for max_steps in (1, 2):
        train(model_of(numbers, model_fn), 1, 1, max_steps=max_steps, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["one"].tolist() == [1.0 + 2.0 + 4.0] * 3


def test_an_optimizer_that_may_do_anything_is_left_alone() -> None:
    """A class of the user's, TensorFlow's Adagrad and an FTRL of another power update each variable by itself."""

    class Own(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        pass

    with tf.Graph().as_default():
        left = [Own(0.1), tf.train.AdagradOptimizer(0.1), tf.train.FtrlOptimizer(0.1, learning_rate_power=-0.3)]
        assert [can_pack(optimizer) for optimizer in left] == [False] * 3
        assert can_pack(tf.train.GradientDescentOptimizer(0.1))
        assert can_pack(tf.train.FtrlOptimizer(0.1))


class Stated(tf.train.Optimizer):  # type: ignore[misc]
    """States that it treats each element separately."""

    elementwise = True

    def __init__(self) -> None:
        super().__init__(use_locking=False, name="Stated")

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        return var.assign_sub(grad, read_value=False)


def test_an_optimizer_class_may_state_that_it_is_elementwise() -> None:
    """The statement holds for the class itself, not for its subclasses or an object; a subclass may state it again."""

    class Inherits(Stated):
        def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
            return var.assign_sub(tf.clip_by_norm(grad, 1.0), read_value=False)

    class StatesAgain(Inherits):
        elementwise = True

    class Denies(Stated):
        elementwise = False

    marked = Inherits()
    marked.elementwise = True
    with tf.Graph().as_default():
        assert [can_pack(optimizer) for optimizer in (Stated(), StatesAgain())] == [True, True]
        assert [can_pack(optimizer) for optimizer in (Inherits(), Denies(), marked)] == [False] * 3


@pytest.mark.parametrize("wrap", [lambda function: function, functools.wraps(Stated._resource_apply_dense)])
def test_a_stated_class_whose_method_was_replaced_is_left_alone(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statement holds for the methods in the class's body, not for a function that takes the place of one."""
    monkeypatch.setattr(Stated, "_resource_apply_dense", wrap(lambda *args: args[2].assign_sub(args[1])))
    assert not can_pack(Stated())


def _clipped(pairs: Any) -> Any:
    """Return pairs of gradient and variable, each gradient clipped by its own norm."""
    return [(tf.clip_by_norm(gradient, 1.0), variable) for gradient, variable in pairs]


@pytest.mark.parametrize("patched", ["one", "class", "wrapped", "partial"])
def test_an_optimizer_whose_methods_were_replaced_is_left_alone(
    tmp_path: Path, patched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function in place of ``apply_gradients`` gets the gradients of the model's variables, not of packed ones."""
    kind = tf.train.GradientDescentOptimizer
    apply = kind.apply_gradients

    def clipping(own: Any, pairs: Any, *rest: Any) -> Any:
        return apply(own, _clipped(pairs), *rest)

    if patched != "one":
        wrapped = {"wrapped": tf.autograph.experimental.do_not_convert, "partial": functools.partialmethod}.get(patched)
        monkeypatch.setattr(kind, "apply_gradients", wrapped(clipping) if wrapped else clipping)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weights = [tf.get_variable(name, [4], initializer=tf.zeros_initializer()) for name in ("first", "second")]
        optimizer = kind(1.0)
        if patched == "one":
            optimizer.apply_gradients = lambda pairs, *rest: apply(optimizer, _clipped(pairs), *rest)
        loss = -tf.add_n([tf.reduce_sum(weight) for weight in weights]) * tf.reduce_mean(tf.ones_like(features["x"]))
        return tfps.ModelSpec(loss=loss, optimizer=optimizer)

    train(model_of(numbers, model_fn), 1, 1, max_steps=4, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert [values[name].tolist() for name in ("first", "second")] == [[4 / 4**0.5] * 4] * 2


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


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_a_variable_that_is_trained_twice_is(tmp_path: Path, wire: str) -> None:
    """A variable that is in TRAINABLE_VARIABLES again is updated by both gradients, as TensorFlow does it."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        twice, *others = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in ("a", "b", "c")]
        tf.add_to_collection(tf.GraphKeys.TRAINABLE_VARIABLES, twice)
        loss = tf.reduce_sum(tf.add_n([twice, *others])) + 0.0 * tf.reduce_sum(features["x"])
        return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0))

    train(model_of(numbers, model_fn), 1, 1, wire=wire, max_steps=3, model_dir=str(tmp_path))
    values = variables_of(tmp_path)
    assert [values[name].tolist() for name in "abc"] == [[-6, -6], [-3, -3], [-3, -3]]
