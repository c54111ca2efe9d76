"""What is found in a model before anything starts: variables, tables and input of its evaluation among it."""

import contextlib
import dataclasses
import errno
import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, job, linear, model_of, run_job, train, variables_of, wait_until
from support.processes import POWERS, summary

import tfps
from tfps.cli import evaluate
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError, DataError, ModelError
from tfps.models import params as model_params
from tfps.runtime.coordination.compatibility import digest
from tfps.runtime.graph import builder, model_calls, plan, serving
from tfps.runtime.graph.checks import model_check
from tfps.runtime.results import evaluation, export

pytestmark = pytest.mark.slow

CLUSTER = Cluster(("ps:1", "ps:2"), ("worker:1", "worker:2"))  # of which nothing is started


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` whose evaluation has four batches."""
    data = dataset_of(np.float32([1, 2, 3, 4]))
    return data.repeat() if mode == "train" else data


def spec_of(loss: Any, **fields: Any) -> tfps.ModelSpec:
    """Return a whole ``ModelSpec``."""
    return tfps.ModelSpec(
        loss=loss, predictions={"y": loss}, optimizer=tf.train.GradientDescentOptimizer(0.01), **fields
    )


def shifted(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` whose moving average is in evaluation only."""
    weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
    shift = 0.0 if mode == "train" else tf.get_variable("moving_mean", [])
    return spec_of(tf.square(weight * features["x"] - shift))


def table_of(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` that fills two tables in training and looks up in them in evaluation."""
    ids = tf.cast(tf.reshape(features["x"], [1]), tf.int64)
    tables = [tf2.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1, name=f"seen{i}") for i in range(2)]
    filled = [table.insert(ids, ids * 100) for table in tables] if mode == "train" else []
    weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
    with tf.control_dependencies(filled):
        loss = tf.square(weight * features["x"])
    found = {f"found{i}": tf.metrics.mean(table.lookup(ids)) for i, table in enumerate(tables)}
    return spec_of(loss, eval_metric_ops=found)


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_evaluation_looks_up_in_the_tables_that_training_filled(tmp_path: Path, wire: str) -> None:
    """The final evaluation reads each mutable table on the PS where training has it, for any wire."""
    train(model_of(ones, table_of), num_ps=2, num_workers=1, max_steps=8, wire=wire, model_dir=str(tmp_path))
    reported = summary(tmp_path)["eval"]
    assert (reported["found0"], reported["found1"]) == (250, 250)


def test_a_variable_of_evaluation_alone_is_found_before_training(tmp_path: Path) -> None:
    """A variable that training does not have is the model's mistake, reported with its line before the first step."""
    model = model_of(ones, shifted)
    reported = (
        f"{__file__}, line {shifted.__code__.co_firstlineno + 3}: variable 'moving_mean' of mode='eval' does not exist "
        "in mode='train', so it has no trained value: create it under the same name for mode='train' too"
    )
    with job(model, num_workers=1, max_steps=10, model_dir=str(tmp_path)) as running:
        wait_until(lambda: "worker/0" in running.ended)
    error = running.ended["worker/0"]
    assert isinstance(error, ModelError)
    assert reported in str(error)
    assert summary(tmp_path)["global_step"] == 0
    for find in (model_check.build_once, plan.make):
        with pytest.raises(ModelError) as caught:
            find(JobConfig(), CLUSTER, model)
        assert reported in str(caught.value)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_params_have_issync_as_the_mode_is(mode: str) -> None:
    """``issync`` is True or False for whichever flag gave the mode: a model may branch on it."""
    assert model_params.tracked_flags(JobConfig(mode=mode))["issync"] is (mode == "sync")


