"""The built-in models: what they are made of, and that they learn, alone, from old gradients and from mean ones."""

import contextlib
import importlib
import logging
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tfps
from tfps.models.mnist import model_fn

MNIST = Path(__file__).resolve().parents[4] / "shared" / "data" / "mnist"

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not beside the repository (shared/data/mnist)")


@pytest.fixture(scope="module", autouse=True)
def _tf1() -> None:
    tf.disable_v2_behavior()
    tf.enable_resource_variables()


def params(**changes: Any) -> dict[str, Any]:
    """Return what a model gets as ``params`` when no flag is given."""
    return {"batch_size": 128, "learning_rate": None, "optimizer": None, "data_dir": "", "seed": 1, **changes}


@contextlib.contextmanager
def new_graph() -> Iterator[tf.Session]:
    """Enter a new graph with a session of one thread."""
    threads = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    with tf.Graph().as_default(), tf.Session(config=threads) as session:
        yield session


def iterator_of(name: str, mode: str, given: Mapping[str, Any], worker: int = 0, workers: int = 1) -> Any:
    """Return an iterator over a built-in model's input."""
    context = tf.distribute.InputContext(workers, worker, workers)
    dataset = importlib.import_module(f"tfps.models.{name}").input_fn(mode, given, context)
    return tf.data.make_initializable_iterator(dataset)


def spec_of(name: str, mode: str, given: Mapping[str, Any], batch: Any) -> tfps.ModelSpec:
    """Return what a built-in model's ``model_fn`` gives, over the variables that are there."""
    module = importlib.import_module(f"tfps.models.{name}")
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        return module.model_fn(*batch, mode, given)


@dataclass(frozen=True)
class Trainer:
    """Training of some workers in one process: each has its share, all have the same parameters.

    Attributes:
        session: Session in which everything is initialised.
        gradients: For each worker a callable that gives its next gradient.
        apply: Callable that applies a gradient, given as an array per variable.
        variables: The trainable variables.
    """

    session: tf.Session
    gradients: list[Any]
    apply: Any
    variables: list[Any]


def trainer(session: tf.Session, name: str, given: Mapping[str, Any], workers: int = 1) -> Trainer:
    """Build a model's training in the present graph."""
    iterators = [iterator_of(name, "train", given, worker, workers) for worker in range(workers)]
    specs = [spec_of(name, "train", given, iterator.get_next()) for iterator in iterators]
    variables = tf.trainable_variables()
    gradients = [[g for g, _ in spec.optimizer.compute_gradients(spec.loss, variables)] for spec in specs]
    given_gradients = [tf.placeholder(v.dtype.base_dtype, v.shape) for v in variables]
    apply = specs[0].optimizer.apply_gradients(zip(given_gradients, variables, strict=True))
    session.run([tf.global_variables_initializer(), *(iterator.initializer for iterator in iterators)])
    calls = [session.make_callable(fetches) for fetches in gradients]
    return Trainer(session, calls, session.make_callable(apply, given_gradients), variables)


def train(job: Trainer, steps: int, staleness: int = 0) -> None:
    """Apply ``steps`` gradients, workers in turn, each computed ``staleness`` updates before."""
    waiting: deque[Any] = deque()
    for step in range(steps + staleness):
        waiting.append(job.gradients[step % len(job.gradients)]())
        if len(waiting) > staleness:
            job.apply(*waiting.popleft())


def train_in_step(job: Trainer, steps: int) -> None:
    """Apply ``steps`` times the mean of all workers' gradients."""
    for _ in range(steps):
        job.apply(*(np.mean(parts, axis=0) for parts in zip(*(each() for each in job.gradients), strict=True)))


