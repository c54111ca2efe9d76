"""Claims about what a model does itself in each step: it is done once a step, in order, and carries no NaN to a PS."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import cluster_of, dataset_of, model_of, run_job, train, variables_of
from support.processes import summary
from tensorflow.python.framework import function

import tfps
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.errors import DivergedError
from tfps.runtime.graph import builder
from tfps.runtime.graph.passes import model_updates, side_effects
from tfps.runtime.graph.passes.unrolling import UnrolledStep
from tfps.runtime.graph.placement import transfers

pytestmark = pytest.mark.slow

STEPS = 96
UNROLLED = {"steps_per_run": 8, "runs_in_flight": 2}
PLAIN = {"wire": "plain", "steps_per_run": 1, "runs_in_flight": 1}
KINDS_OF_JOB = [("async", 1, UNROLLED), ("async", 2, PLAIN), ("sync", 2, UNROLLED), ("sync", 2, PLAIN)]


def ramp(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of the numbers from 0 on, the same for all workers."""
    return None if mode == "eval" else dataset_of(np.arange(float(STEPS), dtype=np.float32))


def logged(model_dir: Path) -> dict[str, list[float]]:
    """Return by name what the chief has logged of each of its steps, in their order."""
    found: dict[str, dict[int, float]] = {}
    for path in model_dir.glob("events.*"):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return {name: [values[step] for step in sorted(values)] for name, values in found.items()}


def spec(params: Any, loss: Any, **shown: Any) -> tfps.ModelSpec:
    """Return what a ``model_fn`` of these tests returns."""
    optimizer = tfps.make_optimizer(params, "sgd", learning_rate=0.5)
    return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=optimizer, log_tensors=shown)


