"""A job under a fault: started by ``tfps launch``, or task by task as platforms do it, and listened to."""

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import forked
import proc
from result import CLASSIC, TFPS
from timeline import Line

from tfps.cluster.ports import held_ports
from tfps.storage import read_json

_PREFIX = re.compile(r"((?:ps|worker|evaluator)/\d+) +\| (.*)")
_POLL_SECS = 0.02
_LAST_LINES_SECS = 10.0  # a reader ends with the job, unless a process that it has left behind holds the pipe
_END_SECS = 60.0  # for processes that were killed
_LONGEST_BACKOFF = 8
Flags = Mapping[str, object]


@dataclass(frozen=True)
class Size:
    """How many tasks a job has."""

    num_ps: int = 2
    num_workers: int = 2

    def tasks(self) -> list[str]:
        """Return their names, the PS first."""
        return [f"ps/{i}" for i in range(self.num_ps)] + [f"worker/{i}" for i in range(self.num_workers)]


def to_argv(flags: Flags) -> list[str]:
    """Return flags as a command line; without those that are ``None``."""
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def _forked(program: str, argv: Sequence[str]) -> tuple[ForkServerProcess, int]:
    """Start a program in a process of its own; returns that, and the descriptor of what it says."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=forked.be, args=(program, argv, theirs))
    process.start()
    theirs.close()
    said = os.dup(ours.fileno())
    ours.close()
    return process, said


class Launched:
    """A job of ``tfps launch``, which starts lost tasks again itself."""

    def __init__(self, size: Size, flags: Flags, lines: list[Line]) -> None:
        self.names, self._lines = size.tasks(), lines
        self._model_dir = Path(str(flags["model_dir"]))
        sizes = {"num_ps": size.num_ps, "num_workers": size.num_workers}
        self._process, said = _forked(TFPS, ["launch", *to_argv({**sizes, **flags})])
        self._reader = threading.Thread(target=self._read, args=(said,), daemon=True)
        self._reader.start()

    def _read(self, said: int) -> None:
        with open(said, errors="replace") as stream:
            for text in stream:
                match = _PREFIX.match(text)
                task, line = (match[1], match[2]) if match else ("", text.rstrip("\n"))
                self._lines.append(Line(time.monotonic(), task, line))

    @property
    def code(self) -> int | None:
        """The job's exit code, ``None`` while it runs; what it has said before is read then."""
        code = self._process.exitcode
        if code is not None:
            self._reader.join(_LAST_LINES_SECS)
        return code

    @property
    def codes(self) -> Mapping[str, int]:
        """The exit codes of the tasks, as the summary tells them."""
        reported = (read_json(self._model_dir / "summary.json") or {}).get("tasks", {})
        return {name: of["exit_code"] for name, of in reported.items() if of.get("exit_code") is not None}

    def pid(self, task: str) -> int | None:
        """Return a task's process, or the launcher's."""
        if task == "launcher":
            return self._process.pid
        return proc.holder(self._model_dir / "logs" / f"{task.replace('/', '-')}.log")

    def restarts(self, task: str) -> int:
        """Return how often a task was started again."""
        return sum(line.task == task and line.text.startswith("restarted") for line in self._lines)

    def port(self, task: str) -> int:
        """Return the port that a task listens on."""
        job, index = task.split("/")
        hosts = str((read_json(self._model_dir / "job.json") or {})[f"{job}_hosts"])
        return int(hosts.split(",")[int(index)].rpartition(":")[2])

    def close(self) -> None:
        """Hear the last words; the processes are ended by whoever counts them."""
        self._process.join(_END_SECS)
        if self._process.exitcode is None:
            raise RuntimeError("the launcher cannot be ended")
        self._reader.join(_LAST_LINES_SECS)


@dataclass
class _Task:
    """A task of a platform: its flags, its present process, and how it ended for good."""

    flags: Flags
    process: ForkServerProcess | None = None
    starts: int = 0
    again_at: float | None = None
    code: int | None = None


@dataclass(frozen=True)
class Lost:
    """What is done about a lost task: it is started again, so often, after a time that doubles up to 8 times it."""

    budget: int = 0
    backoff_secs: float = 1.0