@pytest.mark.parametrize(("data_dir", "read"), [("", open), ("/no/such", tf.gfile.ListDirectory)])
def test_data_that_input_fn_cannot_read_is_65(read: Any, data_dir: str) -> None:
    """A missing file is a DataError with the line of ``input_fn``, the path, and what is known of ``--data_dir``."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return dataset_of(list(read(params["data_dir"] + "/train.csv")))

    reported = f"check --data_dir={data_dir}" if data_dir else "--data_dir is not given"
    where = f"{__file__}, line {input_fn.__code__.co_firstlineno + 1}: "
    for find in (model_check.build_once, plan.make):
        with pytest.raises(DataError, match=rf"{where}.*{data_dir}/train\.csv.*: {reported}\.\n    return") as caught:
            find(JobConfig(data_dir=data_dir), CLUSTER, model_of(input_fn, shifted))
        assert caught.value.exit_code == 65


def test_a_name_that_params_or_features_do_not_have_is_explained() -> None:
    """A KeyError of either says what they hold; one of the model's own dict has no such hint."""

    def hidden(mode: str, params: Any, context: Any) -> Any:
        return ones(mode, params, context).take(params["hidden_units"])

    def upper(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        return spec_of(features["X"])

    def own(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        return spec_of({}["X"])

    flags = "KeyError: 'hidden_units' (params holds the flags of the job; other values are constants of the model file)"
    for input_fn, model_fn, reported in (
        (hidden, shifted, flags),
        (ones, upper, "KeyError: 'X' (features has 'x')"),
        (ones, own, "KeyError: 'X'"),
    ):
        with pytest.raises(ModelError) as caught:
            model_check.build_once(JobConfig(), CLUSTER, model_of(input_fn, model_fn))
        assert f"{reported}\n    return" in str(caught.value)


def test_an_element_of_a_dataset_is_no_dataset() -> None:
    """What a one-shot iterator gives is refused with what to return."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return tf.data.make_one_shot_iterator(ones(mode, params, context)).get_next()

    reported = (
        r"must return a tf.data.Dataset of \(features, labels\): return the dataset itself, not its iterator's get_"
    )
    with pytest.raises(ModelError, match=reported):
        model_check.build_once(JobConfig(), CLUSTER, model_of(input_fn, shifted))


def test_other_errors_of_input_fn_are_what_they_are() -> None:
    """A limit of the machine is no fault of the data; a DataError of the model's own is passed on."""
    for raised, kind in ((OSError(errno.EMFILE, "Too many open files"), ModelError), (DataError("as is"), DataError)):

        def input_fn(mode: str, params: Any, context: Any, error: Exception = raised) -> Any:
            raise error

        with pytest.raises(kind, match=r"Too many open files\n|^as is$"):
            model_check.build_once(JobConfig(), CLUSTER, model_of(input_fn, shifted))


def test_a_variable_of_another_shape_in_evaluation_is_found() -> None:
    """A variable whose shape depends on the mode is reported with both shapes."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        return spec_of(tf.reduce_sum(tf.get_variable("weight", [2 if mode == "train" else 3]) * features["x"]))

    with pytest.raises(
        ModelError, match=r"'weight' is float32 of shape \(3,\) in mode='eval' and .* \(2,\) in mode='tr"
    ):
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, model_fn))


@pytest.mark.parametrize("kind", ["resource", "ref"])
def test_a_variable_that_nothing_initializes_is_found(kind: str) -> None:
    """It is the model's mistake, with its line; as an error of the first step it looks as a PS does that was lost."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        hidden = tf.Variable(2.0, collections=[], name="hidden", use_resource=kind == "resource")
        return spec_of(tf.get_variable("weight", [], initializer=tf.ones_initializer()) * features["x"] * hidden)

    line = model_fn.__code__.co_firstlineno + 1
    for find in (model_check.build_once, plan.make):
        with pytest.raises(ModelError, match=f"{__file__}, line {line}: nothing initializes variable 'hidden': leave"):
            find(JobConfig(), CLUSTER, model_of(ones, model_fn))


@pytest.mark.parametrize("where", ["update", "loss", "function"])
def test_a_model_that_changes_the_global_step_is_refused(where: str) -> None:
    """Steps would count twice, and the job end before its last one."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        step = tf.train.get_global_step()
        raised = tf2.function(lambda: step.assign_add(1), autograph=False)() if where == "function" else None
        raised = step.assign_add(1) if raised is None else raised
        if where == "update":
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, raised)
            return spec_of(weight * features["x"])
        return spec_of(weight * features["x"] + 0.0 * tf.cast(raised, tf.float32))

    with pytest.raises(ModelError, match=r"line \d+: the model changes global_step, but tfps increments"):
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, model_fn))


def test_a_queue_that_nothing_fills_is_refused() -> None:
    """A step would wait for it without end: tfps starts no queue runner."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return spec_of(weight * tf.reduce_sum(tf.train.batch([features["x"]], 2)))

    with pytest.raises(ModelError, match=r"line \d+: nothing fills the queue 'batch/fifo_queue'"):
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, model_fn))


