"""Run the tasks of one job as processes, collect what they say and when, and end every one of them."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from usage import Sampler

_POLL_SECS = 0.05
_LINGER_SECS = 10.0  # what is left when the workers are done may take so long to end by itself


@dataclass(frozen=True)
class Task:
    """One process: its name (``worker/0``), role, command, and whether the job is over when it and its like end."""

    name: str
    role: str
    argv: Sequence[str]
    awaited: bool


@dataclass
class Output:
    """What a run said: lines with the Unix time they came at and the task; the cause of its failure, if it failed."""

    began: float
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    problem: str = ""


def run(
    tasks: Sequence[Task], env: Mapping[str, str], logs: Path, deadline_secs: float, lasts: bool
) -> tuple[Output, Sampler]:
    """Run tasks until the awaited ones have ended.

    Args:
        tasks: What to start, all at once.
        env: Variables on top of this process' own.
        logs: Directory for what they write to standard error.
        deadline_secs: When they are ended, and the run is called failed.
        lasts: Whether the tasks that are not awaited never end by themselves.
    """
    output = Output(time.time())
    processes = [(task, _started(task, env, logs)) for task in tasks]
    sampler = Sampler({process.pid: task.role for task, process in processes})
    readers = [threading.Thread(target=_read, args=(task, process, output), daemon=True) for task, process in processes]
    try:
        for reader in readers:
            reader.start()
        output.problem = _wait(processes, output.began + deadline_secs)
        if not lasts and not output.problem:
            _linger(processes)
    finally:
        for _, process in processes:
            _end(process)
        sampler.stop()
    for reader in readers:
        reader.join(timeout=5)
    if output.problem:
        output.problem += _last_words(tasks, logs)
    return output, sampler


def _started(task: Task, env: Mapping[str, str], logs: Path) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with _log(task, logs).open("w") as log:
        return subprocess.Popen(
            task.argv,
            env={**own, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def _log(task: Task, logs: Path) -> Path:
    return logs / f"{task.name.replace('/', '-')}.log"


def _read(task: Task, process: subprocess.Popen[str], output: Output) -> None:
    for line in process.stdout or ():
        output.lines.append((time.time(), task.name, line.rstrip("\n")))


def _wait(processes: Sequence[tuple[Task, subprocess.Popen[str]]], deadline: float) -> str:
    """Wait for the awaited tasks; returns the problem, if there is one."""
    while time.time() < deadline:
        for task, process in processes:
            if process.poll():
                return f"{task.name} ended with exit code {process.returncode}"
        if all(process.poll() == 0 for task, process in processes if task.awaited):
            return ""
        time.sleep(_POLL_SECS)
    return "not done in time"


def _linger(processes: Sequence[tuple[Task, subprocess.Popen[str]]]) -> None:
    until = time.time() + _LINGER_SECS
    while time.time() < until and any(process.poll() is None for _, process in processes):
        time.sleep(_POLL_SECS)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a task and its process group, which is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(tasks: Sequence[Task], logs: Path) -> str:
    """Return the last line of the first log that has one, after a colon."""
    for task in tasks:
        lines = _log(task, logs).read_text(errors="replace").strip().splitlines()
        if lines and "rror" in lines[-1]:
            return f": {task.name}: {lines[-1][:200]}"
    return ""