def evaluate(session: tf.Session, name: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Return the model's metrics over its evaluation input."""
    iterator = iterator_of(name, "eval", given)
    metrics = spec_of(name, "eval", given, iterator.get_next()).eval_metric_ops
    session.run([iterator.initializer, tf.local_variables_initializer()])
    update = session.make_callable(tf.group(*(pair[1] for pair in metrics.values())))
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while True:
            update()
    return {key: float(value) for key, value in session.run({k: pair[0] for k, pair in metrics.items()}).items()}


# What they are made of


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mnist", {"conv/bias": [3], "conv/kernel": [3, 3, 1, 3], "dense/bias": [10], "dense/kernel": [192, 10]}),
        ("linear", {"bias": [], "weight": []}),
    ],
)
def test_variables(name: str, shapes: dict[str, list[int]]) -> None:
    """The ConvNet is 1,960 parameters in four plainly named variables; the line is a weight and a bias."""
    with new_graph():
        spec_of(name, "train", params(), iterator_of(name, "train", params()).get_next())
        assert {v.op.name: v.shape.as_list() for v in tf.trainable_variables()} == shapes
        assert sum(v.shape.num_elements() for v in tf.trainable_variables()) == {"mnist": 1960, "linear": 2}[name]


@pytest.mark.parametrize("name", ["mnist", "linear"])
def test_spec_of_each_mode(name: str) -> None:
    """Each mode has what it needs: a scalar loss and an optimizer, metrics, predictions from features alone."""
    for mode in ("train", "eval", "infer"):
        with new_graph():
            features, labels = iterator_of(name, "eval", params()).get_next()
            spec = spec_of(name, mode, params(), (features, None if mode == "infer" else labels))
            assert spec.predictions
            assert (spec.loss is None) == (mode == "infer")
            assert spec.loss is None or spec.loss.shape.rank == 0
            assert bool(spec.eval_metric_ops) == (mode == "eval")
            assert isinstance(spec.optimizer, tf.train.Optimizer) == (mode != "infer")


@pytest.mark.parametrize("name", ["mnist", "linear"])
def test_flags_choose_the_optimizer(name: str) -> None:
    """``--optimizer`` and ``--learning_rate`` win over the model's own."""
    with new_graph():
        given = params(optimizer="momentum", learning_rate=0.25)
        optimizer = spec_of(name, "train", given, iterator_of(name, "train", given).get_next()).optimizer
        assert isinstance(optimizer, tf.train.MomentumOptimizer)
        assert optimizer._learning_rate == 0.25


def test_bias_after_pooling_is_bias_before() -> None:
    """The ConvNet's output is to the bit that of the textbook order: convolution with bias, pooling, ReLU, dense."""
    rng = np.random.default_rng(0)
    image = rng.uniform(size=(5, 28, 28, 1)).astype(np.float32)
    with new_graph() as session:
        ours = model_fn({"image": tf.constant(image)}, None, "infer", params()).predictions["probabilities"]
        kernel, bias, weights, offsets = tf.trainable_variables()
        net = tf.nn.max_pool2d(tf.nn.conv2d(image, kernel, 1, "VALID") + bias, 3, 3, "VALID")
        theirs = tf.nn.softmax(tf.matmul(tf.reshape(tf.nn.relu(net), [-1, 192]), weights) + offsets)
        session.run([v.assign(rng.normal(size=v.shape.as_list())) for v in tf.trainable_variables()])
        np.testing.assert_array_equal(*session.run([ours, theirs]))


def test_loss_counts_examples_not_batches() -> None:
    """The evaluation's loss and accuracy do not depend on how 359 images are cut into batches."""
    found = []
    for batch_size in (359, 100):
        with new_graph() as session:
            given = params(batch_size=batch_size)
            train(trainer(session, "mnist", params()), 20)
            found.append(evaluate(session, "mnist", given))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# That they learn


def test_digits() -> None:
    """400 updates of batch 128 reach 0.9 accuracy on the carried digits, of writers never trained on."""
    with new_graph() as session:
        train(trainer(session, "mnist", params()), 400)
        assert evaluate(session, "mnist", params())["accuracy"] > 0.9


def write_images(directory: Path, split: str, count: int) -> None:
    """Write blank images of one set, of which each is a 0."""
    images = np.zeros([count, 28, 28], np.uint8)
    (directory / f"{split}-images-idx3-ubyte").write_bytes(
        struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + images.data
    )
    (directory / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(count))