@pytest.mark.parametrize("form", ["called", "updated", "beside"])
def test_a_keras_metric_of_evaluation_is_refused(form: str) -> None:
    """Its totals are those of training, which evaluation would show; a metric of TensorFlow beside it is none."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        metric = tf2.keras.metrics.Mean(name="mean_of_keras")
        value = metric(features["x"])
        pairs = {"called": (value, value), "updated": (metric.result(), tf.no_op())}
        pair = pairs.get(form, tf.metrics.mean(features["x"]))
        return spec_of(weight * features["x"], eval_metric_ops={"seen": pair})

    match = r"line \d+: .* eval_metric_ops with 'seen' of a Keras metric, whose totals are those of training"
    with pytest.raises(ModelError, match=match) if form != "beside" else contextlib.nullcontext():
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, model_fn))


@pytest.mark.parametrize("mode", ["train", "eval", "unused"])
def test_a_placeholder_whose_default_counts_in_each_mode_is_named(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scripts feed the rate of dropout, or ``is_training``, in evaluation; here nothing does."""

    def model_fn(features: Any, labels: Any, mode_: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        keep = tf.placeholder_with_default(0.5, [], "keep")
        return spec_of(weight * features["x"] * (keep if mode_ == mode else 1.0))

    def contract(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        return model_fn(features, labels, mode, params)

    model_check.build_once(JobConfig(), CLUSTER, model_of(ones, contract))
    found = [line for line in caplog.messages if "nothing feeds the placeholder 'keep': its default counts" in line]
    assert bool(found) == (mode != "unused")
    assert all(re.search(r"line \d+: ", line) for line in found)


def test_a_keras_layer_that_changes_a_variable_in_a_loop_is_refused() -> None:
    """Nothing outside a loop can wait for the change, so the averages of batch norm would stay as they were."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any, training: bool = True) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        layer = tf2.keras.layers.BatchNormalization(name="norm")
        layer.build((None, 1))
        rows = tf.fill([2, 3, 1], features["x"])
        return spec_of(weight * tf.reduce_sum(tf.map_fn(lambda x: layer(x, training=training), rows)))

    with pytest.raises(ModelError, match=r"line \d+: a Keras layer changes a variable in a loop .* training=False"):
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, model_fn))

    def fixed(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        return model_fn(features, labels, mode, params, training=False)

    model_check.build_once(JobConfig(), CLUSTER, model_of(ones, fixed))


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_a_trained_variable_of_a_worker_is_refused(wire: str) -> None:
    """Workers would train their own copies, and no checkpoint hold them."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        keys = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES]
        mine = tf.get_variable("mine", [], initializer=tf.zeros_initializer(), collections=keys)
        weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
        return spec_of((weight + mine) * features["x"])

    with pytest.raises(ModelError, match=r"line \d+: the optimizer trains variable 'mine', which is local"):
        model_check.build_once(JobConfig(wire=wire), CLUSTER, model_of(ones, model_fn))


def test_a_first_value_that_reads_a_variable_without_one_is_the_models_mistake() -> None:
    """The job ends at once, and does not take it for a lost PS."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
        later = tf.get_variable("later", [], collections=[], trainable=False)  # as one that gets its value after others
        tf.get_variable("copy", initializer=lambda: later.read_value() + 1.0, trainable=False)
        return spec_of(weight * features["x"])

    ended = run_job(model_of(ones, model_fn), 1, 1, max_steps=4)
    assert isinstance(ended["worker/0"], ModelError)
    assert "the initial value of a variable reads another variable" in str(ended["worker/0"])


@pytest.mark.parametrize("index", [0, 1])
def test_a_variable_of_the_input_is_refused(index: int) -> None:
    """With one worker it would train; another one would find it without a value."""

    def scaled(mode: str, params: Any, context: Any) -> Any:
        scale = tf.get_variable("scale", [], initializer=tf.ones_initializer())
        return ones(mode, params, context).map(lambda x, y: ({"x": x["x"] * scale}, y))

    with pytest.raises(ModelError, match=r"line \d+: input_fn makes the variable 'scale': make variables in model_fn"):
        builder.training(JobConfig(), CLUSTER, Task("worker", index), model_of(scaled, linear))


def test_a_first_value_may_read_the_global_step(tmp_path: Path) -> None:
    """Optimizers whose settings follow a schedule read it for the first values of their own variables."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        tf.get_variable("start", initializer=lambda: tf.train.get_global_step().read_value() + 7, trainable=False)
        return spec_of(tf.get_variable("weight", [], initializer=tf.zeros_initializer()) * features["x"])

    train(model_of(ones, model_fn), 2, 1, max_steps=4, model_dir=str(tmp_path))
    assert variables_of(tmp_path)["start"] == 7


@pytest.mark.parametrize("how", ["tables", "step", "local", "own"])
def test_a_variable_may_be_initialized_in_any_way(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """One that the initialization of tables, or each step, assigns has a value; and so has one in a collection."""
    key = {"local": [tf.GraphKeys.LOCAL_VARIABLES], "own": [tf.GraphKeys.GLOBAL_VARIABLES, "own"]}

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        hidden = tf.Variable(2.0, trainable=False, collections=key.get(how, []), name="hidden")
        if how == "tables":
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, hidden.initializer)
        with tf.control_dependencies([hidden.assign(3.0)] if how == "step" else []):
            value = hidden.read_value()
        loss = tf.get_variable("weight", [], initializer=tf.ones_initializer()) * features["x"]
        return spec_of(loss, log_tensors={"hidden": value})

    caplog.set_level(logging.INFO, "tfps")
    train(model_of(ones, model_fn), num_workers=1, max_steps=4)
    assert any(f"hidden={3 if how == 'step' else 2}" in message for message in caplog.messages)


def keras(aux: bool) -> Any:
    """Return a ``model_fn`` of Keras layers without names, one of which may be in training only."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        x = tf.reshape(features["x"], [1, 1])
        aside = tf2.keras.layers.Dense(3)(x) if aux and mode == "train" else 0.0
        y = tf2.keras.layers.BatchNormalization()(tf2.keras.layers.Dense(3)(x), training=mode == "train")
        return spec_of(tf.reduce_sum(y) + tf.reduce_sum(aside))

    return model_fn


def test_keras_layers_without_names_are_evaluated_as_trained(tmp_path: Path) -> None:
    """Keras counts its layers anew in each graph, so a layer without a name has the same variables in each."""
    train(model_of(ones, keras(aux=False)), num_ps=2, num_workers=1, max_steps=8, model_dir=str(tmp_path))
    assert set(tf.train.load_checkpoint(str(tmp_path)).get_variable_to_shape_map()) >= {"dense/kernel"}
    assert "loss" in summary(tmp_path)["eval"]


def test_the_seed_is_that_of_keras_weights_too(tmp_path: Path) -> None:
    """The same ``--seed`` gives the same weights, another one others."""
    kernels = []
    for run, seed in enumerate((5, 5, 6)):
        train(model_of(ones, keras(aux=False)), 1, 1, max_steps=1, seed=seed, model_dir=str(tmp_path / str(run)))
        kernels.append(variables_of(tmp_path / str(run))["dense/kernel"])
    assert (kernels[0] == kernels[1]).all()
    assert (kernels[0] != kernels[2]).any()


def test_a_seed_leaves_pythons_random_numbers_as_they_are() -> None:
    """What a program draws elsewhere goes on as before."""
    random.seed(7)
    with tf.Graph().as_default(), model_calls.seeded(5, 6):
        assert random.random() == random.Random(5).random()
    assert random.random() == random.Random(7).random()


def test_all_workers_draw_the_same_from_python() -> None:
    """What ``model_fn`` draws with ``random`` is a part of the model; the graph's own seed differs."""
    drawn = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        drawn.append((random.random(), tf.get_default_graph().seed))
        return keras(aux=False)(features, labels, mode, params)

    for index in range(2):
        builder.training(
            JobConfig(), Cluster(("p:1",), ("w:1", "w:2")), Task("worker", index), model_of(ones, model_fn)
        )
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_keras_layers_that_have_one_name_are_refused() -> None:
    """Where training has more layers of a kind than evaluation, their numbers may mean another."""
    with pytest.raises(
        ModelError, match=r"has the variables 'dense/bias' and 'dense_1_1/bias', mode='eval' has only one"
    ):
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, keras(aux=True)))


