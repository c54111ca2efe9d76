"""Report a worker's permanent failure to the PS when the worker did not reach them, or no longer can.

A worker that has joined the PS reports to them itself (``job_state``). Another may fail before it joins, because its
model is wrong or its data is missing, or it may be killed once too often. The PS would wait for it for a long time
where no launcher or platform ends them. So the supervisor of the worker reports the failure, in a separate process.
Only that process imports TensorFlow.

The PS of the job may come up after the worker has failed: the report waits for them. Meanwhile, a person or a script
may have mended the job and started it again at the same addresses. So nothing is reported to a PS whose process started
after the failure, as far as that is known (on the same machine), or if another process runs as that worker by then, at
the address that the supervisor or the PS have for it.
"""

import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tfps.cluster import probe, rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import TfpsError
from tfps.runtime.coordination import compatibility
from tfps.runtime.process import tensorflow_import
from tfps.runtime.process.process_identity import secs_since
from tfps.storage import JobDirectory

_MAX_SECS = 10.0
_POLL_SECS = 0.2
_BEGAN = time.monotonic()  # when the supervisor started, which imports this first


@dataclass(frozen=True)
class _Failure:
    """A worker's permanent failure.

    Attributes:
        task: The worker.
        code: Its exit code.
        began: When its supervisor started, by the clock of ``time.monotonic``.
        at: When its last process had ended, by the same clock.
    """

    task: Task
    code: int
    began: float
    at: float


def send(config: JobConfig, cluster: Cluster, task: Task, code: int) -> None:
    """Report to the PS of a worker's job that it has failed permanently; skip PS that do not answer soon.

    Nothing is reported to the PS of another job, or if another process now runs as that worker.

    Args:
        config: The worker's options.
        cluster: The cluster.
        task: The worker, whose process has ended.
        code: The worker's exit code.
    """
    failure = _Failure(task, code, _BEGAN, time.monotonic())
    if _runs(cluster.address(task), task):
        return
    process = multiprocessing.get_context("forkserver").Process(target=_send_and_exit, args=(config, cluster, failure))
    with _standard_error_dropped():  # the fork server keeps it, and imports TensorFlow, which writes there
        process.start()
    process.join(_MAX_SECS + 1.0)
    process.kill()


def _runs(address: str | None, task: Task) -> bool:
    return address is not None and probe.probe_address(address).task == task


@contextlib.contextmanager
def _standard_error_dropped() -> Iterator[None]:
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _send_and_exit(config: JobConfig, cluster: Cluster, failure: _Failure) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    tensorflow_import.load_v1()
    rendezvous.bypass_proxies(os.environ, cluster)
    thread = threading.Thread(target=_send_to_all, args=(config, cluster, failure), daemon=True)
    thread.start()
    thread.join(_MAX_SECS)
    os._exit(0)  # a session may wait without end


def _send_to_all(config: JobConfig, cluster: Cluster, failure: _Failure) -> None:
    """Report to each PS as soon as it is up and initialized; stop if they belong to another job."""
    for ps in [holder for holder in cluster.state_tasks if holder != failure.task]:
        is_reported = None
        while is_reported is None:
            with contextlib.suppress(Exception):  # not initialized yet, or exiting
                if _runs(cluster.address(ps), ps):
                    is_reported = _report(config, cluster, failure, ps)
            time.sleep(_POLL_SECS)
        if not is_reported:
            return


def _report(config: JobConfig, cluster: Cluster, failure: _Failure, ps: Task) -> bool:
    """Write minus the exit code as the worker's phase, if the PS is of this job; return whether it is."""
    import tensorflow.compat.v1 as tf  # noqa: PLC0415

    from tfps.runtime.coordination import job_variables  # noqa: PLC0415

    task = failure.task
    with tf.Graph().as_default() as graph:
        state = job_variables.ps_variables(cluster, ps.index)
        phase = state.phase.scatter_update(tf.IndexedSlices(-failure.code, task.index)).op
        terms = state.terms.read_value()
        run = job_variables.first_ps_variables(cluster).run.read_value() if ps.index == 0 else tf.constant("")
    options = tf.ConfigProto(device_filters=[ps.device])
    with tf.Session(f"grpc://{cluster.address(ps)}", graph=graph, config=options) as session:
        theirs, present_run = (value.decode() for value in session.run([terms, run]))
        own = compatibility.fingerprint(config, cluster, tf.__version__)
        ours = compatibility.is_same(own, theirs) and _is_of_run(config, task, present_run, failure.began)
        ours = ours and not compatibility.began_within(theirs, time.monotonic() - failure.at)
        places = (cluster.address(task), compatibility.address_of(task, theirs))
        ours = ours and not (ps.index == 0 and any(_runs(place, task) for place in places))  # others follow the first
        if ours:
            session.run(phase)
    return ours


def _is_of_run(config: JobConfig, task: Task, run: str, began: float) -> bool:
    """Return whether the PS hold a run of this chief's; for other workers, return True.

    The run may have begun after the chief's supervisor: then a process of that supervisor has begun it. Otherwise,
    ``--model_dir`` has to be of that run. It may be of another one by now, which is why the chief has failed.
    """
    if not task.is_chief or (run and secs_since(json.loads(run)["began"]) < time.monotonic() - began):
        return True
    try:
        has_run = not config.model_dir or JobDirectory(config.model_dir).has_run()
        compatibility.check_run(config.model_dir, run, "", has_run)
    except TfpsError:
        return False
    return True
