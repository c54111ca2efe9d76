"""Make figures of what a run said: all programs are measured the same way, in the steady state.

The time measured begins when every worker has passed the warm-up and ends with the last step of a curve: the job's one
count of steps, or of the programs whose workers count their own, all of these.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from processes import Output
from programs import Program
from usage import Sampler
from workloads import Workload

_TFPS_LINE = re.compile(r"step=(\d+)(?: \S+)* loss=")  # and not eval/loss
_LOGGED = re.compile(rf"(\S+ \S+),(\d+) {_TFPS_LINE.pattern}")


@dataclass
class Result:
    """One run: ``value`` in the workload's unit, CPU seconds per 1,000 worker steps and peak MB by role."""

    workload: str
    program: str
    round: int
    value: float = 0.0
    cpu_secs: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    measured_secs: float = 0.0
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Mark:
    """A worker was at a step at a Unix time."""

    time: float
    task: str
    step: int


def events(output: Output) -> list[Mapping[str, Any]]:
    """Return the JSON lines of a run, each with its task; tfps's progress lines become marks."""
    found: list[Mapping[str, Any]] = []
    for when, task, line in output.lines:
        told = _TFPS_LINE.match(line)
        if told:
            found.append({"event": "mark", "time": when, "task": task, "step": int(told[1])})
        elif line.startswith('{"event"'):
            found.append({"task": task, **json.loads(line)})
    return found


def logged(logs: Path) -> list[Mapping[str, Any]]:
    """Return the marks of tfps's workers in their logs: ``tfps launch`` shows the job's progress alone."""
    found: list[Mapping[str, Any]] = []
    for log in sorted(logs.glob("worker-*.log")):
        for told in filter(None, map(_LOGGED.match, log.read_text(errors="replace").splitlines())):
            when = datetime.strptime(told[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(told[2]) / 1_000
            found.append({"event": "mark", "time": when, "task": log.stem, "step": int(told[3])})
    return found


def marks(found: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the marks in the order of time."""
    made = [Mark(event["time"], event["task"], event["step"]) for event in found if event["event"] == "mark"]
    return sorted(made, key=lambda mark: mark.time)


def fill(
    result: Result, workload: Workload, program: Program, output: Output, sampler: Sampler, seen: Sequence[Mark]
) -> None:
    """Measure a run, or say why it cannot be."""
    started = {mark.task for mark in reversed(seen)}
    leaders = 1 if started <= {"chief/0"} else workload.num_workers  # of some programs only the chief speaks
    if len(started) < leaders:
        result.problem = f"only {len(started)} of {workload.num_workers} workers took steps"
        return
    if workload.unit == "s":
        result.value = max(min(m.time for m in seen if m.task == task) for task in started) - output.began
        return
    curves = _curves(seen, program.own_steps)
    since, until = _window(workload, seen, curves)
    if until - since <= 0:
        result.problem = "too short to be measured: no time is left after the warm-up"
        return
    steps = sum(float(np.diff(np.interp([since, until], *curve))[0]) for curve in curves)
    if workload.mode == "sync" and not program.own_steps:
        steps *= workload.num_workers
    _rate(result, workload, steps, until - since)
    used = sampler.cpu_secs(since, until)
    result.cpu_secs = {role: secs / steps * 1_000 for role, secs in used.items()}
    result.peak_mb = dict(sampler.peak_mb(until))


def _curves(seen: Sequence[Mark], own_steps: bool) -> list[tuple[list[float], list[float]]]:
    """Return (times, steps) of what was counted: the whole job, or each worker."""
    by_count = defaultdict(list)
    for mark in seen:
        by_count[mark.task if own_steps else "job"].append(mark)
    made = []
    for counted in by_count.values():
        steps = np.maximum.accumulate([mark.step for mark in counted])
        made.append(([mark.time for mark in counted], [float(step) for step in steps]))
    return made


def _window(workload: Workload, seen: Sequence[Mark], curves: Sequence[Any]) -> tuple[float, float]:
    """Return when the steady state begins and ends."""
    tasks = {mark.task for mark in seen}
    warm = [[mark.time for mark in seen if mark.task == task and mark.step >= workload.warmup] for task in tasks]
    since = max(times[0] if times else float("inf") for times in warm)
    ends = [times[int(np.argmax(steps))] for times, steps in curves]
    return since, min(ends)


def _rate(result: Result, workload: Workload, steps: float, secs: float) -> None:
    result.measured_secs = secs
    if workload.unit == "ms":
        result.value = 1_000 * secs / steps * workload.num_workers
        return
    per_step = 2 * workload.mb / 1e3 if workload.mb else workload.batch_size
    result.value = steps * per_step / secs