def first(x: Any, kind: str) -> Any:
    """Return features in a form, of which the number comes first."""
    sparse = tf.SparseTensor([[0]], tf.reshape(x, [1]), [1])
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(x, [1]), [1])
    return {
        "sparse": {"a": sparse, "x": x},
        "ragged": {"a": ragged, "x": x},
        "tuple": (x, sparse),
        "nested": {"a": {"b": (sparse, ragged)}, "x": x},
        "none": None,
    }[kind]


@pytest.mark.parametrize("kind", ["sparse", "ragged", "tuple", "nested", "none"])
def test_features_of_any_form_are_evaluated(tmp_path: Path, kind: str) -> None:
    """Evaluation counts each batch once, whatever its features are made of, and in which order."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return ones(mode, params, context).map(lambda f, _: (first(f["x"], kind), f["x"] if kind == "none" else None))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        x = labels if kind == "none" else features[0] if kind == "tuple" else features["x"]
        seen = tf.metrics.mean(tf.constant(3.0))
        return dataclasses.replace(linear({"x": x}, None, mode, params), eval_metric_ops={"three": seen})

    train(model_of(input_fn, model_fn), num_workers=1, max_steps=2, model_dir=str(tmp_path))
    assert summary(tmp_path)["eval"]["three"] == 3


def with_logs(make: Any, metrics: Any = None) -> Any:
    """Return a ``model_fn`` that logs, or measures, what ``make`` returns for the loss."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        loss = tf.square(tf.get_variable("weight", [], initializer=tf.ones_initializer()) * features["x"])
        return spec_of(loss, **{"eval_metric_ops" if metrics else "log_tensors": make(loss)})

    return model_fn


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda _: [1.0], "log_tensors=a list; it must be a dict of scalars by name."),
        (lambda x: {1: x}, "log_tensors with the name 1; a name must be a str."),
        (lambda x: {"a": tf.as_string(x)}, "log_tensors with 'a', which is a tensor of string; each must be a scalar"),
        (lambda _: {"a": tf.constant(1 + 2j)}, "log_tensors with 'a', which is a tensor of complex128"),
        (lambda _: {"a": None}, "log_tensors with 'a', which is None"),
        (
            lambda x: {"a": tf.boolean_mask([x], [x > 0])},
            "log_tensors with 'a' of shape (?,); each must be a scalar",
        ),
        (lambda _: {"a": tf.zeros([0])}, "log_tensors with 'a' of shape (0,)"),
    ],
)
def test_what_cannot_be_logged_is_found_before_anything_starts(make: Any, reported: str) -> None:
    """``log_tensors`` that are no numbers by name are the model's mistake, with its line; ``plan`` finds them too."""
    for find in (model_check.build_once, plan.make):
        with pytest.raises(ModelError) as caught:
            find(JobConfig(), CLUSTER, model_of(ones, with_logs(make)))
        assert reported in str(caught.value)
        assert f"{__file__}, line " in str(caught.value)


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda x: [tf.metrics.mean(x)], "eval_metric_ops=a list; it must be a dict of pairs"),
        (lambda x: {2: tf.metrics.mean(x)}, "eval_metric_ops with the name 2; a name must be a str."),
        (lambda x: {"a": x}, "eval_metric_ops with 'a', which is a tensor; each must be a pair"),
        (lambda x: {"loss": tf.metrics.mean(x)}, "eval_metric_ops with 'loss', the name of the model's own loss over"),
        (lambda x: {"a": (x, x, x)}, "eval_metric_ops with 'a', which is a tuple; each must be a pair"),
        (lambda x: {"a": (x, 0.5)}, "eval_metric_ops with 'a', whose update is a float; it must be an operation"),
        (lambda x: {"a": (tf.as_string(x), x)}, "eval_metric_ops with 'a', whose value is a tensor of string"),
    ],
)
def test_what_cannot_be_measured_is_found_before_anything_starts(make: Any, reported: str) -> None:
    """``eval_metric_ops`` that are no pairs by name are the model's mistake, with its line; ``plan`` finds them too."""
    for find in (model_check.build_once, plan.make):
        with pytest.raises(ModelError) as caught:
            find(JobConfig(), CLUSTER, model_of(ones, with_logs(make, metrics=True)))
        assert reported in str(caught.value)
        assert f"{__file__}, line " in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (tf.reduce_mean(x), tf.no_op()),
        lambda x: (tf.identity(tf.metrics.mean(x)[1]), tf.no_op()),
    ],
)
def test_a_metric_whose_value_needs_a_batch_is_found_before_anything_starts(make: Any) -> None:
    """There is no batch any more when a value is read: it is the model's mistake, with its line and what to do."""
    model_fn = with_logs(lambda x: {"good": tf.metrics.mean(x), "batchonly": make(x)}, metrics=True)
    model = model_of(ones, model_fn)
    reported = (
        f"{__file__}, line {model_fn.__code__.co_firstlineno}: model_fn(mode='eval') returned eval_metric_ops with "
    )
    reported += (
        "'batchonly', whose value depends on the batch; a value is read after the last batch: use tf.metrics.mean("
    )
    for find in (model_check.build_once, plan.make):
        with pytest.raises(ModelError) as caught:
            find(JobConfig(), CLUSTER, model)
        assert reported in str(caught.value)
    with pytest.raises(ModelError) as caught:
        evaluation.evaluate_checkpoint(JobConfig(), model, "model.ckpt-1")
    assert reported in str(caught.value)


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_value_may_be_what_its_update_begins_with(tmp_path: Path, use_resource: bool) -> None:
    """A variable's value, from which the update makes the next one, can be read when there is no batch any more."""

    def make(x: Any) -> Any:
        key = [tf.GraphKeys.LOCAL_VARIABLES]
        seen = tf.get_variable(
            "seen", [], initializer=tf.zeros_initializer(), collections=key, use_resource=use_resource
        )
        value = seen.read_value()
        return {"seen": (value, tf.assign(seen, value + 1.0 + 0.0 * x))}

    train(model_of(ones, with_logs(make, metrics=True)), num_workers=1, max_steps=2, model_dir=str(tmp_path))
    assert summary(tmp_path)["eval"]["seen"] == 4


