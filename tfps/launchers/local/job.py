"""A job on this machine.

TensorFlow is imported once, in a fork server (``fork_server``), and every task is forked from it: a task starts in a
fraction of a second. Worker 0 starts first, and the others follow when it has built its graph: an error in the model
is reported once, before there is a cluster. Ports are picked without a race. ``tfps launch`` binds each, and holds it
until the tasks have ended, so the kernel gives it to no other process. With ``SO_REUSEADDR``, and because nobody
listens on it yet, gRPC can bind it too.

Each task runs the same command as anywhere else, ``python -m tfps run FLAGS``; ``str(plan)`` shows them.

A task that is lost, or ends with a code for which a restart may help, is restarted up to ``--max_restarts`` times
(``restart_policy``). A task that gives no sign of life (``life_signs``) is killed, and thereby lost. If a PS is lost,
all other PS are restarted, because their variables are useless without its variables, and so are workers that are done.
"""

import contextlib
import errno
import os
import selectors
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tfps.cluster.spec import Task
from tfps.config.launch_protocol import BUILT, HAS_RECORD, LAUNCH, RECORDED, STARTED_AGAIN
from tfps.errors import ConfigError, PeerLostError, RetryableError, error_for_limits
from tfps.jobs.events import JobEvent, LogLine, TaskExited, TaskRestarted, TaskStalled, how_it_ended
from tfps.jobs.handle import RunningJob
from tfps.launchers.local import task_process
from tfps.launchers.local.fork_server import ForkServer
from tfps.launchers.local.life_signs import LifeSigns
from tfps.launchers.local.output import TaskOutput
from tfps.launchers.local.plan import Plan
from tfps.launchers.local.restart_policy import RestartPolicy
from tfps.launchers.local.silent_ends import SilentEnds, put_end_of_file_at
from tfps.launchers.local.tensorflow_start import imported
from tfps.storage import JobDirectory, place_of
from tfps.timeouts import KILL_AFTER_SECS, STALLED_AFTER_SECS

_MAX_RESTARTS = 5
_SERVER_ENDED = 255  # the exit code of a process, for multiprocessing, if the fork server cannot report it


