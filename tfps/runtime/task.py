"""Run one process as one task: a parameter server, a worker or the evaluator.

Importing this module does not import TensorFlow. Running a task does, after the logs are set up.
"""

import importlib.util
import os
from collections.abc import Callable

from tfps import malloc
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError, TfpsError
from tfps.runtime.process import tensorflow_import, thread_count
from tfps.runtime.process.shutdown import StopRequest, run_supervised
from tfps.timeouts import PS_BLOCKED_GRACE_SECS, PS_GRACE_SECS


def require_tensorflow() -> None:
    """Check that TensorFlow is installed, without importing it.

    Raises:
        ConfigError: If it is not.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigError("TensorFlow is not installed: pip install tensorflow (or tensorflow-cpu).")


def run(config: JobConfig, cluster: Cluster, task: Task, is_new_dir: bool, on_built: Callable[[], None]) -> None:
    """Run one task of a cluster until the job is done.

    Args:
        config: The job.
        cluster: The cluster.
        task: The task.
        is_new_dir: Whether ``--model_dir`` was made for this process, because none was given.
        on_built: Called when a worker has built its graphs, before it meets the other tasks.

    Raises:
        TfpsError: See the classes of ``tfps.errors``; a failed chief has written ``summary.json``.
    """
    num_workers = config.num_workers if config.serve else cluster.num_workers
    config = config.replace(num_ps=cluster.num_ps, num_workers=num_workers)  # for the model, whoever started this task
    stop = StopRequest()
    stop.on_signals()
    if config.serve:
        _serve(config, cluster, task, stop)
    elif task.job == "worker":
        _worker(config, cluster, task, stop, is_new_dir, on_built)
    else:
        {"ps": _ps, "evaluator": _evaluator}[task.job](config, cluster, task, stop)


def _ps(config: JobConfig, cluster: Cluster, task: Task, stop: StopRequest) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # else a PS would take all the memory of the workers' GPUs
    _set_up_memory(cluster, task)
    tensorflow_import.load_v1()
    from tfps.runtime.training import parameter_server  # noqa: PLC0415

    run_supervised(
        lambda: parameter_server.serve(config, cluster, task, stop), stop, grace_secs=lambda: PS_BLOCKED_GRACE_SECS
    )


def _serve(config: JobConfig, cluster: Cluster, task: Task, stop: StopRequest) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    tensorflow_import.load()
    from tfps.runtime.service import service_task  # noqa: PLC0415

    run_supervised(lambda: service_task.serve(config, cluster, task, stop), stop, grace_secs=lambda: PS_GRACE_SECS)


def _worker(
    config: JobConfig,
    cluster: Cluster,
    task: Task,
    stop: StopRequest,
    is_new_dir: bool = False,
    on_built: Callable[[], None] = lambda: None,
) -> None:
    _set_up_memory(cluster, task)
    tensorflow_import.load_v1()
    from tfps.models import loader  # noqa: PLC0415
    from tfps.runtime.coordination import compatibility  # noqa: PLC0415
    from tfps.runtime.training.worker import Worker  # noqa: PLC0415

    compatibility.keep_files(config.model)
    worker = Worker(config, cluster, task, loader.load(config.model), stop)
    stop.take_back_signals()
    worker.is_new_dir, worker.on_built = is_new_dir, on_built
    try:
        run_supervised(worker.work, stop, worker.watch, worker.emergency_save, worker.grace_secs)
    except TfpsError as error:
        if not worker.life.is_done:
            worker.fail(error)
            raise
    finally:
        worker.leave()


def _set_up_memory(cluster: Cluster, task: Task) -> None:
    """Set up the heap before TensorFlow starts its threads, because each of them would create another heap."""
    if malloc.keep_freed(heaps=thread_count.pool_sizes(cluster, task, overlap=True)[0] or 1):
        malloc.ask_for_large_pages()


def _evaluator(config: JobConfig, cluster: Cluster, task: Task, stop: StopRequest) -> None:
    del task
    tensorflow_import.load_v1()
    from tfps.models import loader  # noqa: PLC0415
    from tfps.runtime.results import evaluation, evaluation_progress  # noqa: PLC0415

    model, progress = loader.load(config.model), evaluation_progress.EvaluationProgress(config.stall_timeout_secs)
    stop.take_back_signals()
    run_supervised(lambda: evaluation.follow(config, cluster, model, stop, progress), stop, progress.error)
