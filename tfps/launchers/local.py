"""A whole cluster on this machine.

TensorFlow is imported once, in a fork server (``multiprocessing``'s), and every task is forked from it: a task starts
in a fraction of a second. Ports are picked without a race: each is bound here, and held until the tasks have ended,
so the kernel gives it to nobody else; with ``SO_REUSEADDR``, and as nobody listens on it yet, gRPC can bind it too.

Each task is the very command of a task anywhere else, ``python -m tfps run FLAGS``; ``str(plan)`` shows them.
"""

import contextlib
import multiprocessing
import os
import runpy
import selectors
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.launchers.handle import Exited, Line
from tfps.report import make_dir

PRELOAD = ["tfps.runtime.preload", "tfps.runtime.worker", "tfps.runtime.ps", "tfps.models.mnist", "tfps.models.linear"]
KILL_AFTER_SECS = 12.0  # tasks promise to be gone in 10 s


@dataclass(frozen=True)
class Plan:
    """The tasks of a job and the arguments of ``tfps run`` for each."""

    config: JobConfig
    commands: Mapping[Task, Sequence[str]]

    def __str__(self) -> str:
        return "\n".join(shlex.join(["tfps", "run", *argv]) for argv in self.commands.values())


def plan(config: JobConfig, ports: Sequence[int]) -> Plan:
    """Return the plan of a job whose tasks listen on ``ports``, the PS first."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    num_ps = config.num_ps or 1
    cluster = Cluster(tuple(addresses[:num_ps]), tuple(addresses[num_ps:]))
    given = config.replace(
        num_ps=None, num_workers=None, ps_hosts=",".join(cluster.ps), worker_hosts=",".join(cluster.workers)
    )
    return Plan(config, {t: given.replace(job_name=t.job, task_index=t.index).to_argv() for t in cluster.tasks()})


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Pick free ports that nobody else is given while the context lasts."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for holder in holders:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # gRPC's releases differ in which they set
                holder.setsockopt(socket.SOL_SOCKET, option, 1)
            holder.bind(("", 0))
        yield [holder.getsockname()[1] for holder in holders]


def submit(plan: Plan) -> "LocalJob":
    """Start every task of a plan."""
    return LocalJob(plan)


class LocalJob:
    """The running tasks of a job on this machine."""

    def __init__(self, plan: Plan) -> None:
        """Start every task."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: dict[Task, ForkServerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._kill_at: float | None = None
        log = Path(plan.config.model_dir or ".") / "logs" / "launch.log"
        make_dir(log.parent)
        with _standard_error_to(log), _sigterm_ignored():
            forkserver.ensure_running()  # TensorFlow's noise goes to the log, signals to the whole group pass it by
        for task, argv in plan.commands.items():
            self._start(task, argv)

    def _start(self, task: Task, argv: Sequence[str]) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_be_task, args=(list(argv), theirs), name=str(task), daemon=True)
        process.start()
        theirs.close()
        self._processes[task] = process
        output = _Output(task, ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._said(output))
        self._selector.register(process.sentinel, selectors.EVENT_READ, lambda: self._ended(output, process))

    def events(self, every_secs: float = 0.25) -> Iterator[Line | Exited | None]:
        """Yield what the tasks say and how they end, until all have; ``None`` when nothing happened for a while."""
        while self._selector.get_map():
            ready = self._selector.select(every_secs)
            for key, _ in ready:
                yield from key.data()
            if self._kill_at and time.monotonic() > self._kill_at:
                self.kill()
            if not ready:
                yield None

    def _said(self, output: "_Output") -> Iterator[Line]:
        yield from (Line(output.task, text) for text in output.read())
        if output.at_end:
            self._selector.unregister(output.connection)

    def _ended(self, output: "_Output", process: ForkServerProcess) -> Iterator[Line | Exited]:
        """Yield a task's last words and its end; a process that it left behind may hold the connection open."""
        self._selector.unregister(process.sentinel)
        process.join()
        while not output.at_end and (lines := output.read()):
            yield from (Line(output.task, text) for text in lines)
        if not output.at_end:
            self._selector.unregister(output.connection)
        yield Exited(output.task, process.exitcode or 0)

    def status(self) -> Mapping[Task, int | None]:
        """Return each task's exit code, ``None`` while it runs."""
        return {task: process.exitcode for task, process in self._processes.items()}

    def cancel(self) -> None:
        """Ask every task to save and end; those that have not after a while are killed."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + KILL_AFTER_SECS
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every task at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _Output:
    """The output of one task, read as lines without waiting."""

    def __init__(self, task: Task, connection: Connection) -> None:
        self.task, self.connection = task, connection
        self.at_end = False
        self._rest = b""
        os.set_blocking(connection.fileno(), False)

    def read(self) -> list[str]:
        """Return the whole lines that have come; at the end, also one without an end of line."""
        try:
            data = os.read(self.connection.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.at_end = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.at_end and self._rest:
            lines, self._rest = [self._rest], b""
        return [line.decode(errors="replace") for line in lines]


@contextlib.contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Let processes started inside write their standard error to a file."""
    with open(path, "ab") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Let processes started inside ignore SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _be_task(argv: list[str], launcher: Connection) -> None:
    """Run in the forked process: be the command ``tfps run ARGV``, its output sent to the launcher."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # Ctrl-C is for the launcher, which ends the tasks in order
    for number in (1, 2):
        os.dup2(launcher.fileno(), number)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for name in [n for n in os.environ if n == "TF_CONFIG" or n.startswith("SLURM_")]:
        del os.environ[name]
    sys.argv = ["tfps", "run", *argv]
    runpy.run_module("tfps", run_name="__main__")


def _end_with(launcher: Connection) -> None:
    """Wait for the launcher's end of the connection to close, which is all that it ever does; then end in order."""
    with contextlib.suppress(OSError):
        os.read(launcher.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