class LocalJob(RunningJob):
    """The tasks of a job on this machine; ``events`` starts them.

    Args:
        plan: The tasks.
        restarts: The policy for restarts; by default that of ``--max_restarts``.
        log: The file for TensorFlow's output during its import; by default ``launch.log`` among the job's logs.
    """

    def __init__(self, plan: Plan, restarts: RestartPolicy | None = None, log: Path | None = None) -> None:
        self._plan = plan
        self._server = ForkServer(log or JobDirectory(plan.config.model_dir or ".").launcher_log)
        self._processes: dict[Task, ForkServerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._kill_at: float | None = None
        self._signs = LifeSigns()
        self._silent = SilentEnds(self._server)
        budget = _MAX_RESTARTS if plan.config.max_restarts is None else plan.config.max_restarts
        self._restarts = RestartPolicy(plan.commands, budget) if restarts is None else restarts
        self._given_up: list[TaskExited] = []
        self._lost_with: dict[Task, Task] = {}  # PS that were killed, and the PS whose loss was the reason
        self._id = uuid.uuid4().hex
        self._started: set[Task] = set()
        self._recorded: dict[Task, str] = {}  # they have written the id to this --model_dir
        self._not_begun: list[Task] = []  # they wait until worker 0 has built its graph

    def _start(self, task: Task) -> None:
        try:
            process, ours, life = self._forked(task)
        except (EOFError, ConnectionError):
            raise self._server.ended() from None
        except OSError as error:
            if limit := error_for_limits(error):
                raise limit from None
            fix = "raise the limit on open files, see ulimit -n" if error.errno == errno.EMFILE else "see the machine"
            raise ConfigError(f"{task} cannot be started: {error.strerror}: {fix}.") from None
        self._restarts.began(task)
        self._started.add(task)
        self._signs.began(task, process.pid)
        os.set_blocking(life.fileno(), False)
        self._processes[task] = process
        output = TaskOutput(task, ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._said(output))
        self._selector.register(life, selectors.EVENT_READ, lambda: self._lives(task, life))
        self._selector.register(process.sentinel, selectors.EVENT_READ, lambda: self._ended(output, process, life))
        if self._kill_at:  # a signal came meanwhile
            self._signal(signal.SIGTERM, task)

    def _forked(self, task: Task) -> tuple[ForkServerProcess, Connection, Connection]:
        """Return a task's process, the connection with its output, and the one with its signs of life."""
        context = self._server.context
        ours, theirs = context.Pipe()
        life, sign = context.Pipe(duplex=False)
        given = list(self._plan.commands[task]), theirs, sign, self._environment(task)
        process = context.Process(target=task_process.task_main, args=given, name=str(task), daemon=True)
        process.start()
        theirs.close()
        sign.close()
        return process, ours, life

    def _environment(self, task: Task) -> Mapping[str, str]:
        """Return the variables of ``launch_protocol`` for a new process of a task."""
        again = {STARTED_AGAIN: "1"} if task in self._started else {}
        recorded = {HAS_RECORD: self._recorded[task]} if task in self._recorded else {}
        return {LAUNCH: self._id, **again, **recorded}

    def events(self, every_secs: float = 0.25) -> Iterator[JobEvent | None]:
        """Start every task; yield its lines and its end, until all have ended.

        Yields ``None`` when nothing happened for a while.

        Raises:
            ConfigError: If TensorFlow cannot be imported.
            KilledError: If a signal killed the import more often than a restart is allowed.
            StorageError: If the log of its import cannot be written.
        """
        first = next(iter(self._plan.commands))
        yield from imported(self._server, self._restarts, first, lambda: self._kill_at is not None, every_secs)
        if self._kill_at is None:
            self._begin()
        while self._selector.get_map() or self._restarts or self._given_up:
            while self._given_up:
                yield self._given_up.pop()
            ready = self._selector.select(every_secs)
            for key, _ in ready:
                yield from key.data()
            if self._kill_at and time.monotonic() > self._kill_at:
                self.kill()
            yield from self._kill_stalled()
            self._give_up_silent()
            self._start_those_due()
            if not ready:
                yield None
        self._server.end()

    def _begin(self) -> None:
        """Start worker 0, or all tasks if the job has no worker 0."""
        first = Task("worker", 0)
        self._not_begun = [task for task in self._plan.commands if task != first]
        if first in self._plan.commands:
            self._start(first)
        else:
            self._start_others()

    def _start_others(self) -> None:
        while self._not_begun:
            self._start(self._not_begun.pop(0))

    def _lives(self, task: Task, life: Connection) -> Iterator[LogLine]:
        """Read a task's signs of life; an end of file means that it has ended."""
        with contextlib.suppress(BlockingIOError):
            if not self._took_sign(task, life):
                self._forget(life)
                self._silent.closed(task, self._processes[task].pid)
        yield from ()

    def _took_sign(self, task: Task, life: Connection) -> bool:
        """Read a task's pending signs; return whether there were any."""
        signs = b"" if life.closed else os.read(life.fileno(), 1 << 10)
        self._signs.take(task, signs)
        if BUILT in signs:
            self._start_others()
        if RECORDED in signs:
            self._recorded[task] = str(place_of(self._plan.config.model_dir or ""))
        return bool(signs)

    def _forget(self, life: Connection) -> None:
        """Stop reading the signs of a process that has ended; one that it left behind may hold the other end."""
        if not life.closed:
            self._selector.unregister(life)
            life.close()

    def _kill_stalled(self) -> Iterator[TaskStalled]:
        """Kill tasks that give no sign of life; yield an event for each."""
        for task in self._signs.stalled():
            yield TaskStalled(task, STALLED_AFTER_SECS)
            self._signal(signal.SIGKILL, task)

    def _give_up_silent(self) -> None:
        """Stop waiting for tasks whose end nobody reports: each looks as if the fork server had ended."""
        for task in self._silent.act():
            self._silent.reported(task)
            sentinel = self._processes[task].sentinel
            ends = self._selector.unregister(sentinel).data
            put_end_of_file_at(sentinel)  # so multiprocessing does not wait for it either
            self._selector.register(sentinel, selectors.EVENT_READ, ends)

    def _start_those_due(self) -> None:
        for task in self._restarts.due():
            self._start(task)

    def _said(self, output: TaskOutput) -> Iterator[LogLine]:
        yield from (LogLine(output.task, text) for text in output.read())
        if output.at_end:
            self._selector.unregister(output.connection)

    def _ended(self, output: TaskOutput, process: ForkServerProcess, life: Connection) -> Iterator[JobEvent]:
        """Yield a task's last lines and its end; kill the processes that it left behind."""
        self._selector.unregister(process.sentinel)
        process.join()
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each task has its own process group
        while not output.at_end and (lines := output.read()):
            yield from (LogLine(output.task, text) for text in lines)
        if not output.at_end:
            self._selector.unregister(output.connection)
        with contextlib.suppress(BlockingIOError):  # a process that it left behind holds the other end
            while self._took_sign(output.task, life):
                pass
        self._forget(life)
        self._signs.ended(output.task)
        self._silent.reported(output.task)
        lost_with = self._lost_with.pop(output.task, None)
        is_done = process.exitcode == _SERVER_ENDED and output.task in self._signs.signed_off
        code = 0 if is_done else process.exitcode or 0
        yield from self._replaced(output.task, code, lost_with)
        if self._plan.holds_state(output.task) and output.task in self._restarts and not lost_with:
            self._end_other_ps(output.task)
            yield from self._recalled(output.task)

    def _replaced(self, task: Task, code: int, lost_with: Task | None) -> Iterator[TaskRestarted | TaskExited]:
        """Schedule a restart of a task that has ended, if that may help and its budget allows it; yield the event.

        A task that ends with 0 but has not signed off is lost, too: something in it has ended the process.
        """
        if lost_with and not self._kill_at:
            self._restarts.recall(task)
            yield TaskRestarted(task, f"the loss of {lost_with}")
            return
        if task.job == "ps" and Task("worker", 0) in self._signs.signed_off and not lost_with and not self._kill_at:
            yield TaskExited(task, 0)  # the chief is the last to sign off: there is nothing left to lose
            return
        early = code == 0 and task not in self._signs.signed_off
        grant = None if self._kill_at else self._restarts.grant(task, RetryableError.exit_code if early else code)
        how = f"{how_it_ended(code)}{' before it was done' if early else ''}"
        if grant is not None:
            because = "as others were lost" if grant.used is None else ""
            yield TaskRestarted(task, how, grant.used, grant.budget, because)
        elif early:
            yield TaskExited(task, PeerLostError.exit_code, f"ended with {how}")
        else:
            yield TaskExited(task, code)

    def _end_other_ps(self, lost: Task) -> None:
        """Kill the other PS: otherwise a worker would have to return first, and notice that one lacks its variables."""
        for task in [task for task, code in self.status().items() if code is None and task.job == "ps"]:
            self._lost_with[task] = lost
            self._signal(signal.SIGKILL, task)

    def _recalled(self, lost: Task) -> Iterator[TaskRestarted]:
        """Schedule restarts of finished workers: the job may restart from a checkpoint, and then needs all of them.

        A worker that has signed off but still runs is restarted when it has ended.
        """
        for task in [task for task in self._signs.signed_off if task.job == "worker"]:
            if self.status()[task] is None:
                self._lost_with[task] = lost
            elif self.status()[task] == 0 and task not in self._restarts:
                self._restarts.recall(task)
                yield TaskRestarted(task, how_it_ended(0), because=self._plan.why_recalled)

    @property
    def restarts(self) -> Mapping[Task, int]:
        """Number of times that each task was started again."""
        return self._restarts.counts

    def status(self) -> Mapping[Task, int | None]:
        """Return each task's exit code, ``None`` while it runs."""
        return {task: process.exitcode for task, process in self._processes.items()}

    def cancel(self) -> None:
        """Ask every task to save and end; those that still run after a while are killed."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + KILL_AFTER_SECS
            self._not_begun.clear()
            self._given_up += [TaskExited(task, code) for task, code in self._restarts.give_up().items()]
            self._server.wake()  # it could be stopped, and then a start of a task blocks
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill every task immediately."""
        self._signal(signal.SIGKILL)
        for task in [task for task, code in self.status().items() if code is None]:
            self._silent.killed(task)

    def _signal(self, number: int, task: Task | None = None) -> None:
        for process in [self._processes[task]] if task else self._processes.values():
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