@dataclass
class Platform:
    """Tasks of one program, each forked alone and started again alone; without a budget, as in so many shells."""

    program: str
    names: Sequence[str]
    flags_of: Callable[[str, Sequence[int]], Flags]
    lost: Lost
    lines: list[Line]
    leave_out: Collection[str] = ()
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _over: bool = False

    def __post_init__(self) -> None:
        self._ports = self._stack.enter_context(held_ports(len(self.names)))
        self._lock = threading.Lock()
        for name in self.names:
            if name not in self.leave_out:
                self.start(name)
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def start(self, name: str, **changed: object) -> None:
        """Start a task, anew with some flags changed."""
        with self._lock:
            self._tasks[name] = _Task({**self.flags_of(name, self._ports), **changed})
            self._start(name, self._tasks[name])

    def _start(self, name: str, task: _Task) -> None:
        verb = ["run"] if self.program == TFPS else []
        task.process, said = _forked(self.program, [*verb, *to_argv(task.flags)])
        task.starts, task.again_at = task.starts + 1, None
        threading.Thread(target=self._read, args=(name, said), daemon=True).start()

    def _read(self, name: str, fd: int) -> None:
        with open(fd, errors="replace") as stream:
            for text in stream:
                self.lines.append(Line(time.monotonic(), name, text.rstrip("\n")))

    def _keep(self) -> None:
        """Start lost tasks again until all is over."""
        while not self._over:
            with self._lock:
                for name, task in self._tasks.items():
                    self._look_after(name, task)
            time.sleep(_POLL_SECS)

    def _look_after(self, name: str, task: _Task) -> None:
        if task.code is not None or task.process is None:
            return
        if task.again_at is not None:
            if time.monotonic() >= task.again_at:
                self._start(name, task)
            return
        code = task.process.exitcode
        if code is None:
            return
        if self._is_worth_it(code) and task.starts <= self.lost.budget:
            task.again_at = time.monotonic() + self.lost.backoff_secs * min(2 ** (task.starts - 1), _LONGEST_BACKOFF)
        else:
            task.code = code

    def _is_worth_it(self, code: int) -> bool:
        """Return whether a task that ended so is started again: a code below 128 means that the job has failed."""
        failed = any(0 < (task.code or 0) < 128 for task in self._tasks.values())
        return bool(code) if self.program == CLASSIC else (code < 0 or code >= 128) and not failed

    @property
    def codes(self) -> Mapping[str, int]:
        """The exit codes of the tasks that have ended for good."""
        return {name: task.code for name, task in self._tasks.items() if task.code is not None}

    @property
    def code(self) -> int | None:
        """The first of the tasks' exit codes that is not 0, when all have ended; the classic script's PS never do."""
        awaited = [name for name in self._tasks if self.program == TFPS or name.startswith("worker")]
        codes = [self._tasks[name].code for name in awaited]
        known = [code for code in codes if code is not None]
        return None if len(known) < len(codes) else next((code for code in known if code), 0)

    def pid(self, task: str) -> int | None:
        """Return a task's process, if it has one that runs."""
        process = self._tasks[task].process if task in self._tasks else None
        return process.pid if process and process.pid and proc.alive(process.pid) else None

    def restarts(self, task: str) -> int:
        """Return how often a task was started again."""
        return self._tasks[task].starts - 1

    def port(self, task: str) -> int:
        """Return the port that a task listens on."""
        return self._ports[self.names.index(task)]

    def end_tasks(self) -> None:
        """Kill what runs, and start nothing again."""
        self._over = True
        self._keeper.join(5)
        proc.end([pid for name in self.names if (pid := self.pid(name))])

    def close(self) -> None:
        """Start nothing again; give the ports back."""
        self._over = True
        self._keeper.join(5)
        for task in self._tasks.values():
            if task.process is not None:
                task.process.join(_END_SECS)
        self._stack.close()


Job = Launched | Platform


def start(
    program: str, under: str, size: Size, flags: Flags, lost: Lost, lines: list[Line], leave_out: Collection[str]
) -> Job:
    """Start a job.

    Args:
        program: ``tfps`` or ``classic``.
        under: ``launch``, or else its tasks are started one by one.
        size: How many tasks.
        flags: tfps's, without those that say where the tasks are; the classic script gets its own from them.
        lost: What is done about lost tasks.
        lines: Gets what the job says.
        leave_out: Tasks that are not started; not by ``launch``.
    """
    if program == TFPS and under == "launch":
        return Launched(size, {**flags, "max_restarts": lost.budget}, lines)
    flags_of = (_classic_flags if program == CLASSIC else _tfps_flags)(size, flags)
    return Platform(program, size.tasks(), flags_of, lost, lines, leave_out)


def _tfps_flags(size: Size, flags: Flags) -> Callable[[str, Sequence[int]], Flags]:
    """Return what makes the flags of each ``tfps run``."""

    def of(name: str, ports: Sequence[int]) -> Flags:
        hosts = [f"127.0.0.1:{port}" for port in ports]
        job, index = name.split("/")
        ps, workers = ",".join(hosts[: size.num_ps]), ",".join(hosts[size.num_ps :])
        return {**flags, "ps_hosts": ps or None, "worker_hosts": workers, "job_name": job, "task_index": index}

    return of


def _classic_flags(size: Size, flags: Flags) -> Callable[[str, Sequence[int]], Flags]:
    """Return what makes the flags of each task of the classic script, from tfps's."""
    shared = {"model": "null", "mode": flags["mode"], "steps": flags["max_steps"], "every": 1}
    shared |= {"data_dir": flags["data_dir"], "variant": flags["model_dir"]}

    def of(name: str, ports: Sequence[int]) -> Flags:
        role, index = name.split("/")
        sizes = {"num_ps": size.num_ps, "num_workers": size.num_workers, "ports": ",".join(map(str, ports))}
        return {**shared, **sizes, "role": role, "index": index}

    return of
