"""Supervise one task where no launcher sees all of them: in its own container, on a host, in a step of Slurm.

``tfps run --max_restarts=N`` runs this: a small process that starts the task in another one, and again when it is lost
or ends with a code of 128 or more. A platform takes long for a restart: it makes a new container, imports TensorFlow
again, and waits for minutes before it retries. Here the task is forked from a process that has imported TensorFlow, by
``launchers.local.job``, which also kills a task that gives no sign of life.

The task's output is passed on unchanged; what a stuck reader does not take is left out (``jobs.output``). SIGTERM,
SIGINT and SIGHUP go to the task: it saves, and is not restarted.
"""

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.config.job_config import JobConfig
from tfps.errors import RetryableError, StoppedError, stopping_signals
from tfps.jobs.events import LogLine, TaskExited, TaskRestarted, TaskStalled
from tfps.jobs.output import Output
from tfps.launchers.local.job import LocalJob
from tfps.launchers.local.plan import Plan
from tfps.launchers.local.restart_policy import Alone
from tfps.storage import JobDirectory, temporary_directory
from tfps.timeouts import SECOND_THOUGHT_SECS, TASK_END_SECS

# The task's own lines about its state; a model's output does not match.
_TRAINS = re.compile(r"training: (mode \w.*, [\d,]+ workers?, [\d,]+ ps\b.*|serving [\d,]+ workers?)")


class Supervisor:
    """Follows one task to its end.

    Attributes:
        stop_requested: Whether a signal has asked it to stop.
    """

    def __init__(self, config: JobConfig, cluster: Cluster, task: Task) -> None:
        self._config, self._task = config, task
        given = config.for_task(job_name=task.job, task_index=task.index, ps_hosts=None, worker_hosts=None)
        self._plan = Plan(config, {task: [*given.to_argv(), *hosts_flags(cluster)]})
        self._policy = Alone(task, config.max_restarts or 0)
        self._job: LocalJob | None = None
        self._output = Output()
        self.stop_requested = False
        self._stop_requested_at = 0.0

    def run(self) -> int:
        """Run the task, with its restarts; return its last exit code, for a signal as shells do.

        Raises:
            ConfigError: If TensorFlow cannot be imported.
            KilledError: If a signal killed the import more often than a restart is allowed.
            StorageError: If the task's log cannot be written.
        """
        for number in stopping_signals():
            signal.signal(number, self._on_signal)
        with _log_of(self._config, self._task) as log, contextlib.closing(self._output):
            self._job = LocalJob(self._plan, self._policy, log)
            if self.stop_requested:
                self._job.cancel()
            return self._see_through(self._job)

    def has_reported(self, code: int) -> bool:
        """Return whether the task itself has reported to the PS that it has ended for good with this code."""
        return self.stop_requested or (code < RetryableError.exit_code and self._policy.has_trained)

    def _see_through(self, job: LocalJob) -> int:
        code = -signal.SIGTERM  # for a task that has not begun
        for event in job.events():
            if isinstance(event, (LogLine, TaskRestarted, TaskStalled)):
                self._pass_on(event.text)
            elif isinstance(event, TaskExited):
                for number in stopping_signals():  # also while Python ends: the exit code is known
                    signal.signal(number, signal.SIG_IGN)
                code = event.exit_code
                if event.error:
                    self._pass_on(f"error: {event.error}")
        if self.stop_requested and code == -signal.SIGTERM:  # it had no signal handler yet
            return StoppedError.exit_code
        return code if code >= 0 else 128 - code

    def _pass_on(self, text: str) -> None:
        if _TRAINS.fullmatch(text):
            self._policy.trained()
        with contextlib.suppress(OSError):  # the reader may be gone
            self._output.write(text)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        is_late = self.stop_requested and now - self._stop_requested_at > SECOND_THOUGHT_SECS
        if self._job and is_late and number == signal.SIGINT:
            self._job.kill()
        elif self._job:
            self._job.cancel()
        self._output.hurry(TASK_END_SECS)
        self._stop_requested_at = self._stop_requested_at if self.stop_requested else now
        self.stop_requested = True


@contextlib.contextmanager
def _log_of(config: JobConfig, task: Task) -> Iterator[Path]:
    """Yield the file for TensorFlow's output during its import: the task's own log, if it has one."""
    if config.model_dir:
        yield JobDirectory(config.model_dir).log(str(task))
        return
    handle, name = tempfile.mkstemp(prefix="tfps-", suffix=".log", dir=temporary_directory())
    os.close(handle)
    try:
        yield Path(name)
    finally:
        os.unlink(name)
