"""Evaluate a model: on the live parameters at the end of training, or on a checkpoint."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.cluster import rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, ConfigError, DataError, ModelError, PeerLostError
from tfps.models.model import Model
from tfps.models.spec import ModeKeys
from tfps.progress import format_progress
from tfps.runtime.checkpoint import file_clock, restore
from tfps.runtime.checkpoint.directory import list_checkpoints, step_in
from tfps.runtime.checkpoint.finder import Finder
from tfps.runtime.checkpoint.job_end import has_ended_since
from tfps.runtime.error_translation import failed, is_of_peers
from tfps.runtime.graph import cancel_safe_iterator
from tfps.runtime.graph.checks import model_check, variable_check
from tfps.runtime.graph.evaluation import EvalGraph, evaluation_graph
from tfps.runtime.process import task_log
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results.evaluation_progress import EvaluationProgress
from tfps.runtime.results.event_file import EventFile
from tfps.storage import JobDirectory
from tfps.summary_entries import Metric
from tfps.tf_types import Session

_POLL_SECS = 0.5
_REPORT_SECS = 30.0

log = logging.getLogger(__name__)


def check_end(session: Session, built: EvalGraph) -> None:
    """Check that the evaluation input is not one that TensorFlow knows to be infinite.

    Raises:
        ModelError: If it is.
    """
    if session.run(built.batches) == tf.data.experimental.INFINITE_CARDINALITY:
        raise ModelError(
            f"--model={built.model.name}: {built.model.line_of('input_fn')}: input_fn(mode='eval') returned an endless "
            "dataset: repeat() it for mode='train' only, or end it with take()."
        )


def measure(session: Session, built: EvalGraph, progress: EvaluationProgress | None = None) -> dict[str, Metric]:
    """Run a model's metrics over the whole evaluation input.

    Args:
        session: A session of the evaluation graph; all variables have their values.
        built: The graph.
        progress: Counts the batches, for a thread that watches them.

    Returns:
        The metrics by name: a float (also for a count or a bool), or a list of them for a metric that is not a scalar.
        ``loss`` is the mean over all examples, if the model's loss is the mean over its batch.

    Raises:
        DataError: If the evaluation input is empty or fails.
        ModelError: If the input is infinite, or the model fails.
    """
    check_end(session, built)
    with built.graph.as_default():
        tables = tf.group(tf.tables_initializer(), built.iterator.initializer)
        local = tf.local_variables_initializer()  # whose first values may be looked up in a table
        update = tf.group(*(pair[1] for pair in built.metrics.values()))
    step, progress = session.make_callable(update), progress or EvaluationProgress(math.inf)
    try:
        with progress.running():
            session.run(tables)
            session.run(local)
            _take_all(step, progress)
    except tf.errors.OpError as error:
        if built.on_cluster and is_of_peers(error, built.graph):
            raise
        if not cancel_safe_iterator.is_end(error):
            raise failed(error, built.model, built.graph, built.batch_size) from error
    if not progress.batches:
        raise DataError("the evaluation input is empty: input_fn(mode='eval') gave no batch.")
    values = session.run({name: pair[0] for name, pair in built.metrics.items()})
    return {name: np.asarray(value).astype(np.float64).tolist() for name, value in values.items()}


def _take_all(step: Callable[[], None], progress: EvaluationProgress) -> NoReturn:
    """Take step after step until the input ends, which is an error."""
    reported = time.monotonic()
    while True:
        step()
        progress.batches += 1
        if time.monotonic() > reported + _REPORT_SECS:
            reported = time.monotonic()
            log.info("evaluating: %d batches so far", progress.batches)


def evaluate_checkpoint(
    config: JobConfig, model: Model, path: str, progress: EvaluationProgress | None = None
) -> dict[str, Metric]:
    """Evaluate a checkpoint on this machine, without a cluster; see ``measure``.

    Raises:
        CheckpointError: If the checkpoint does not fit the model, or is damaged.
        ModelError: If no checkpoint can fit, because evaluation has a variable that training has not.
    """
    built = evaluation_graph(config, None, Task("worker", 0), model)
    task_log.enable()
    if built is None:
        raise ConfigError(f"--model={model.name} has nothing to evaluate on: input_fn(mode='eval') returned None.")
    with built.graph.as_default(), tf.Session(graph=built.graph) as session:
        try:
            restore.restore(session, path, tf.train.Saver())
        except CheckpointError:
            model_check.explain_misfit(config, model, ModeKeys.EVAL, built.graph)
            raise
        variable_check.check_numbers(model, ModeKeys.EVAL, built.graph, restore.shapes_in(path))
        return measure(session, built, progress)


def follow(
    config: JobConfig, cluster: Cluster, model: Model, stop: StopRequest, progress: EvaluationProgress | None = None
) -> None:
    """Run the evaluator: evaluate each intact checkpoint when it appears, until the job's summary exists.

    The evaluator is not part of the cluster: it sees the job only through ``--model_dir``.

    Raises:
        PeerLostError: If no PS answers, and no summary says that the job of the checkpoints has ended.
        StoppedError: If the task is asked to stop.
    """
    events = EventFile(JobDirectory(config.model_dir).evaluation_events if config.model_dir else None)
    finder, began = Finder(config.model_dir), _time_in(config.model_dir or "")
    last: str | None = None
    silence = _Silence(cluster, config.patience_secs)
    while True:
        over = has_ended_since(config, began, cluster, is_left=silence.is_long)
        path = finder.newest()
        if path and path != last:
            last = path
            try:
                _evaluate_one(config, model, path, events, progress)
            except CheckpointError:
                if path in list_checkpoints(config.model_dir):
                    raise
                log.info("%s was deleted in the meantime: using a newer one", path)
            silence.begin()  # nobody was asked meanwhile
            continue
        if over and not finder.may_read_more(config.patience_secs):
            break
        if not over:
            silence.check(stop)
        elif stop.error:
            raise stop.error
        time.sleep(_POLL_SECS)
    log.info("done")


def _evaluate_one(
    config: JobConfig, model: Model, path: str, events: EventFile, progress: EvaluationProgress | None
) -> None:
    log.info("evaluating %s", path)
    values = evaluate_checkpoint(config, model, path, progress)
    step = step_in(path)
    log.info(format_progress(step, {name: value for name, value in values.items() if isinstance(value, float)}))
    events.write(step, values)


def _time_in(model_dir: str) -> float:
    """Return the time by the file system's clock, or 0 if there is no directory yet, as all its files will be newer."""
    return file_clock.now(model_dir) if Path(model_dir).is_dir() else 0.0


class _Silence:
    """Since when no PS of a cluster has answered.

    Attributes:
        is_long: Whether that is longer than the job's patience.
    """

    def __init__(self, cluster: Cluster, patience_secs: float) -> None:
        self._cluster, self._patience_secs = cluster, patience_secs
        self.begin()

    def begin(self) -> None:
        """Begin to wait for an answer."""
        self.is_long, self._began = False, time.monotonic()

    def check(self, stop: StopRequest) -> None:
        """Ask the PS; raise the reason to stop if there is one, such as a silence that was long before."""
        if stop.error:
            raise stop.error
        cluster, patience_secs = self._cluster, self._patience_secs
        if len(rendezvous.missing(cluster, cluster.state_tasks)) < len(cluster.state_tasks):
            self.begin()
        elif self.is_long:
            who = "no PS has" if cluster.ps else "the chief has not"
            raise PeerLostError(
                f"{who} answered for {patience_secs:g} s, and --model_dir has no summary.json and checkpoints of a job "
                "that has ended."
            )
        self.is_long = time.monotonic() - self._began > patience_secs