def test_one_set_of_images_is_split_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first worker logs it, once and in training, for a directory of the user's that has one set alone."""

    def lines(*inputs: tuple[str, int], **changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "tfps"), tf.Graph().as_default():
            for mode, worker in inputs:
                iterator_of("mnist", mode, params(**changes), worker, workers=2)
        return [record.getMessage() for record in caplog.records]

    inputs = [("train", 0), ("train", 1), ("eval", 0)]
    write_images(tmp_path, "t10k", 52)
    [line] = lines(*inputs, data_dir=str(tmp_path))
    assert line.startswith(
        f"--data_dir={tmp_path} has one set of images, not two (train, t10k): the first 42 images are"
    )
    assert line.endswith("the last 10 for evaluation")
    write_images(tmp_path, "train", 8)
    assert lines(*inputs, data_dir=str(tmp_path)) == lines(*inputs) == []


@needs_mnist
def test_mnist_with_old_gradients() -> None:
    """400 updates reach 0.93 on MNIST's last 2,000 test images, with four workers' gradients 4 updates old."""
    given = params(data_dir=str(MNIST))
    with new_graph() as session:
        train(trainer(session, "mnist", given, workers=4), 400, staleness=4)
        assert evaluate(session, "mnist", given)["accuracy"] >= 0.93


@pytest.mark.parametrize(("workers", "staleness"), [(1, 0), (4, 4), (2, 10)])
def test_line(workers: int, staleness: int) -> None:
    """300 updates find 2 and 10 within 0.05, with gradients 4 and 10 updates old as well; what is left is the noise."""
    with new_graph() as session:
        job = trainer(session, "linear", params(), workers)
        train(job, 300, staleness)
        weight, bias = session.run(job.variables)
        metrics = evaluate(session, "linear", params())
    assert (weight, bias) == (pytest.approx(2, abs=0.05), pytest.approx(10, abs=0.05))
    assert metrics["rmse"] == pytest.approx(0.33, abs=0.02)


def test_line_in_step() -> None:
    """300 updates with the mean of four workers' gradients find 2 and 10 within 0.05."""
    with new_graph() as session:
        job = trainer(session, "linear", params(), workers=4)
        train_in_step(job, 300)
        assert session.run(job.variables) == [pytest.approx(2, abs=0.05), pytest.approx(10, abs=0.05)]


# The line's points


def points(mode: str, count: int, worker: int = 0, **changes: Any) -> list[Any]:
    """Return the first batches of the line's input, as x and y in one array each."""
    found = []
    with new_graph() as session:
        iterator = iterator_of("linear", mode, params(**changes), worker, 2)
        features, y = iterator.get_next()
        session.run(iterator.initializer)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            for _ in range(count):
                found.append(np.stack(session.run([features["x"], y])))
    return found


def test_points_are_the_seeds_and_workers() -> None:
    """The same seed and worker give the same points; another seed, worker or step gives others."""
    first, second = points("train", 2)
    np.testing.assert_array_equal(points("train", 1)[0], first)
    others = [second, points("train", 1, seed=2)[0], points("train", 1, worker=1)[0]]
    assert all(not np.isin(other[0], first[0]).any() for other in others)


def test_evaluation_points_are_fixed() -> None:
    """Evaluation is always the same 1,024 points, whatever the seed and batch size, and then ends."""
    one, two = (np.concatenate(points("eval", 99, **given), axis=1) for given in ({}, {"seed": 2, "batch_size": 7}))
    assert one.shape == (2, 1024)
    np.testing.assert_array_equal(one, two)


def test_points_lie_on_the_line() -> None:
    """Points have x from -1 to 1, and y of 2x + 10 with noise of 0.33."""
    x, y = np.concatenate(points("train", 50), axis=1)
    assert (x.min(), x.max()) == (pytest.approx(-1, abs=0.01), pytest.approx(1, abs=0.01))
    noise = y - (2 * x + 10)
    assert (noise.mean(), noise.std()) == (pytest.approx(0, abs=0.02), pytest.approx(0.33, abs=0.02))
