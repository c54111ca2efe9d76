"""Whole clusters inside the test process, where a test can look at what tasks do, and hold them up.

Each task is a thread that runs what ``tfps.runtime.task`` runs in a process of its own, on a real ``tf.train.Server``
on a real loopback port. A server cannot be stopped and costs some eighty threads, so all jobs of a test run share two
PS' and three workers' servers; what a job left on them is cleared before the next.
"""

import contextlib
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tfps.cluster import rendezvous
from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import StoppedError
from tfps.models.model import Model
from tfps.runtime import task as tasks
from tfps.runtime.process import tensorflow_import
from tfps.runtime.process.shutdown import StopRequest

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

import tfps  # noqa: E402
from tfps.runtime.process import server  # noqa: E402

MAX_PS, MAX_WORKERS = 2, 3
_KEPT = contextlib.ExitStack()  # until the process ends

Errors = dict[str, BaseException | None]  # by task, what it ended with; None is success


def model_of(input_fn: Any, model_fn: Any) -> Model:
    """Return a model made of two functions of a test."""
    return Model("test", Path(model_fn.__code__.co_filename), SimpleNamespace(input_fn=input_fn, model_fn=model_fn))


def linear(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a ``model_fn`` whose gradient is its feature: loss = weight * x."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(weight * features["x"])
    optimizer = tfps.make_optimizer(params, "sgd", learning_rate=1.0)
    return tfps.ModelSpec(loss=loss, predictions={"y": weight * features["x"]}, optimizer=optimizer)


def dataset_of(values: Any) -> Any:
    """Return a dataset whose elements are ``({"x": value}, 0)``, one by one."""
    return tf.data.Dataset.from_tensor_slices(values).map(lambda x: ({"x": x}, 0.0))


def by_worker(**rows: Any) -> Any:
    """Return an ``input_fn`` that gives worker i the rows of ``rows[name][i]``, one a step, and then ends."""

    def input_fn(mode: str, params: Any, context: Any) -> Any:
        if mode == "eval":
            return None
        own = {name: values[context.input_pipeline_id] for name, values in rows.items()}
        steps = tf.data.Dataset.range(min(map(len, own.values())))
        return steps.map(lambda step: ({name: tf.gather(values, step) for name, values in own.items()}, 0.0))

    return input_fn


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones without end, and without an evaluation."""
    return None if mode == "eval" else dataset_of(np.float32([1])).repeat()


LINEAR = model_of(ones, linear)


@functools.cache
def _servers() -> Mapping[Task, Any]:
    ports = _KEPT.enter_context(held_ports(MAX_PS + MAX_WORKERS))
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = Cluster(tuple(addresses[:MAX_PS]), tuple(addresses[MAX_PS:]))
    return {task: server.start(JobConfig(devices_per_worker="cpu:4"), cluster, task) for task in cluster.tasks()}


def target_of(task: Task) -> str:
    """Return the session target of a shared server."""
    return str(_servers()[task].target)


def cluster_of(num_ps: int = 1, num_workers: int = 2) -> Cluster:
    """Return a cluster of shared servers."""
    sizes = {"ps": num_ps, "worker": num_workers}
    ps, workers = (tuple(target_of(Task(job, i)).removeprefix("grpc://") for i in range(n)) for job, n in sizes.items())
    return Cluster(ps, workers)


@contextlib.contextmanager
def shared_servers() -> Iterator[None]:
    """Let ``server.start`` give the shared servers, cleared; sessions made meanwhile are closed in the end."""
    sessions, init = [], tf.Session.__init__

    def noted(session: Any, *args: Any, **kwargs: Any) -> None:
        init(session, *args, **kwargs)
        sessions.append(session)

    servers = _cleared()
    with (
        mock.patch.object(server, "start", lambda _config, _cluster, task: servers[task]),
        mock.patch.object(tf.Session, "__init__", noted),
    ):
        try:
            yield
        finally:
            # Before the next reset, which frees what a running session may still be waiting for.
            _within(100, lambda: [one.close() for one in sessions])


def _cleared() -> Mapping[Task, Any]:
    """Return the shared servers, cleared; new ones if that takes too long: after a rest it has taken 55 s."""
    clearing = threading.Thread(
        target=lambda servers: [tf.Session.reset(one.target) for one in servers],
        args=(_servers().values(),),
        daemon=True,
    )
    clearing.start()
    clearing.join(20)
    if clearing.is_alive():
        _servers.cache_clear()
    return _servers()


def _within(secs: float, act: Callable[[], Any]) -> None:
    """Do something that may block inside TensorFlow, where no signal is seen; fails after ``secs``."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(secs)
    assert not thread.is_alive(), f"blocked for {secs} s"


def meet_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks wait long for each other at the start, even if ``start_timeout_secs`` is short."""
    really = rendezvous.wait_for_peers

    def wait_for_peers(cluster: Cluster, task: Task, _timeout_secs: float, *rest: Any) -> bool:
        return really(cluster, task, 200.0, *rest)

    monkeypatch.setattr(rendezvous, "wait_for_peers", wait_for_peers)


def session_config(*filters: str) -> Any:
    """Return the config of a session that a test uses itself: its calls end, whatever happens."""
    return tf.ConfigProto(device_filters=filters, operation_timeout_in_ms=100_000)


class Running:
    """A job whose tasks run as threads."""

    def __init__(self, config: JobConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._stops = {str(task): StopRequest() for task in cluster.tasks()}
        self.ended: Errors = {}
        self._threads = {
            str(task): threading.Thread(target=self._be, args=(task,), name=str(task), daemon=True)
            for task in cluster.tasks()
        }
        for thread in self._threads.values():
            thread.start()

    def _be(self, task: Task) -> None:
        be = {"ps": tasks._ps, "worker": tasks._worker}[task.job]
        try:
            be(self._config, self._cluster, task, self._stops[str(task)])
            self.ended[str(task)] = None
        except BaseException as error:
            self.ended[str(task)] = error

    def stop(self, *names: str) -> None:
        """Tell some tasks to stop, as SIGTERM does; all of them if none is named."""
        for name in names or self._stops:
            self._stops[name].request(StoppedError("stopped by SIGTERM"))

    def wait(self, secs: float = 200) -> Errors:
        """Return what each task ended with; fails if one still runs after ``secs``, and shows where."""
        deadline = time.monotonic() + secs
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [name for name, thread in self._threads.items() if thread.is_alive()]
        assert not stuck, f"{stuck} still run after {secs} s; ended: {self.ended}\n{_where()}"
        return self.ended


def _where() -> str:
    """Return where the tasks' work is now."""
    work = {thread.ident for thread in threading.enumerate() if thread.name == "work"}
    stacks = [traceback.format_stack(frame) for ident, frame in sys._current_frames().items() if ident in work]
    return "\n".join("".join(stack[-12:]) for stack in stacks if "thread_pool.py" not in stack[-1])


@contextlib.contextmanager
def job(model: Model, num_ps: int = 1, num_workers: int = 2, **flags: Any) -> Iterator[Running]:
    """Start a job and yield it while it runs; in the end, what still runs is asked to stop."""
    config = JobConfig(**{"start_timeout_secs": 100.0, "batch_size": 1, **flags})
    with (
        shared_servers(),
        mock.patch.object(tensorflow_import, "load_v1"),  # switches behaviours off and on, under other threads' feet
        mock.patch("tfps.models.loader.load", return_value=model),
    ):
        running = Running(config, cluster_of(num_ps, num_workers))
        try:
            yield running
        finally:
            running.stop()


def run_job(model: Model, num_ps: int = 1, num_workers: int = 2, secs: float = 200, **flags: Any) -> Errors:
    """Run a job to its end; returns what each task ended with."""
    with job(model, num_ps, num_workers, **flags) as running:
        return running.wait(secs)


def assert_done(ended: Mapping[str, BaseException | None]) -> None:
    """Fail unless every task ended well; show the first error's traceback."""
    for name, error in ended.items():
        reported = "".join(traceback.format_exception(error)) if error else ""
        assert error is None, f"{name} ended with {reported}"


def train(model: Model, num_ps: int = 1, num_workers: int = 2, secs: float = 200, **flags: Any) -> None:
    """Run a job that has to end well."""
    assert_done(run_job(model, num_ps, num_workers, secs, **flags))


def wait_until(condition: Callable[[], Any], secs: float = 100) -> None:
    """Wait for something to come true; fails after ``secs``."""
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, f"not true after {secs} s"
        time.sleep(0.01)


def variables_of(model_dir: Path) -> dict[str, Any]:
    """Return the variables of a directory's newest checkpoint, by name."""
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
