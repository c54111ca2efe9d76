"""Steps of an async job that a test takes itself, and holds between the read of the parameters and the update."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from support.cluster import cluster_of, dataset_of, model_of, session_config, target_of, wait_until

import tfps
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.models.model import Model
from tfps.runtime.graph import builder

IDS = [0, 2, 0]
SHAPES = {"first": [2], "second": [3], "table": [4, 2]}


class Held:
    """A model each of whose steps waits between its read of the parameters and its gradient, until it is told to go on.

    The gradient of worker i is 2^i for each element of ``first`` and ``second``, and for the looked-up rows.
    """

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self.waiting: list[tuple[int, threading.Event, Sequence[Any]]] = []

    def hold(self, worker: Any, *values: Any) -> Any:
        """Wait, in a step that has read the values."""
        event = threading.Event()
        self.waiting.append((int(worker), event, values))
        assert event.wait(100)
        return np.float32(2.0**worker)

    def model(self) -> Model:
        """Return the model."""

        def input_fn(mode: str, params: Any, context: Any) -> Any:
            return None if mode == "eval" else dataset_of(np.float32([context.input_pipeline_id])).repeat()

        def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
            one = tf.ones_initializer()
            weights = {name: tf.get_variable(name, shape, initializer=one) for name, shape in SHAPES.items()}
            read = [tf.identity(weights["first"]), tf.identity(weights["second"])]
            read.append(tf.nn.embedding_lookup(weights["table"], tf.constant(IDS)))
            worker = tf.squeeze(features["x"])
            size = tf.ensure_shape(tf.numpy_function(self.hold, [worker, *read], tf.float32), [])
            return tfps.ModelSpec(
                loss=size * tf.add_n([tf.reduce_sum(one) for one in read]), optimizer=self._optimizer()
            )

        return model_of(input_fn, model_fn)


class ByHand:
    """Two workers of an async job, a session each, whose steps a test takes itself."""

    def __init__(self, held: Any, num_ps: int, **flags: Any) -> None:
        self._held, cluster = held, cluster_of(num_ps, 2)
        config = JobConfig(**{"max_steps": 100, "batch_size": 1, **flags})
        self.built = [builder.training(config, cluster, Task("worker", i), held.model()) for i in (0, 1)]
        self.sessions: list[Any] = []
        for index, built in enumerate(self.built):
            with built.graph.as_default():
                filters = session_config("/job:ps", f"/job:worker/task:{index}")
                self.sessions.append(tf.Session(target_of(Task("worker", index)), graph=built.graph, config=filters))
                first = [tf.global_variables_initializer(), built.load, built.step.chief_init] if index == 0 else []
                for op in (*first, built.iterator.initializer, built.step.worker_init):
                    self.sessions[-1].run(op)
        self._errors: list[BaseException] = []

    def begin(self, worker: int, fetch: Any = None) -> "Begun":
        """Begin a step of a worker, or another operation, and return when it has read the parameters."""
        return Begun(self, self._held, worker, self.built[worker].step.train_op if fetch is None else fetch)

    def step(self, worker: int, times: int = 1) -> None:
        """Take steps of a worker."""
        for _ in range(times):
            self.begin(worker).end()

    def values(self) -> Mapping[str, Any]:
        """Return the values of the variables."""
        self.sessions[0].run(self.built[0].store)
        with self.built[0].graph.as_default():
            return {v.op.name: self.sessions[0].run(v) for v in tf.trainable_variables()}  # type: ignore[no-any-return]


class Begun:
    """A step that has begun."""

    def __init__(self, by_hand: ByHand, held: Held, worker: int, fetch: Any) -> None:
        self._held, self.error = held, None
        self._session, self._fetch = by_hand.sessions[worker], fetch
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.read = self.wait()

    def _run(self) -> None:
        try:
            self._session.run(self._fetch)
        except BaseException as error:
            self.error = error  # type: ignore[assignment]

    def wait(self) -> Sequence[Any]:
        """Wait until the step, or the next one of the run, has read the parameters; returns them."""
        wait_until(lambda: self._held.waiting or self.error)
        assert self.error is None, self.error
        _, self.event, values = self._held.waiting.pop()
        return values

    def go_on(self) -> None:
        """Let the step go on."""
        self.event.set()

    def end(self) -> None:
        """Let the step go on, and wait for its end."""
        self.go_on()
        self._thread.join(100)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


class IfSmall(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
    """Applies the gradients in a branch."""

    proportional_to_rate = True

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Apply, unless the gradients are too large."""
        norm = tf.norm(grads_and_vars[0][0])
        return tf.group(tf.cond(norm < 1e6, lambda: super(IfSmall, self).apply_gradients(grads_and_vars), tf.no_op))


class Reference:
    """An optimizer that a test applies to the variables of ``Held`` on one machine, with a rate of each update.

    Args:
        make: Function from the rate to the optimizer.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._graph = tf.Graph()
        with self._graph.as_default():
            variables = [
                tf.get_variable(name, shape, initializer=tf.ones_initializer()) for name, shape in SHAPES.items()
            ]
            self._rate = tf.placeholder(tf.float32, [])
            self._dense = [tf.placeholder(tf.float32, variable.shape) for variable in variables[:2]]
            self._rows = tf.placeholder(tf.float32, [3, 2])
            rows = tf.IndexedSlices(self._rows, tf.constant(IDS), tf.constant(SHAPES["table"]))
            self._update = make(self._rate).apply_gradients(list(zip([*self._dense, rows], variables, strict=True)))
            self._variables = variables
            self._session = tf.Session()
            self._session.run(tf.global_variables_initializer())

    def apply(self, gradients: Sequence[Any], rate: float) -> None:
        """Apply the gradients of ``first``, ``second`` and the looked-up rows."""
        self._session.run(
            self._update, dict(zip([self._rate, *self._dense, self._rows], [rate, *gradients], strict=True))
        )

    def values(self) -> Mapping[str, Any]:
        """Return the values of the variables."""
        found = self._session.run(self._variables)
        return dict(zip(SHAPES, found, strict=True))


def gradients_of(worker: int) -> list[Any]:
    """Return the gradients of a worker for ``Reference``."""
    return [np.full(shape, 2.0**worker, np.float32) for shape in ([2], [3], [3, 2])]


def assert_equal(found: Mapping[str, Any], wanted: Mapping[str, Any], rows_differ: bool = False) -> None:
    """Compare variables to the bit; a change of rows that is divided is rounded in another order than a rate."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        if rows_differ and name == "table":
            np.testing.assert_allclose(found[name], value, rtol=3e-7)
        else:
            np.testing.assert_array_equal(found[name], value, name)
