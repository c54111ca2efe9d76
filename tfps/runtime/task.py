"""One process = one task: become a parameter server, a worker or the evaluator.

Importing this module does not import TensorFlow; being a task does, after the logs are in place.
"""

import importlib.util
import os
from collections.abc import Callable

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.errors import ConfigError, TfpsError
from tfps.runtime import loading, memory, threads
from tfps.runtime.stop import PS_GRACE_SECS, Stop, supervise


def require_tensorflow() -> None:
    """Make sure that TensorFlow is installed, without importing it.

    Raises:
        ConfigError: If it is not.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigError("TensorFlow is not installed: pip install tensorflow (or tensorflow-cpu).")


def load_tensorflow() -> None:
    """Import TensorFlow and make it behave as 1.x, with resource variables."""
    loading.load()  # after the logs are in place
    import tensorflow.compat.v1 as tf  # noqa: PLC0415

    tf.disable_v2_behavior()
    tf.enable_resource_variables()


def run(config: JobConfig, cluster: Cluster, task: Task, is_new_dir: bool, on_built: Callable[[], None]) -> None:
    """Be one task of a cluster until the job is done.

    Args:
        config: The job.
        cluster: The cluster.
        task: The task.
        is_new_dir: Whether ``--model_dir`` was made for this process, as none was given.
        on_built: Called when a worker has built its graphs, before it meets the others.

    Raises:
        TfpsError: See the classes of ``tfps.errors``; a failed chief has written ``summary.json``.
    """
    stop = Stop()
    stop.on_signals()
    if task.job == "worker":
        _worker(config, cluster, task, stop, is_new_dir, on_built)
    else:
        {"ps": _ps, "evaluator": _evaluator}[task.job](config, cluster, task, stop)


def _ps(config: JobConfig, cluster: Cluster, task: Task, stop: Stop) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # a PS would take all the memory of the workers' GPUs
    _set_up_memory(cluster, task)
    load_tensorflow()
    from tfps.runtime import ps  # noqa: PLC0415

    supervise(lambda: ps.serve(config, cluster, task, stop), stop, grace_secs=lambda: 2 * PS_GRACE_SECS)


def _worker(
    config: JobConfig,
    cluster: Cluster,
    task: Task,
    stop: Stop,
    is_new_dir: bool = False,
    on_built: Callable[[], None] = lambda: None,
) -> None:
    _set_up_memory(cluster, task)
    load_tensorflow()
    from tfps import models  # noqa: PLC0415
    from tfps.runtime.worker import Worker  # noqa: PLC0415

    worker = Worker(config, cluster, task, models.load(config.model), stop)
    worker.is_new_dir, worker.on_built = is_new_dir, on_built
    try:
        supervise(worker.work, stop, worker.watch, worker.last_will, worker.grace_secs)
    except TfpsError as error:
        worker.fail(error)
        raise
    finally:
        worker.leave()


def _set_up_memory(cluster: Cluster, task: Task) -> None:
    """Set up the heap before TensorFlow's threads are there, each of which would take one of its own."""
    if memory.keep_freed(heaps=threads.share(cluster, task, overlap=True)[0] or 1):
        memory.ask_for_large_pages()


def _evaluator(config: JobConfig, cluster: Cluster, task: Task, stop: Stop) -> None:
    del task
    load_tensorflow()
    from tfps import models  # noqa: PLC0415
    from tfps.runtime import evaluation  # noqa: PLC0415

    model = models.load(config.model)
    supervise(lambda: evaluation.follow(config, cluster, model, stop), stop)