LOGGED = {
    "float": lambda _: 0.5,
    "bool": lambda _: tf.constant(True),
    "one": lambda _: tf.ones([1, 1]),
    "uint8": lambda _: tf.constant(200, tf.uint8),
    "bf16": lambda _: tf.constant(2, tf.bfloat16),
    "numpy": lambda _: np.float64(3.5),
    "unknown": lambda x: tf.placeholder_with_default(x * 0.0 + 7.0, None),
}


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_any_single_number_is_logged(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    """Python's numbers, bools, tensors of one element, of any type of number, are logged as what they are."""
    caplog.set_level(logging.INFO, "tfps")
    logs = with_logs(lambda x: {name: make(x) for name, make in LOGGED.items()})
    train(model_of(ones, logs), num_workers=1, max_steps=2, wire=wire, steps_per_run=2)
    [line] = [record for record in caplog.messages if record.startswith("step=2 ") and "bool=" in record]
    assert "float=0.5 bool=1 one=1 uint8=200 bf16=2 numpy=3.5 unknown=7" in line


def test_metrics_of_any_number_are_reported(tmp_path: Path) -> None:
    """A metric that counts, or is true or false, is a number in the summary; one that is no scalar is a list."""

    def make(x: Any) -> Any:
        count = tf.get_local_variable("count", [], tf.int64, tf.zeros_initializer())
        more = count.assign_add(1)
        return {"count": (count, more), "true": (count > 0, more), "half": (tf.fill([2], tf.cast(2.5, tf.half)), more)}

    train(model_of(ones, with_logs(make, metrics=True)), num_workers=1, max_steps=2, model_dir=str(tmp_path))
    reported = summary(tmp_path)["eval"]
    assert reported["count"] >= 4
    assert (reported["true"], reported["half"]) == (1.0, [2.5, 2.5])


def test_eval_and_export_name_a_variable_that_training_has_not(tmp_path: Path) -> None:
    """What no checkpoint can hold is the model's mistake, with the variable's name, and no fault of the checkpoint."""
    train(model_of(ones, linear), num_workers=1, max_steps=2, model_dir=str(tmp_path))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        shift = 0.0 if mode == "train" else tf.get_variable("moving_mean", [])
        return linear({"x": features["x"] - shift}, labels, mode, params)

    for use in (evaluation.evaluate_checkpoint, export.saved_model):
        with pytest.raises(
            ModelError, match=r"variable 'moving_mean' of mode='(eval|infer)' does not exist in mode='tr"
        ):
            use(JobConfig(), model_of(ones, model_fn), str(tf.train.latest_checkpoint(str(tmp_path))))


def test_a_sparse_feature_is_no_input_of_an_export(tmp_path: Path) -> None:
    """Export refuses a feature that is no dense tensor, with its name, instead of serving something else."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        return ones(mode, params, context).map(lambda f, y: (first(f["x"], "sparse"), y))

    with pytest.raises(ModelError, match="feature 'a' is a sparse tensor; export takes one dense tensor"):
        export.saved_model(JobConfig(), model_of(input_fn, linear), "model.ckpt-1", str(tmp_path / "e"))


def test_a_model_of_another_user_is_not_run_unasked(tmp_path: Path) -> None:
    """``tfps eval`` refuses the file that job.json names if any user can write it, until --model names it."""
    source = tmp_path / "model.py"
    source.write_text(POWERS)
    (tmp_path / "job.json").write_text(json.dumps({"model": str(source)}))
    source.chmod(0o666)
    with pytest.raises(ConfigError, match=rf"{source} is writable by any user. Check it, then give --model="):
        evaluate._check_owner(tmp_path / "job.json", source)
    source.chmod(0o644)
    evaluate._check_owner(tmp_path / "job.json", source)


def test_an_edited_model_is_another_one_than_the_job_used(tmp_path: Path) -> None:
    """``tfps eval`` compares the file with the hash in job.json, where there is one."""
    source, job = tmp_path / "model.py", tmp_path / "job.json"
    source.write_text(POWERS)
    job.write_text(json.dumps({"model_sha256": digest(str(source))}))
    assert not evaluate._differs(job, str(source))
    source.write_text(f"{POWERS}\n")
    assert evaluate._differs(job, str(source))
    job.write_text("{}")
    assert not evaluate._differs(job, str(source))
    assert not evaluate._differs(tmp_path / "none.json", str(source))


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda: tf.layers.dense, "use tf.keras.layers, or tf.get_variable and tf.nn"),
        (lambda: tf.contrib.layers, "tf.contrib was removed: use"),
        (lambda: tf.estimator.EstimatorSpec, "use tfps.ModelSpec for EstimatorSpec, tfps.ModeKeys for ModeKeys"),
        (lambda: tf2.get_variable, "write `import tensorflow.compat.v1 as tf`)"),
        (
            lambda: tf2.train.GradientDescentOptimizer,
            "(a name of TensorFlow 1.x: write `import tensorflow.compat.v1 as",
        ),
        (lambda: tf.train.Mistyped, "has no attribute 'Mistyped'\n"),
    ],
)
def test_what_tensorflow_has_no_more_is_reported_with_what_to_use(make: Any, reported: str) -> None:
    """A name that TensorFlow 2 has dropped is an error that names its successor."""
    with pytest.raises(ModelError) as caught:
        model_check.build_once(JobConfig(), CLUSTER, model_of(ones, with_logs(lambda _: make())))
    assert reported in str(caught.value)


@pytest.mark.parametrize("takes", ["nothing", "the flags", "a copy"])
def test_an_optimizer_that_ignores_its_flags_is_refused(takes: str) -> None:
    """``--optimizer`` and ``--learning_rate`` that a model does not ask for would be in job.json, and not so."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        params = {**params} if takes == "a copy" else params
        spec = linear(features, labels, mode, {})
        if takes == "the flags":
            return dataclasses.replace(spec, optimizer=tfps.make_optimizer(params, "adam", learning_rate=0.1))
        return spec

    config = JobConfig(optimizer="sgd", learning_rate=0.25)
    if takes != "nothing":
        model_check.build_once(config, CLUSTER, model_of(ones, model_fn))
        return
    with pytest.raises(ModelError, match=r"--optimizer=sgd and --learning_rate=0.25 would be ignored: the model makes"):
        model_check.build_once(config, CLUSTER, model_of(ones, model_fn))


def of_all_kinds(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` with a variable of each kind, one of them not a resource, and a branch."""
    with tf.variable_scope("scope"):
        weights = [tf.get_variable("weight", [], initializer=tf.ones_initializer()), tf.Variable(1.0, name="plain")]
    old = tf.get_variable("old", [], initializer=tf.ones_initializer(), use_resource=False)
    with tf.variable_scope("refs", use_resource=False):
        older = tf.get_variable("weight", [], initializer=tf.ones_initializer())
    twice = tf.cond(features["x"] > 2.0, lambda: features["x"] * 2.0, lambda: features["x"])
    loss = tf.reduce_sum(tf.add_n([*weights, old, older]) * twice)
    optimizer = tf.train.AdamOptimizer(0.01)
    return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=optimizer)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("header", ["file", "function"])
def test_a_model_may_disable_v2_behavior(mode: str, header: str) -> None:
    """``tf.disable_v2_behavior()``, in the file or in its functions, changes no graph: variables are resources."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        tf.disable_v2_behavior()
        return ones(mode, params, context)

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        tf.disable_v2_behavior()
        return of_all_kinds(features, labels, mode, params)

    def graphs_of(model: Any) -> list[Any]:
        training, evaluated = model_check.build_once(JobConfig(mode=mode), CLUSTER, model)
        assert evaluated is not None
        built = [training.graph, evaluated.graph, serving.prediction(JobConfig(), model)[0]]
        return [[(op.name, op.type, [t.name for t in op.inputs]) for op in graph.get_operations()] for graph in built]

    expected = graphs_of(model_of(ones, of_all_kinds))
    assert [name for name, kind, _ in expected[1] if kind == "VariableV2"] == ["old", "refs/weight"]
    try:
        if header == "file":
            tf.disable_v2_behavior()
        assert graphs_of(model_of(*((ones, of_all_kinds) if header == "file" else (input_fn, model_fn)))) == expected
    finally:
        tf.enable_resource_variables()