def averaging(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a count and a sum in UPDATE_OPS, as batch norm has its averages."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)
    total = tf.get_variable("total", [], initializer=tf.zeros_initializer(), trainable=False)
    for update in (count.assign_add(1.0, read_value=False), total.assign_add(features["x"])):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return spec(params, weight * features["x"])


@pytest.mark.parametrize(("mode", "workers", "flags"), KINDS_OF_JOB)
def test_update_ops_are_run_once_a_step(tmp_path: Path, mode: str, workers: int, flags: dict[str, Any]) -> None:
    """UPDATE_OPS have run once for each step of the job, in sync those of the chief."""
    train(model_of(ramp, averaging), 1, workers, mode=mode, model_dir=str(tmp_path), max_steps=STEPS, **flags)
    values = variables_of(tmp_path)
    assert values["count"] == values["global_step"] == STEPS
    assert values["total"] == sum(range(STEPS)) or (workers == 2 and mode == "async")


def uneven(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` that gives the second worker half the batches."""
    return None if mode == "eval" else dataset_of(np.ones(STEPS // (1 + context.input_pipeline_id), np.float32))


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_update_ops_wait_for_the_mean(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The chief's UPDATE_OPS do not run for a step of which no mean is made, because a worker has no batch for it."""
    train(model_of(uneven, averaging), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=STEPS, **flags)
    values = variables_of(tmp_path)
    assert values["count"] == values["total"] == values["global_step"] == STEPS // 2


def more_for_the_chief(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` that gives the chief 12 batches more than the 20 of the others."""
    return None if mode == "eval" else dataset_of(np.ones(20 if context.input_pipeline_id else 32, np.float32))


def seen_by_the_optimizer(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose UPDATE_OPS halve a rate and a weight, add a batch to a rate's divisor, and sum up a weight."""
    weight, halved = scalar("weight", True), tf.get_variable("halved", [], initializer=tf.ones_initializer())
    made = {"initializer": tf.ones_initializer(), "trainable": False}
    rate, divisor = tf.get_variable("rate", [], **made), tf.get_variable("divisor", [], **made)
    summed = scalar("summed")
    with tf.control_dependencies([scalar("count").assign_add(1.0)]):
        divided = divisor.assign_add(features["x"])
    for update in (rate.assign(rate * 0.5), halved.assign(halved * 0.5), divided, summed.assign_add(weight)):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    optimizer = tf.train.GradientDescentOptimizer(lambda: rate + 0.0 * divisor)
    return tfps.ModelSpec(loss=weight + 0.0 * halved * features["x"], optimizer=optimizer)


@pytest.mark.parametrize(("num_ps", "flags"), [(1, {}), (2, UNROLLED), (2, PLAIN)])
def test_what_an_optimizer_sees_is_changed_between_the_mean_and_its_update(
    tmp_path: Path, num_ps: int, flags: dict[str, Any]
) -> None:
    """Not for a step of which no mean is made, and yet before the update: the first one has half the rate."""
    flags = {"mode": "sync", "model_dir": str(tmp_path), "max_steps": STEPS, **flags}
    train(model_of(more_for_the_chief, seen_by_the_optimizer), num_ps, 2, **flags)
    values = variables_of(tmp_path)
    assert values["rate"] == values["halved"] == 2.0**-20
    assert values["weight"] == 2.0**-20 - 1
    assert values["divisor"] - 1 == values["count"] == values["global_step"] == 20
    assert values["summed"] == pytest.approx(sum(2.0**-step - 1 for step in range(20)), rel=1e-6)


def changed_in_loops(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose UPDATE_OPS are loops as they are: one divides the rate by 4, one clips a weight."""
    weight, clipped = scalar("weight", True), scalar("clipped", True)
    rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False)

    def twice(variable: Any, value: Any) -> Any:
        def body(index: Any) -> Any:
            with tf.control_dependencies([variable.assign(value(variable.read_value()))]):
                return index + 1

        return tf.while_loop(lambda index: index < 2, body, [tf.constant(0)])

    for update in (twice(rate, lambda old: 0.5 * old), twice(clipped, lambda old: tf.minimum(old, 1e9))):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    optimizer = tf.train.GradientDescentOptimizer(rate.read_value)
    return tfps.ModelSpec(loss=(weight + clipped) * features["x"], optimizer=optimizer)


@pytest.mark.parametrize(("mode", "workers", "flags"), [("async", 1, UNROLLED), ("async", 1, PLAIN), *KINDS_OF_JOB[2:]])
def test_what_a_loop_changes_is_changed_before_the_update(
    tmp_path: Path, mode: str, workers: int, flags: dict[str, Any]
) -> None:
    """The optimizer takes the rate of its own step, and no clipping overwrites an update."""
    train(model_of(uneven, changed_in_loops), 2, workers, mode=mode, model_dir=str(tmp_path), max_steps=10, **flags)
    values = variables_of(tmp_path)
    assert values["rate"] == 4.0**-10
    assert values["weight"] == values["clipped"] == -sum(4.0**-step for step in range(1, 11))


def indexed(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` that gives each worker its own index."""
    return None if mode == "eval" else dataset_of(np.float32([context.input_pipeline_id])).repeat()


def zeros(name: str, first: float = 0.0, **kwargs: Any) -> Any:
    """Return a variable of one 0, or another number, which no optimizer updates."""
    return tf.get_variable(name, [1], initializer=tf.constant_initializer(first), trainable=False, **kwargs)


def one_row(value: Any) -> Any:
    """Return what changes the first row of a variable."""
    return tf.IndexedSlices(tf.reshape(value, [1]), [0])


def counted_in_functions(x: Any) -> dict[str, Any]:
    """Return changes in functions that count, by the name of a variable each: called, nested, in branches and loops."""
    called, nested, branch, loop = (zeros(name) for name in ("called", "nested", "branch", "loop"))

    @tf.function(autograph=False)
    def call() -> Any:
        return called.assign_add([1.0])

    @tf.function(autograph=False)
    def nest() -> Any:
        return tf.function(lambda: nested.assign_add([1.0]), autograph=False)()

    @tf.function(autograph=False)
    def choose(x: Any) -> Any:
        return tf.cond(x >= 0, lambda: branch.assign_add([1.0]).read_value(), lambda: tf.zeros([1]))

    @tf.function(autograph=False)
    def turn() -> Any:
        def body(turns: Any) -> Any:
            with tf.control_dependencies([loop.assign_add([1.0])]):
                return turns + 1

        return tf.while_loop(lambda turns: turns < 1, body, [tf.constant(0)])

    return {"called": call(), "nested": nest(), "branch": choose(x), "loop": turn()}


def counting_in_all_ways(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that counts with each kind of operation, by UPDATE_OPS; a table's count is logged."""
    names = ("nd_add", "nd_sub", "largest", "smallest", "part", "optimized")
    made = {**{name: zeros(name) for name in names}, **{name: zeros(name, 1.0) for name in ("product", "quotient")}}
    up_to = tf.get_variable("up_to", [], tf.int64, tf.zeros_initializer(), trainable=False)
    old = tf.get_variable("old", [], initializer=tf.zeros_initializer(), trainable=False, use_resource=False)
    table = tf2.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    key = tf.constant([7], tf.int64)
    updates = {
        "nd_add": made["nd_add"].scatter_nd_add([[0]], [1.0]),
        "nd_sub": made["nd_sub"].scatter_nd_sub([[0]], [1.0]),
        "largest": made["largest"].scatter_max(one_row(made["largest"] + 1.0)),
        "smallest": made["smallest"].scatter_min(one_row(made["smallest"] - 1.0)),
        "product": made["product"].scatter_mul(one_row(2.0)),
        "quotient": made["quotient"].scatter_div(one_row(2.0)),
        "part": made["part"][0:1].assign(made["part"][0:1] + 1.0),
        "up_to": tf.raw_ops.ResourceCountUpTo(resource=up_to.handle, limit=10**6, T=tf.int64),
        "old": tf.assign_add(old, 1.0),
        "table": table.insert(key, table.lookup(key) + 1.0),
        "optimized": tf.train.GradientDescentOptimizer(1.0).apply_gradients([(tf.constant([-1.0]), made["optimized"])]),
        **counted_in_functions(features["x"]),
    }
    for update in updates.values():
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    return spec(params, weight * features["x"], table=tf.reduce_sum(table.lookup(key)))


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_each_kind_of_change_of_a_ps_is_the_chiefs_alone(tmp_path: Path, flags: dict[str, Any]) -> None:
    """In sync, whatever operation changes a PS counts one for each update, also in a function; no worker adds to it."""
    shown = {"steps_to_validate": 1, "model_dir": str(tmp_path), "max_steps": STEPS}
    train(model_of(indexed, counting_in_all_ways), 2, 2, mode="sync", **shown, **flags)
    values = variables_of(tmp_path)
    for name in ("nd_add", "largest", "part", "up_to", "old", "optimized", "called", "nested", "branch", "loop"):
        assert values[name] == STEPS, name
    assert values["nd_sub"] == values["smallest"] == -STEPS
    assert values["product"] == 1 / values["quotient"] == 2.0**STEPS
    assert STEPS - 1 <= logged(tmp_path)["table"][-1] <= STEPS


def counting_apart(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose workers count, each for itself, in functions that read a PS; what each has is kept by index."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    own = [zeros(name, collections=[tf.GraphKeys.LOCAL_VARIABLES]) for name in ("called", "branch")]
    kept = [tf.get_variable(f"kept_{n}", [2], initializer=tf.zeros_initializer(), trainable=False) for n in range(2)]

    @tf.function(autograph=False)
    def call() -> Any:
        return own[0].assign_add([1.0 + 0.0 * weight])

    @tf.function(autograph=False)
    def choose() -> Any:
        return tf.cond(weight < 1e9, lambda: own[1].assign_add([1.0]).read_value(), lambda: tf.reshape(weight, [1]))

    for update in (call(), choose()):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    place = tf.reshape(tf.cast(features["x"], tf.int32), [1, 1])
    reported = [there.scatter_nd_update(place, mine.read_value()) for there, mine in zip(kept, own, strict=True)]
    with tf.control_dependencies(reported):
        return spec(params, weight * features["x"])


def test_what_a_function_changes_decides_whose_the_change_is(tmp_path: Path) -> None:
    """In sync, a function that changes a worker's own state and only reads a PS runs on each worker."""
    train(model_of(indexed, counting_apart), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=STEPS)
    values = variables_of(tmp_path)
    assert np.min([values["kept_0"], values["kept_1"]]) >= STEPS // 2


def keras(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a Keras layer that keeps averages."""
    norm = tf2.keras.layers.BatchNormalization(name="norm", momentum=0.5)
    shown = norm(tf.reshape(features["x"], [1, 1]), training=mode == "train")
    return spec(params, tf.reduce_sum(shown))


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_a_layer_that_is_called_twice_starts_from_its_first_call(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Both calls of a step count in the averages of batch norm, and each call of a dropout has its own mask."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        norm = tf2.keras.layers.BatchNormalization(name="norm", momentum=0.5)
        drop = tf2.keras.layers.Dropout(0.5, name="drop")
        normed = [norm(tf.fill([4, 1], value), training=True) for value in (1.0, 4.0)]
        masks = [tf.cast(drop(tf.ones([100]), training=True) > 0, tf.float32) for _ in range(2)]
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = weight * features["x"] + 0 * tf.add_n([tf.reduce_sum(one) for one in normed])
        return spec(params, loss, alike=tf.reduce_mean(tf.cast(tf.equal(*masks), tf.float32)))

    train(model_of(ramp, model_fn), 1, 1, model_dir=str(tmp_path), max_steps=16, steps_to_validate=1, **flags)
    mean = 0.0
    for value in (1.0, 4.0) * 16:
        mean = 0.5 * (mean + value)
    assert variables_of(tmp_path)["norm/moving_mean"] == pytest.approx(mean, rel=1e-6)
    assert len(logged(tmp_path)["alike"]) == 16
    assert 0.4 < np.mean(logged(tmp_path)["alike"]) < 0.6


def test_the_averages_of_a_keras_layer_are_kept(tmp_path: Path) -> None:
    """What a Keras layer assigns in training is assigned in each step: the average is that of all batches."""
    train(model_of(ramp, keras), 1, 1, model_dir=str(tmp_path), max_steps=STEPS, steps_per_run=8)
    average = 0.0
    for number in range(STEPS):
        average = average * 0.5 + number * 0.5
    assert variables_of(tmp_path)["norm/moving_mean"] == pytest.approx([average], rel=1e-5)


@tf.function
def noise() -> Any:
    """Return a random number, drawn in a function."""
    return tf.random.uniform([])


def noisy(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that draws random numbers in functions, and adds what it draws to a weight."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    drawn, nested = noise(), tf.function(lambda: noise() + 1.0)()
    return spec(params, -2.0 * weight * drawn + 0.0 * features["x"], drawn=drawn, nested=nested)


def test_random_numbers_of_functions_are_others_in_each_step(tmp_path: Path) -> None:
    """No number that a function draws in one step of a run is drawn in another one."""
    shown = {"steps_to_validate": 1, "model_dir": str(tmp_path), "max_steps": STEPS}
    train(model_of(ramp, noisy), 1, 1, **shown, **UNROLLED)
    found = logged(tmp_path)
    assert len(found["drawn"]) > 30
    for name in ("drawn", "nested"):
        assert len(set(found[name])) == len(found[name])


def in_function(features: Any) -> Any:
    """Draw a number in a function that another one calls."""
    return tf.function(lambda x: noise() + 0.0 * x)(features["x"])


def in_branch(features: Any) -> Any:
    """Draw a number in a condition in a function."""
    return tf.function(lambda x: tf.cond(x > 0.0, noise, lambda: x))(features["x"])


def in_loop(features: Any) -> Any:
    """Draw numbers in a loop in a function."""
    draw = lambda x: tf.random.uniform([], seed=7) + 0.0 * x  # noqa: E731
    return tf.function(lambda x: tf.reduce_sum(tf.map_fn(draw, tf.fill([3], x))))(features["x"])


@pytest.mark.parametrize("draw", [in_function, in_branch, in_loop])
@pytest.mark.parametrize("flags", [UNROLLED, {}, PLAIN])
def test_random_numbers_of_nested_functions_never_repeat(tmp_path: Path, flags: dict[str, Any], draw: Any) -> None:
    """Runs with and without logged values, and of one and of several steps, go on where the others were."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight, count = scalar("weight", True), tf.get_variable("count", [], tf.int64, tf.zeros_initializer())
        drawn = tf.get_variable("drawn", [600], initializer=tf.zeros_initializer(), trainable=False)
        nested = draw(features)
        number = count.assign_add(1) - 1
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.scatter_update(drawn, [number], [nested]))
        return spec(params, weight * features["x"], shown=weight)

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones(600, np.float32))

    train(model_of(input_fn, model_fn), 1, 1, model_dir=str(tmp_path), max_steps=600, steps_to_validate=50, **flags)
    values = variables_of(tmp_path)
    assert values["count"] == len(set(values["drawn"].tolist())) == 600


@pytest.mark.parametrize("place", ["loss", "log_tensors", "summary"])
@pytest.mark.parametrize("is_outer", [False, True])
def test_a_lambda_may_call_a_function_and_be_called_in_one(tmp_path: Path, place: str, is_outer: bool) -> None:
    """TensorFlow names nodes after a function on several devices, and ``<lambda>`` is no name of a node."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = scalar("weight", True)

        def scale(x: Any) -> Any:
            return x * weight

        scaled = tf.function(scale if is_outer else lambda x: x * weight)
        called = tf.function(lambda x: scaled(x) + scaled(x))(features["x"])
        if place == "summary":
            tf.summary.scalar("called", called)
        shown = {"called": called} if place == "log_tensors" else {}
        return spec(params, called if place == "loss" else 2.0 * features["x"] * weight, **shown)

    train(model_of(ramp, model_fn), 1, 1, model_dir=str(tmp_path), max_steps=4, **PLAIN)
    assert variables_of(tmp_path)["weight"] == -sum(range(4))


def test_each_worker_draws_its_own_random_numbers(tmp_path: Path) -> None:
    """In sync, the mean of two workers' noise is not the noise of one."""
    train(model_of(ramp, noisy), 1, 2, mode="sync", model_dir=str(tmp_path / "two"), max_steps=1)
    train(model_of(ramp, noisy), 1, 1, mode="sync", model_dir=str(tmp_path / "one"), max_steps=1)
    assert variables_of(tmp_path / "two")["weight"] != variables_of(tmp_path / "one")["weight"]


def stateful(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a state on the worker, read as a step begins and written as it ends, and a call of Python."""
    weight = tf.get_variable("weight", [64, 64], initializer=tf.ones_initializer())
    state = tf.get_variable(
        "state", [], initializer=tf.zeros_initializer(), trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES]
    )
    calls = itertools.count()
    before = state.read_value() + 0.0 * tf.reduce_sum(tf.matmul(weight, weight))
    with tf.control_dependencies([state.assign(before + 1.0)]):
        loss = tf.reduce_mean(weight) + 0.0 * features["x"]
    called = tf.numpy_function(lambda x: np.float32(next(calls) * 1000 + x), [features["x"]], tf.float32)
    return spec(params, loss, state=before, called=tf.ensure_shape(called, []))


def test_state_and_calls_of_a_worker_keep_the_order_of_its_steps(tmp_path: Path) -> None:
    """No step misses what the one before did to the worker's state, and the n-th call of Python is the n-th step's."""
    shown = {"steps_to_validate": 1, "model_dir": str(tmp_path), "max_steps": STEPS}
    train(model_of(ramp, stateful), 1, 1, **shown, **UNROLLED)
    found = logged(tmp_path)
    assert found["state"] == list(range(STEPS))
    assert found["called"] == [number * 1001 for number in range(STEPS)]


def through_functions(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be ``stateful`` in functions that are given the worker's state and a variable on a PS, in either order."""
    weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
    state = tf.get_variable(
        "state", [], initializer=tf.zeros_initializer(), trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES]
    )
    calls = itertools.count()

    @tf2.function
    def counted(x: Any) -> Any:
        called = tf.numpy_function(lambda x: np.float32(next(calls) * 1000 + x), [x + 0.0 * weight], tf.float32)
        slow = 0.0 * tf.reduce_sum(tf.matmul(tf.fill([300, 300], weight), tf.ones([300, 300])))
        before = state.read_value() + slow
        state.assign(before + 1.0)
        return before, tf.ensure_shape(called, [])

    @tf2.function
    def half(x: Any) -> Any:
        return 0.0 * state * x + tf.square(weight) / 2

    before, called = counted(features["x"])
    return spec(params, half(features["x"]), state=before, called=called)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_a_function_is_given_first_decides_nothing(tmp_path: Path, mode: str) -> None:
    """Steps keep their order, and in sync read the parameters of the step before, whatever else a function uses."""
    shown = {"steps_to_validate": 1, "model_dir": str(tmp_path), "max_steps": STEPS}
    train(model_of(ramp, through_functions), 1, 1, mode=mode, **shown, **UNROLLED)
    found = logged(tmp_path)
    assert found["state"] == list(range(STEPS))
    assert found["called"] == [number * 1001 for number in range(STEPS)]
    assert variables_of(tmp_path)["weight"] == 0.5**STEPS


def clipping(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that clips its weight and sums it up in UPDATE_OPS, both slower than its gradient is."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    total = tf.get_variable("total", [], initializer=tf.zeros_initializer(), trainable=False)
    other = tf.get_variable("other", [], initializer=tf.zeros_initializer())
    product = tf.fill([400, 400], features["x"])
    for _ in range(8):
        product = tf.matmul(product, tf.fill([400, 400], 1 / 400))
    slow = 0.0 * tf.reduce_sum(product)
    with tf.control_dependencies([slow]):
        summed = total.assign_add(weight.read_value(), read_value=False)
    clipped = weight.assign(tf.maximum(weight.read_value(), -1000.0) + slow, read_value=False)
    for update in (clipped, summed):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return spec(params, weight + other)


@pytest.mark.parametrize(
    ("mode", "workers", "flags"), [("async", 1, UNROLLED), ("sync", 1, PLAIN), ("sync", 2, UNROLLED)]
)
def test_what_a_model_does_to_its_weights_comes_before_the_update(
    tmp_path: Path, mode: str, workers: int, flags: dict[str, Any]
) -> None:
    """As ``tf.control_dependencies`` on UPDATE_OPS does it: a weight that is read and written loses no update."""
    train(model_of(ramp, clipping), 2, workers, mode=mode, model_dir=str(tmp_path), max_steps=STEPS, **flags)
    values = variables_of(tmp_path)
    assert values["weight"] == values["other"] == -0.5 * STEPS
    assert values["total"] == -0.5 * sum(range(STEPS))


def halving(how: str) -> Any:
    """Return a model that halves in each step what its optimizer, or its gradient, goes by."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign(rate * 0.5, read_value=False))

        @tf.custom_gradient
        def slowed(value: Any) -> Any:
            return tf.identity(value), lambda gradient: gradient * rate.read_value()

        rates = {
            "rate": rate,
            "branch": lambda: tf.cond(tf.random.uniform([]) < 2.0, rate.read_value, lambda: 0.0),
            "loop": lambda: tf.while_loop(lambda turn, _: turn < 1, lambda turn, _: (turn + 1, rate + 0.0), (0, 0.0))[
                1
            ],
        }
        loss = weight + 0.0 * features["x"]
        optimizer = tf.train.GradientDescentOptimizer(rates.get(how, 1.0))
        return tfps.ModelSpec(loss=slowed(loss) if how == "gradient" else loss, optimizer=optimizer)

    return model_fn


@pytest.mark.parametrize(
    ("mode", "flags", "how"),
    [
        *(("async", UNROLLED, how) for how in ("rate", "gradient", "branch", "loop")),
        *(("sync", UNROLLED, how) for how in ("rate", "gradient", "branch", "loop")),
        ("async", PLAIN, "loop"),
        ("sync", PLAIN, "branch"),
    ],
)
def test_an_optimizer_goes_by_what_a_step_has_made_of_its_variables(
    tmp_path: Path, mode: str, flags: dict[str, Any], how: str
) -> None:
    """As TensorFlow's ``minimize`` after UPDATE_OPS: the first update has half the rate, and none is lost or early."""
    train(model_of(ramp, halving(how)), 2, 1, mode=mode, model_dir=str(tmp_path), max_steps=12, **flags)
    values = variables_of(tmp_path)
    assert values["rate"] == 2.0**-12
    assert values["weight"] == 2.0**-12 - 1


def grouped(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a group of a PS's count and a worker's own in UPDATE_OPS; its gradient is the latter."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)
    own = tf.get_variable(
        "own", [], initializer=tf.zeros_initializer(), trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES]
    )
    turn = own.read_value()
    with tf.control_dependencies([turn]):
        both = tf.group(count.assign_add(1.0, read_value=False), own.assign_add(1.0, read_value=False))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, both)
    return spec(params, weight * turn + 0.0 * features["x"])


def test_a_group_of_changes_is_each_workers_where_it_is_its_own(tmp_path: Path) -> None:
    """In sync, of what is grouped in UPDATE_OPS, the PS's part is the chief's, and the state of a worker each one's."""
    train(model_of(ramp, grouped), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=12)
    values = variables_of(tmp_path)
    assert values["count"] == 12
    assert values["weight"] == -0.5 * sum(range(12))


def following_the_loss(is_logged: bool) -> Any:
    """Return a model whose gradient is a worker's own count, which needs the loss; the loss counts on a PS."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)
        own = tf.get_variable(
            "own", [], initializer=tf.zeros_initializer(), trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES]
        )
        turn = own.read_value()
        with tf.control_dependencies([count.assign_add(1.0, read_value=False)]):
            loss = tf.identity(weight * turn + 0.0 * features["x"])
        with tf.control_dependencies([turn]):
            changed = own.assign(turn + 1.0 + 0.0 * tf.stop_gradient(loss))
        if not is_logged:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, changed)
        return spec(params, loss, **({"own": changed} if is_logged else {}))

    return model_fn


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_workers_own_change_may_need_what_the_loss_changes_on_a_ps(tmp_path: Path, is_logged: bool) -> None:
    """In sync, each worker changes its own state, in UPDATE_OPS or as it is logged: its loss changes the PS anyway."""
    train(model_of(ramp, following_the_loss(is_logged)), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=12)
    assert variables_of(tmp_path)["weight"] == -0.5 * sum(range(12))


def test_a_call_of_python_in_a_group_is_each_workers(tmp_path: Path) -> None:
    """In sync, each worker calls it in each step, though the change of a PS in the same group is the chief's alone."""
    calls: list[float] = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        count = tf.get_variable("changes", [], initializer=tf.zeros_initializer(), trainable=False)
        called = tf.numpy_function(lambda x: calls.append(float(x)), [features["x"]], [])
        both = tf.group(count.assign_add(1.0, read_value=False), called)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, both)
        return spec(params, weight * features["x"])

    train(model_of(indexed, model_fn), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=12)
    assert variables_of(tmp_path)["changes"] == 12
    assert sorted(calls) == [0.0] * 12 + [1.0] * 12


def test_two_inputs_of_a_model_stay_together() -> None:
    """A step takes what each of its iterators gives at the same turn: no other step of the worker may come between."""
    with tf.Graph().as_default() as graph:
        ours, own = (tf.data.make_one_shot_iterator(tf.data.Dataset.range(9)).get_next() for _ in range(2))
        assert not UnrolledStep(graph, [ours]).keeps_order
        assert UnrolledStep(graph, [ours, own]).keeps_order


def counting_all(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose loss is slow to be NaN, with changes of its own that look at no number of the batch."""
    weight = tf.get_variable("weight", [2], initializer=tf.zeros_initializer())
    made = {"initializer": tf.zeros_initializer(), "trainable": False}
    count, rows = tf.get_variable("count", [], **made), tf.get_variable("rows", [], tf.int64, **made)
    batches = tf.cast(tf.size(features["x"]), tf.int64)
    for update in (count.assign_add(1.0, read_value=False), rows.assign_add(batches, read_value=False)):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    product = tf.fill([300, 300], 1.0)
    for _ in range(8):
        product = tf.matmul(product, tf.fill([300, 300], 1 / 300))
    return spec(params, tf.reduce_sum(weight) * features["x"] * tf.reduce_mean(product))


@pytest.mark.parametrize(
    ("mode", "workers", "wire"), [("async", 1, "plain"), ("async", 2, "packed"), ("sync", 2, "packed")]
)
def test_a_step_that_is_skipped_changes_nothing(tmp_path: Path, mode: str, workers: int, wire: str) -> None:
    """Not the optimizer alone: what the model itself counts is as many as the steps that were taken."""
    flags = {"mode": mode, "wire": wire, "on_nan": "skip", "max_steps": 60, "model_dir": str(tmp_path)}
    train(model_of(broken_now_and_then, counting_all), 2, workers, **flags)
    values = variables_of(tmp_path)
    assert values["count"] == values["rows"] == values["global_step"] == 60
    assert summary(tmp_path)["batches_skipped"] >= 1


def test_the_first_weights_of_a_keras_layer_are_given_once(tmp_path: Path) -> None:
    """``set_weights`` in a model is no part of its steps: it would take back what they learn."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        layer = tf2.keras.layers.Dense(1, use_bias=False, name="dense")
        y = layer(tf.ones([1, 2]) + 0.0 * features["x"])
        layer.set_weights([np.zeros([2, 1], np.float32)])
        return spec(params, tf.reduce_sum(y))

    first = {}
    for steps in (1, 9):
        train(model_of(ramp, model_fn), 1, 1, max_steps=steps, model_dir=str(tmp_path))
        first[steps] = next(value for name, value in variables_of(tmp_path).items() if "kernel" in name)
    np.testing.assert_allclose(first[9], first[1] - 8 * 0.5, rtol=1e-6)


def forgetful(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that counts its updates, and keeps in a variable, unchecked, what it was given."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    kept = tf.get_variable("kept", [], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, kept.assign(0.5 * kept + features["x"], read_value=False))
    return spec(params, -2.0 * weight)


def test_the_own_update_of_a_variable_that_is_split_runs_with_the_step(tmp_path: Path) -> None:
    """TensorFlow gives a list of operations for it, one for each slice."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        count = tf.get_variable("count", [40], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, count.assign_add(tf.ones([40])))
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=tf.train.GradientDescentOptimizer(1.0))

    ones = model_of(lambda mode, *_: None if mode == "eval" else dataset_of(np.float32([1])).repeat(), model_fn)
    train(ones, 2, 1, max_steps=STEPS, min_slice_mb=1e-5, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["count"].tolist() == [STEPS] * 40


def broken_now_and_then(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` one of whose numbers is NaN."""
    numbers = np.where(np.arange(STEPS) == 20, np.nan, 1.0).astype(np.float32)
    return None if mode == "eval" else dataset_of(numbers)


def test_no_nan_reaches_a_ps_by_what_a_model_assigns(tmp_path: Path) -> None:
    """A batch that would make a model's own variable NaN is skipped, and its gradient, finite itself, not applied."""
    flags = {"max_steps": STEPS - 1, "model_dir": str(tmp_path), "on_nan": "skip"}
    train(model_of(broken_now_and_then, forgetful), 1, 1, **flags)
    values = variables_of(tmp_path)
    assert values["weight"] == values["global_step"] == STEPS - 1
    assert values["kept"] == pytest.approx(2.0)


def test_a_nan_that_a_model_would_assign_ends_the_job(tmp_path: Path) -> None:
    """Without ``--on_nan=skip`` the job ends with 66, naming the variable, which stays finite."""
    ended = run_job(model_of(broken_now_and_then, forgetful), 1, 1, max_steps=STEPS, model_dir=str(tmp_path))
    assert isinstance(ended["worker/0"], DivergedError)
    assert "what the model assigns to kept holds NaN at step 21" in str(ended["worker/0"])


def in_an_array(weight: Any) -> Any:
    """Return a variable's value, by way of an array on the same device, which ends with the step."""
    array = tf.TensorArray(tf.float32, 1, colocate_with_first_write_call=False)
    return array.write(0, weight).read(0)


def own_and_theirs() -> tuple[Any, Any, Any]:
    """Return a variable on a worker, one on a PS, and what is computed from that one without changing it."""
    with tf.device("/job:worker/task:1"):
        own = tf.get_variable("own", [], initializer=tf.zeros_initializer())
    with tf.device("/job:ps/task:0"):
        weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
        return own, weight, in_an_array(weight) + tf.data.Dataset.range(3).reduce(0.0, lambda all_, _: all_ + weight)


def both(how: str, *handles: Any) -> Any:
    """Return handles as they are passed on."""
    return tf.raw_ops.IdentityN(input=handles) if how == "identity" else tf.function(lambda: handles, autograph=False)()


@pytest.mark.parametrize("how", ["identity", "function"])
def test_it_is_known_where_a_handle_that_is_passed_on_comes_from(how: str) -> None:
    """A change of a worker's own is every worker's, that of a PS is not; nor does it count that one is beside it."""
    with tf.Graph().as_default() as graph:
        own, weight, read = own_and_theirs()
        for handles in (both(how, own.handle, weight.handle), both(how, weight.handle, own.handle)[::-1]):
            mine, theirs = (tf.raw_ops.AssignAddVariableOp(resource=handle, value=read) for handle in handles)
            graph.get_collection_ref(tf.GraphKeys.UPDATE_OPS)[:] = [mine, theirs]
            assert list(model_updates.of_step(graph, on_ps=False)) == [mine]


CHANGES = {
    "nd": lambda kept, x: kept.scatter_nd_add([[0]], x),
    "part": lambda kept, x: kept[0:1].assign(x),
    "optimizer": lambda kept, x: tf.train.MomentumOptimizer(1.0, 0.5).apply_gradients([(x, kept)]),
    "called": lambda kept, x: tf.function(lambda x: kept.assign_add(tf.square(x)), autograph=False)(x),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_no_nan_reaches_a_ps_by_any_change(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever operation would bring NaN to a variable on a PS, nothing of that step is run; the variable is named."""
    caplog.set_level(logging.INFO, "tfps")

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        update = CHANGES[kind](zeros("kept"), tf.reshape(features["x"], [1]))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return spec(params, -2.0 * weight)

    flags = {"max_steps": STEPS - 1, "model_dir": str(tmp_path), "on_nan": "skip"}
    train(model_of(broken_now_and_then, model_fn), 1, 1, **flags)
    assert "skipped a batch: what the model assigns to kept holds NaN at step 21" in caplog.messages
    values = variables_of(tmp_path)
    assert np.isfinite(values["kept"]).all()
    assert values["weight"] == values["global_step"] == STEPS - 1


@pytest.mark.parametrize("how", ["where", "cond"])
def test_a_function_may_look_at_nan_itself(tmp_path: Path, how: str) -> None:
    """What a function leaves out, it may be given."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight, kept = tf.get_variable("weight", [], initializer=tf.zeros_initializer()), zeros("kept")

        @tf.function(autograph=False)
        def keep(x: Any) -> Any:
            if how == "where":
                return kept.assign_add(tf.where(tf.is_nan(x), tf.zeros_like(x), x))
            return tf.cond(tf.is_nan(x[0]), kept.read_value, lambda: kept.assign_add(x).read_value())

        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, keep(tf.reshape(features["x"], [1])))
        return spec(params, -2.0 * weight)

    train(model_of(broken_now_and_then, model_fn), 1, 1, max_steps=STEPS, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["kept"] == STEPS - 1


def half(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose float16 gradients are finite, and their sum over two workers is not."""
    weight = tf.get_variable("weight", [2], tf.float16, tf.zeros_initializer())
    loss = tf.reduce_sum(tf.cast(weight, tf.float32)) * 60000.0 + 0.0 * features["x"]
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0 / 60000))


def test_the_sum_of_16_bit_gradients_does_not_overflow(tmp_path: Path) -> None:
    """In sync, the mean of two finite float16 gradients is finite and right."""
    train(model_of(ramp, half), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=4)
    assert variables_of(tmp_path)["weight"] == pytest.approx([-4.0, -4.0], rel=0.01)


def best_so_far(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a variable that starts at Inf, and a mask of the largest negative number."""
    weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
    best = tf.get_variable("best", [], initializer=tf.constant_initializer(np.inf), trainable=False)
    mask = tf.get_variable("mask", [8], initializer=tf.constant_initializer(tf.float32.min), trainable=False)
    loss = tf.square(weight) + 0.0 * features["x"] + tf.reduce_sum(tf.nn.softmax(tf.concat([mask, [1.0]], 0)))
    with tf.control_dependencies([best.assign(tf.where(features["x"] < 0, loss, best))]):
        return spec(params, tf.identity(loss))


def test_inf_and_large_numbers_that_a_model_means_are_saved(tmp_path: Path) -> None:
    """A variable that starts at Inf and one of the largest numbers end no job, and are in the checkpoint."""
    train(model_of(ramp, best_so_far), 1, 1, model_dir=str(tmp_path), max_steps=4)
    values = variables_of(tmp_path)
    assert np.isinf(values["best"])
    assert (values["mask"] == tf.float32.min).all()


def unequal(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` that gives the chief few batches, and others as many as they want."""
    if mode == "eval":
        return None
    data = dataset_of(np.ones(STEPS, np.float32))
    return data.take(5) if context.input_pipeline_id == 0 else data.repeat()


def counting(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose weight counts its updates."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    return spec(params, -2.0 * weight * features["x"])


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_the_others_go_on_when_the_chiefs_input_ends(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The job reaches ``--max_steps``, although the chief gives its tickets back when the others have drawn all."""
    train(model_of(unequal, counting), 1, 2, model_dir=str(tmp_path), max_steps=40, **flags)
    values = variables_of(tmp_path)
    assert values["weight"] == values["global_step"] == 40


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_a_step_that_is_skipped_changes_nothing_in_a_branch_or_a_loop(tmp_path: Path, flags: dict[str, Any]) -> None:
    """What the model changes there waits as well until it is known that the loss is finite."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        branch, loop = zeros("branch"), zeros("loop")

        def body(index: Any) -> Any:
            with tf.control_dependencies([loop.assign_add([1.0])]):
                return index + 1

        in_branch = tf.cond(features["x"] < 1e30, lambda: branch.assign_add([1.0]).op, tf.no_op)
        in_branch_of_nan = tf.cond(tf.is_nan(features["x"]), lambda: branch.assign_add([100.0]).op, tf.no_op)
        in_loop = tf.while_loop(lambda index: index < 2, body, [tf.constant(0)])
        for update in (in_branch, in_branch_of_nan, in_loop):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        big = tf.matmul(tf.ones([300, 300]) * features["x"], tf.ones([300, 300]))
        return spec(params, weight * (features["x"] + 0.0 * tf.reduce_sum(big)))

    model = model_of(broken_now_and_then, model_fn)
    train(model, 1, 1, model_dir=str(tmp_path), max_steps=STEPS - 1, on_nan="skip", **flags)
    values = variables_of(tmp_path)
    assert summary(tmp_path)["batches_skipped"] > 0
    assert (values["branch"], values["loop"]) == (STEPS - 1, 2 * (STEPS - 1))


def remembering(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that reads a variable for its loss and changes it, in one branch."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    memory = zeros("memory")

    def taken() -> Any:
        before = memory.read_value()
        with tf.control_dependencies([before]):
            return before, memory.assign_add([1.0])

    before, update = tf.cond(tf.size(features["x"]) < 7, taken, lambda: (tf.zeros([1]), tf.zeros([1])))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return spec(params, weight * features["x"] + 0.0 * tf.stop_gradient(before[0]))


@pytest.mark.parametrize(("mode", "flags"), [("async", UNROLLED), ("async", PLAIN), ("sync", UNROLLED)])
def test_what_a_branch_changes_waits_though_the_loss_reads_it_there(
    tmp_path: Path, mode: str, flags: dict[str, Any]
) -> None:
    """Both get the variable through one Switch, which the loss needs: the change itself waits until the step counts."""
    model = model_of(broken_now_and_then, remembering)
    train(model, 1, 1, model_dir=str(tmp_path), max_steps=STEPS - 1, on_nan="skip", mode=mode, **flags)
    values = variables_of(tmp_path)
    assert summary(tmp_path)["batches_skipped"] > 0
    assert values["memory"] == values["global_step"] == STEPS - 1


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_what_a_branch_changes_in_sync_counts_once_for_each_update(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The chief has begun a step, for which there is no mean any more, when the other worker's input has ended."""
    sizes = (8, 3)

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.ones(sizes[context.input_pipeline_id], np.float32))

    train(model_of(input_fn, remembering), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=100, **flags)
    values = variables_of(tmp_path)
    assert values["memory"] == values["global_step"] == 3


def changing_early(where: str) -> Any:
    """Return a ``model_fn`` that changes "memory" after the loss has read it, before that, in a loop with it, or not.

    "mine", on the worker, is changed in the same place.
    """

    def changed(memory: Any, mine: Any) -> Any:
        before = memory.read_value()
        with tf.control_dependencies([before]), tf.control_dependencies([memory.assign_add([1.0]).op]):
            return before, mine.assign_add([1.0])

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight, memory = tf.get_variable("weight", [], initializer=tf.zeros_initializer()), zeros("memory")
        local = {"collections": [tf.GraphKeys.LOCAL_VARIABLES], "trainable": False}
        mine = tf.get_variable("mine", [1], initializer=tf.zeros_initializer(), **local)
        before = update = tf.zeros([1])
        if where == "loop":

            def body(index: Any, total: Any) -> Any:
                old, new = changed(memory, mine)
                with tf.control_dependencies([new]):
                    return index + 1, total + old

            update, before = tf.while_loop(lambda index, _: index < 2, body, [tf.constant(0), before])
        elif where:
            before, update = changed(memory, mine)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        with tf.control_dependencies([update] if where == "loss" else []):
            return spec(params, weight * features["x"] + 0.0 * tf.stop_gradient(before[0]))

    return model_fn


@pytest.mark.parametrize(
    ("where", "flags", "named"),
    [
        ("", {"on_nan": "skip"}, None),
        ("late", {"on_nan": "skip"}, None),
        ("late", {"mode": "sync"}, None),
        ("loss", {}, None),
        ("loss", {"on_nan": "skip"}, "mine and 1 more"),
        ("loss", {"mode": "sync"}, "memory"),
        ("loop", {"on_nan": "skip"}, "mine and 1 more"),
        ("loop", {"mode": "sync"}, "memory"),
    ],
)
def test_a_change_that_cannot_wait_is_named(
    where: str, flags: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named where steps that do not count would change something: on a PS in sync, anything where they skip."""
    builder.training(JobConfig(**flags), cluster_of(1, 2), Task("worker", 0), model_of(ramp, changing_early(where)))
    found = [text for text in caplog.messages if "before it is certain" in text]
    assert len(found) == (named is not None)
    assert not named or f"model_fn changes {named} before" in found[0]


@pytest.mark.parametrize("flags", [UNROLLED, PLAIN])
def test_in_sync_a_loop_changes_what_its_loss_waits_for_on_each_worker(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The loss of both needs the loop, which takes two turns."""
    train(model_of(ramp, changing_early("loop")), 1, 2, mode="sync", model_dir=str(tmp_path), max_steps=STEPS, **flags)
    values = variables_of(tmp_path)
    assert (values["global_step"], values["memory"]) == (STEPS, 2 * 2 * STEPS)


def test_states_of_random_numbers_and_queues_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """A step that is skipped may draw numbers, and what it puts in a queue it takes out."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        drop, weight = tf.keras.layers.Dropout(0.5), scalar("weight", True)
        queue = tf.FIFOQueue(1, tf.float32, shapes=[[]])
        with tf.control_dependencies([queue.enqueue(features["x"])]):
            twice = drop(drop(weight + tf.zeros([4]), training=True), training=True)
        drawn = tf2.random.Generator.from_seed(1).normal([])
        return spec(params, tf.reduce_mean(twice) * queue.dequeue() * drawn)

    builder.training(JobConfig(on_nan="skip"), cluster_of(1, 1), Task("worker", 0), model_of(ramp, model_fn))
    assert "before it is certain" not in caplog.text


@pytest.mark.parametrize("is_logged", [False, True])
@pytest.mark.parametrize(("mode", "flags"), [("async", UNROLLED), ("async", PLAIN), ("sync", UNROLLED)])
def test_a_long_loop_may_give_the_loss_and_change_a_variable(
    tmp_path: Path, mode: str, flags: dict[str, Any], is_logged: bool
) -> None:
    """A turn begins when the one of ten before has ended, so that a change in it cannot wait for the loss."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight, count = scalar("weight", True), scalar("count")
        turn = lambda at, total, _: (at + 1, total + weight, count.assign_add(1.0))  # noqa: E731
        first = [tf.constant(0), tf.zeros([]), tf.zeros([])]
        _, total, counted = tf.while_loop(lambda at, *_: at < 16, turn, first)
        tf.add_to_collection("others" if is_logged else tf.GraphKeys.UPDATE_OPS, counted)
        return spec(params, total / 16 + 0.0 * features["x"], **({"counted": counted} if is_logged else {}))

    train(model_of(ramp, model_fn), 1, 1, mode=mode, model_dir=str(tmp_path), max_steps=12, **flags)
    values = variables_of(tmp_path)
    assert (values["weight"], values["count"]) == (-0.5 * 12, 16 * 12)


@pytest.mark.parametrize(("mode", "workers", "flags"), KINDS_OF_JOB)
def test_what_a_shown_loop_changes_is_changed_in_every_step(
    tmp_path: Path, mode: str, workers: int, flags: dict[str, Any]
) -> None:
    """A logged tensor that is the result of a loop counts the steps of the job; in sync, those of the chief."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight, count = scalar("weight", True), scalar("count")
        turn = lambda index, _: (index + 1, count.assign_add(1.0))  # noqa: E731
        _, shown = tf.while_loop(lambda index, _: index < 2, turn, [tf.constant(0), tf.zeros([])])
        return spec(params, weight * features["x"], shown=shown)

    train(model_of(ramp, model_fn), 1, workers, mode=mode, model_dir=str(tmp_path), max_steps=STEPS, **flags)
    values = variables_of(tmp_path)
    assert values["count"] == 2 * values["global_step"] == 2 * STEPS


def showing(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that counts in what it shows: a logged tensor on the PS and a summary on the worker."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)
    own = tf.Variable(0.0, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], name="own")
    tf.summary.scalar("turns", own.assign_add(1.0))
    return spec(params, weight * features["x"], count=count.assign_add(1.0))


@pytest.mark.parametrize(("mode", "workers", "flags"), KINDS_OF_JOB)
def test_what_is_shown_counts_each_step(tmp_path: Path, mode: str, workers: int, flags: dict[str, Any]) -> None:
    """How often a tensor is shown does not change what it counts: each step once, in sync those of the chief."""
    flags = {**flags, "steps_to_validate": 10, "max_steps": STEPS}
    train(model_of(ramp, showing), 1, workers, mode=mode, model_dir=str(tmp_path), **flags)
    assert variables_of(tmp_path)["count"] == STEPS
    own = logged(tmp_path)["turns"]
    assert own[-1] == STEPS or workers == 2, own
    assert len(own) < STEPS / 2


def carrying(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model each of whose workers counts in a row and a table's entry of its own: by what they were before."""
    weight = tf.get_variable("weight", [64], initializer=tf.zeros_initializer())
    carry = tf.get_variable("carry", [2], initializer=tf.zeros_initializer(), trainable=False)
    table = tf2.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0, name="table")
    key = tf.cast(features["x"], tf.int64)
    slow = 0.0 * tf.reduce_sum(tf.matmul(tf.fill([300, 300], features["x"]), tf.ones([300, 300])))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, table.insert(key, table.lookup(key) + 1.0 + slow))
    with tf.control_dependencies([tf.scatter_update(carry, key, tf.gather(carry, key) + 1.0 + slow)]):
        return spec(params, tf.reduce_sum(weight) + 0.0 * features["x"])


@pytest.mark.parametrize("flags", [UNROLLED, {}])
def test_a_change_made_of_the_value_before_is_not_lost(tmp_path: Path, flags: dict[str, Any]) -> None:
    """A row and an entry that one worker alone changes count each of its steps, also where two runs might overlap."""
    train(model_of(indexed, carrying), 1, 2, max_steps=STEPS, model_dir=str(tmp_path), **flags)
    saved, tasks = variables_of(tmp_path), summary(tmp_path)["tasks"]
    steps = [tasks[f"worker/{index}"]["steps"] for index in (0, 1)]
    assert sum(steps) == STEPS
    assert saved["carry"].tolist() == steps
    entries = dict(zip(saved["table-keys"].tolist(), saved["table-values"].tolist(), strict=True))
    assert [entries.get(index, 0.0) for index in (0, 1)] == steps


def test_a_change_in_the_loss_keeps_steps_in_order() -> None:
    """Two runs of a worker would lose a row that the loss itself changes, where no update of the model's does."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        carry = tf.get_variable("carry", [2], initializer=tf.zeros_initializer(), trainable=False)
        changes = [tf.scatter_update(carry, [0], tf.gather(carry, [0]) + 1.0)] if params["learning_rate"] else []
        with tf.control_dependencies(changes):
            return spec(params, weight * features["x"])

    for rate, keeps_order in ((None, False), (0.5, True)):
        config = JobConfig(learning_rate=rate)
        built = builder.training(config, cluster_of(1, 1), Task("worker", 0), model_of(ramp, model_fn))
        assert built.keeps_order is keeps_order


def test_a_rate_that_the_model_changes_keeps_steps_in_order() -> None:
    """Two runs of a worker would lose a change that only the optimizer asks for."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        rate = tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False)
        falls = params["learning_rate"] is not None
        optimizer = tf.train.GradientDescentOptimizer(rate.assign(rate * 0.5) if falls else rate)
        return tfps.ModelSpec(loss=weight * features["x"], optimizer=optimizer)

    for given, keeps_order in ((None, False), (0.5, True)):
        config = JobConfig(learning_rate=given)
        built = builder.training(config, cluster_of(1, 1), Task("worker", 0), model_of(ramp, model_fn))
        assert built.keeps_order is keeps_order


def test_what_only_adds_may_overlap() -> None:
    """Averages that are added to, in the graph or in a function, keep two runs of a worker from nothing."""
    with tf.Graph().as_default() as graph:
        moving = tf.get_variable("moving", [], initializer=tf.zeros_initializer(), trainable=False)
        adds = tf2.function(lambda: moving.assign_add(1.0).read_value(), autograph=False)()
        assigns = tf2.function(lambda: moving.assign(moving * 2.0).read_value(), autograph=False)()
        assert not model_updates.need_order(graph, [moving.assign_sub(0.1 * (moving - 1.0)), adds], [])
        assert model_updates.need_order(graph, [assigns], [])
        assert model_updates.need_order(graph, [moving.assign(moving * 2.0)], [])


@pytest.mark.parametrize("shared_name", ["counts", "others"])
def test_handles_with_one_shared_name_are_of_one_resource(shared_name: str) -> None:
    """A table's entry that is made of its old value needs order, also where it is read through another handle."""
    with tf.Graph().as_default() as graph:
        key, (one, other) = (
            tf.constant([1], tf.int64),
            [
                tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name=name)
                for name in ("counts", shared_name)
            ],
        )
        old = tf.raw_ops.LookupTableFindV2(table_handle=other, keys=key, default_value=0.0)
        insert = tf.raw_ops.LookupTableInsertV2(table_handle=one, keys=key, values=old + 1.0)
        assert model_updates.need_order(graph, [insert], []) is (shared_name == "counts")


def test_a_defun_is_a_function_too() -> None:
    """A ``Defun``, whose call has the function's name as its type, is looked into as a ``tf.function`` is."""
    with tf.Graph().as_default() as graph:
        moving = tf.get_variable("moving", [], initializer=tf.zeros_initializer(), trainable=False)

        def defun(change: Any) -> Any:
            @function.Defun(tf.resource)
            def changing(handle: Any) -> Any:
                with tf.control_dependencies([change(handle)]):
                    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

            return changing(moving.handle)

        adds = defun(lambda handle: tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0))
        old = lambda handle: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)  # noqa: E731
        doubles = defun(lambda handle: tf.raw_ops.AssignVariableOp(resource=handle, value=2.0 * old(handle)))
        prints = defun(lambda handle: tf.print(old(handle)))
        assert not model_updates.need_order(graph, [adds], [])
        assert model_updates.need_order(graph, [doubles], [])
        assert [side_effects.acts(call.op) for call in (adds, doubles, prints)] == [False, False, True]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_steps_are_reported_that_a_run_with_updates_has_made(tmp_path: Path, mode: str) -> None:
    """Event files have each step once, the first to the last, also where a worker runs updates besides its PS."""
    shown = {"steps_to_validate": 1, "model_dir": str(tmp_path), "max_steps": STEPS, "mode": mode}
    train(model_of(ramp, showing), 1, 1, **shown, **UNROLLED)
    assert logged(tmp_path)["turns"] == [float(step + 1) for step in range(STEPS)]


def test_a_complex_number_may_be_nan() -> None:
    """NaN in either part of a complex value keeps a worker from sending it; Inf may be meant."""
    with tf.Graph().as_default(), tf.Session() as session:
        sent = tf.placeholder(tf.complex64, [2])
        checked = model_updates._without_nan(sent, "what the model assigns")
        good = np.array([1 + 2j, complex(np.inf, 0)], np.complex64)
        assert session.run(checked, {sent: good}).tolist() == good.tolist()
        for bad in (complex(np.nan, 0), complex(0, np.nan)):
            with pytest.raises(tf.errors.InvalidArgumentError, match="what the model assigns"):
                session.run(checked, {sent: np.array([1, bad], np.complex64)})


def scalar(name: str, trainable: bool = False) -> Any:
    """Return a variable that starts at 0."""
    return tf.get_variable(name, [], initializer=tf.zeros_initializer(), trainable=trainable)


def keeping(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model that keeps a weight, read after another update, as an integer, which is not checked for NaN."""
    weight, other = scalar("weight", True), scalar("other", True)
    count = scalar("count")
    kept = tf.get_variable("kept", [], tf.int32, initializer=tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([count.assign_add(1.0)]):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, kept.assign(tf.cast(weight, tf.int32)))
    return tfps.ModelSpec(loss=weight + other, optimizer=tf.train.GradientDescentOptimizer(1.0))


@pytest.mark.parametrize("flags", [{}, UNROLLED, PLAIN])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_update_sees_the_weights_of_its_step(tmp_path: Path, mode: str, flags: dict[str, Any]) -> None:
    """Also one that only reads a weight, late in its step: the optimizer changes the weight after it, packed or not."""
    if mode == "sync":
        flags = {name: value for name, value in flags.items() if name != "runs_in_flight"}
    train(model_of(ramp, keeping), 1, 1, mode=mode, model_dir=str(tmp_path), max_steps=24, **flags)
    found = variables_of(tmp_path)
    assert (found["weight"], found["count"], found["kept"]) == (-24, 24, -23)


class Memory(tf2.keras.layers.Layer):  # type: ignore[misc]
    """Returns a row, and raises it by 1."""

    def build(self, _: Any) -> None:
        """Create the rows."""
        self.rows = tf2.Variable(tf.zeros([4]), trainable=False, name="rows")

    def call(self, ids: Any) -> Any:
        """Return the rows of ``ids`` as they were."""
        old = tf.gather(self.rows, ids)
        self.rows.scatter_add(tf.IndexedSlices(tf.ones_like(old), ids))
        return old


class Doubling(tf2.keras.layers.Layer):  # type: ignore[misc]
    """Doubles its state and adds 1, in a function."""

    def build(self, _: Any) -> None:
        """Create the state."""
        self.state = tf2.Variable(0.0, trainable=False, name="state")

    @tf.function
    def call(self, x: Any) -> Any:
        """Return ``x``."""
        self.state.assign(self.state * 2.0 + 1.0)
        return x + 0.0


def calling_twice(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with two calls of each layer, of which none takes the result of the other."""
    weight, seen = scalar("weight", True), scalar("seen")
    memory, doubling = Memory(name="memory"), Doubling(name="doubling")
    _, second = memory(tf.constant([0])), memory(tf.constant([0]))
    doubled = doubling(features["x"]) + doubling(features["x"])
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, seen.assign(tf.reduce_sum(second)))
    return tfps.ModelSpec(loss=weight + 0.0 * doubled, optimizer=tf.train.GradientDescentOptimizer(1.0))


@pytest.mark.parametrize("flags", [{}, PLAIN])
def test_calls_and_lookups_of_a_layer_keep_their_order(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The second lookup sees what the first call has added, and no change of a function is lost."""
    train(model_of(ramp, calling_twice), 1, 1, model_dir=str(tmp_path), max_steps=3, **flags)
    found = {name.rpartition("/")[2]: value for name, value in variables_of(tmp_path).items()}
    assert found["rows"].tolist() == [6, 0, 0, 0]
    assert (found["seen"], found["state"]) == (5, 2**6 - 1)


def ending_with_nan(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` in which each other number is NaN."""
    return None if mode == "eval" else dataset_of(np.float32([np.nan, 1.0] * STEPS))


def halving_slowly(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model with a loss that is slow to be NaN, and with changes that precede the gates: rate, clip and count."""
    weight, rate = (
        scalar("weight", True),
        tf.get_variable("rate", [], initializer=tf.ones_initializer(), trainable=False),
    )
    kept = tf.get_variable("kept", [], tf.int32, initializer=tf.zeros_initializer(), trainable=False)
    counted = kept.assign_add(tf.cast(weight * 0.0, tf.int32) + 1, read_value=False)
    for update in (rate.assign(rate * 0.5, read_value=False), weight.assign_add(1.0, read_value=False), counted):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    product = tf.fill([300, 300], 1.0)
    for _ in range(8):
        product = tf.matmul(product, tf.fill([300, 300], 1 / 300))
    loss = weight * features["x"] * tf.reduce_mean(product)
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))


@pytest.mark.parametrize("wire", ["plain", "packed"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_step_that_is_skipped_changes_nothing_before_the_update(tmp_path: Path, mode: str, wire: str) -> None:
    """Nor does it change what the optimizer waits for: the learning rate, its own weight, or a count that reads it."""
    flags = {"mode": mode, "wire": wire, "on_nan": "skip", "max_steps": 6, "model_dir": str(tmp_path)}
    train(model_of(ending_with_nan, halving_slowly), 1, 1, **flags)
    values = variables_of(tmp_path)
    assert summary(tmp_path)["batches_skipped"] >= 5
    assert (values["rate"], values["kept"]) == (2.0**-6, 6)
    assert values["weight"] == pytest.approx(6 - (1 - 2.0**-6))


def test_a_change_waits_for_all_checks_by_one_transfer() -> None:
    """The worker tells each PS once that the step counts, not once for each check."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weights = [tf.get_variable(f"weight_{index}", [4], initializer=tf.zeros_initializer()) for index in range(2)]
        for weight in weights:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, weight.assign(tf.clip_by_value(weight, -1.0, 1.0)))
        return spec(params, features["x"] * tf.reduce_sum(tf.add_n(weights)))

    config = JobConfig(mode="sync")
    built = builder.training(config, cluster_of(2, 1), Task("worker", 0), model_of(ramp, model_fn))
    sent = [(one.tensor, one.target) for one in transfers(built.fetches) if one.tensor.startswith("^tfps/")]
    assert sorted(sent) == [("^tfps/counts", "ps/0"), ("^tfps/counts", "ps/1")]
